"""Build all cases of one world size: `python -m tests.corpus.build --out DIR` on every rank.

With `--only NAME ...` only those; `tests.corpus.ranks.run_ranks` starts it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.corpus import CASES, Spec
from tests.corpus.case import truth_file

COLLECTIVE_TIMEOUT_S = 120


def build(spec: Spec, out: Path, rank: int) -> None:
    """One case: rank 0 makes its folder, every rank writes, rank 0 keeps what training made."""
    path = out / spec.name / spec.file
    if rank == 0:
        (out / spec.name).mkdir(parents=True)
    dist.barrier()
    gathered = spec.write(path)
    dist.barrier()
    if rank == 0 and gathered is not None:
        truth = {"model": dict(gathered.model), "optimizer": dict(gathered.optimizer)}
        torch.save(truth, truth_file(out, spec.name))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=int(os.environ["WORLD_SIZE"]))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=None)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the writers' own deprecations
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    rank = dist.get_rank()
    for spec in sorted(CASES.values(), key=lambda spec: spec.shimmed):
        if spec.world_size == options.world_size and (
            options.only is None or spec.name in options.only
        ):
            start = time.perf_counter()
            print(f"{spec.name} ...", flush=True)
            build(spec, options.out, rank)
            print(f"{spec.name} {time.perf_counter() - start:.2f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
