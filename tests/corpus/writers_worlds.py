"""One small model at any number of ranks, in five forms: `python -m ... --out DIR` on each rank.

dcp/        FSDP2, model and optimizer, DCP            dtensor/  FSDP2, raw rank files of both
sharded/    FSDP1, SHARDED_STATE_DICT and raw optimizer state, flat
flat/       FSDP1, LOCAL_STATE_DICT and raw optimizer state; named/ the same, use_orig_params
fsdp1.truth, fsdp2.truth    what each held, gathered by torch
"""

from __future__ import annotations

import argparse
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from tests.corpus.case import Gathered
from tests.corpus.models import Recipe, optimizer_for, tiny, train
from tests.corpus.writers_fsdp1 import gathered as gathered_fsdp1
from tests.corpus.writers_fsdp1 import sharded_type, wrapped
from tests.corpus.writers_fsdp1_local import local_state
from tests.corpus.writers_fsdp2 import gathered, rank_file, sharded

SMALL = Recipe(vocab=301, hidden=24, ffn=37, layers=2)
"""301 and 37 rows over any, 24 over 5: uneven; 3 rows over 5 or 8: ranks without any."""


def save_truth(path: Path, found: Gathered) -> None:
    if dist.get_rank() == 0:
        torch.save({"model": dict(found.model), "optimizer": dict(found.optimizer)}, path)


def in_files(folder: Path, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model, rank_file(folder))
    torch.save(optimizer, rank_file(folder, "optim"))


def fsdp2(out: Path) -> None:
    model = sharded(tiny(SMALL))
    optimizer = optimizer_for(model)
    train(model, optimizer, steps=1)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    save_dcp(state, checkpoint_id=out / "dcp")
    in_files(out / "dtensor", model.state_dict(), optimizer.state_dict())
    save_truth(out / "fsdp2.truth", gathered(model, optimizer))


def fsdp1(out: Path, orig: bool) -> None:
    model = wrapped(tiny(SMALL), orig)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, steps=1)
    in_files(out / ("named" if orig else "flat"), local_state(model), optimizer.state_dict())
    if not orig:
        sharded_type(model)
        in_files(out / "sharded", model.state_dict(), optimizer.state_dict())
        save_truth(out / "fsdp1.truth", gathered_fsdp1(model, optimizer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the writers' own deprecations
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    out.mkdir(parents=True, exist_ok=True)
    fsdp2(out)
    fsdp1(out, orig=False)
    fsdp1(out, orig=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
