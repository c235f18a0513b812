"""Under torchrun: load our outputs into a live FSDP1 model with torch alone, under each
StateDictType.

`python -m tests.ranks.fsdp1 FULL.pt DCP TRUTH`: a `full` file, an `fsdp1` directory, and what both
must hold. The live model has other values before.
"""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from tests.corpus.models import Recipe, tiny
from tests.corpus.writers_fsdp1 import full_type, sharded_type, wrapped

OTHER = Recipe(seed=11)


def gathered(model: FSDP) -> dict[str, Any]:
    full_type(model)
    return {name: value.clone() for name, value in model.state_dict().items()}


def check(model: FSDP, truth: dict[str, Any]) -> None:
    found = gathered(model)
    assert set(found) == set(truth), set(found) ^ set(truth)
    for name, value in truth.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def main(full: str, directory: str, truth_file: str) -> None:
    truth = torch.load(truth_file, weights_only=True)
    for use_orig_params in (False, True):
        model = wrapped(tiny(OTHER), use_orig_params)
        before = gathered(model)
        assert any(not torch.equal(before[name], value) for name, value in truth.items())
        full_type(model)
        model.load_state_dict(torch.load(full, weights_only=True, mmap=True))
        check(model, truth)

        model = wrapped(tiny(OTHER), use_orig_params)
        sharded_type(model)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=directory)
        model.load_state_dict(state)
        check(model, truth)
    print("same")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    main(*sys.argv[1:])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo may abort at a normal exit while models still refer to groups
