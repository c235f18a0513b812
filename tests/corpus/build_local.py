"""Build the cases of the table LOCAL, or RAW: `python -m tests.corpus.build_local --out DIR` on each rank.

With LOCAL's, `replicas`: the same model as DCP, whole on every rank, each tensor written by one; and
`llama-orig`, `llama-flat`: a tied transformers model, without anything beside it. With `--only NAME ...`
only those of a table.
"""

from __future__ import annotations

import argparse
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from tests.corpus.build import COLLECTIVE_TIMEOUT_S, build
from tests.corpus.models import tiny, tiny_llama
from tests.corpus.writers_fsdp1 import wrapped
from tests.corpus.writers_fsdp1_local import LOCAL, RAW, local_state
from tests.corpus.writers_fsdp2 import rank_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", choices=("local", "raw"), default="local")
    parser.add_argument("--only", nargs="*", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the writers' own deprecations
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    for spec in (RAW if options.table == "raw" else LOCAL).values():
        if spec.world_size == dist.get_world_size() and (
            options.only is None or spec.name in options.only
        ):
            build(spec, options.out, dist.get_rank())
    if options.table == "local" and options.only is None:
        save_dcp(dict(tiny().state_dict()), checkpoint_id=options.out / "replicas")
        for name, orig in (("orig", True), ("flat", False)):
            folder = options.out / f"llama-{name}"
            folder.mkdir(exist_ok=True)
            torch.save(local_state(wrapped(tiny_llama(tied=True), orig)), rank_file(folder))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
