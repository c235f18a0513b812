"""Faults of one rank of three under a CheckpointManager: it is killed, or its disk is full.

python -m tests.ranks.manager_faults SCENARIO FOLDER
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptmap
from ckptmap.errors import CkptmapError, RunError
from ckptmap.live.load.load import PlannedLoad
from ckptmap.live.manager import root_directory
from tests.support.resume_model import built, train


def die(*_: object, **__: object) -> Any:
    """End this process at once, as a kill does."""
    os._exit(0)


def started() -> tuple[Any, Any]:
    model = built("fsdp2", "eager", 0)
    return model, torch.optim.AdamW(model.parameters())


def expect_lost(folder: Path, lost: int, outcome: str, call: Callable[[], object]) -> None:
    begun = time.monotonic()
    try:
        call()
    except RunError as error:
        assert error.code == "CKM307" and f"rank {lost} of 3 did not come" in error.message, error
        assert "\n" not in str(error) and error.message.endswith(outcome), error
    else:
        raise AssertionError("no RunError")
    assert time.monotonic() - begun < 60
    (folder / f"told-{dist.get_rank()}").touch()


def dies_in_retention(folder: Path) -> None:
    """Rank 0, which removes what is old, is killed in the middle of it; the others learn of it in the
    next save."""
    model, optimizer = started()
    manager = ckptmap.CheckpointManager(folder / "root", keep=1)
    manager.save(1, model, optimizer)
    manager.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        root_directory._unlink_all = die
    train(model, optimizer, 0, 1, dist.get_rank())
    manager.save(2, model, optimizer)
    manager.wait()
    out = folder / "root" / "step-3"
    expect_lost(folder, 0, f"{out} is as it was", lambda: manager.save(3, model, optimizer))


def dies_in_restore(folder: Path) -> None:
    model, optimizer = started()
    manager = ckptmap.CheckpointManager(folder / "root")
    manager.save(2, model, optimizer)
    manager.wait()
    if dist.get_rank() == 1:
        PlannedLoad.run = die  # type: ignore[method-assign]
    outcome = "some ranks may have loaded their shards, others not: load it again, on all ranks"
    expect_lost(folder, 1, outcome, lambda: manager.restore(model, optimizer))


def full_disk(folder: Path) -> None:
    """In the background, on rank 2 alone: every rank is told, what was there stays, and later saves go on."""
    model, optimizer = started()
    root = folder / "root"
    manager = ckptmap.CheckpointManager(root, keep=1)
    manager.save(1, model, optimizer)
    manager.wait()
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        manager.save(2, model, optimizer)
        manager.wait()
    except CkptmapError as error:
        assert ("\n" not in str(error) and "rank 2" in str(error)) or dist.get_rank() == 2, error
        (folder / f"told-{dist.get_rank()}").touch()
    else:
        raise AssertionError("no error")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-1"], list(
        root.iterdir()
    )
    assert manager.steps() == [1] and (root / "latest").read_text() == "step-1\n"
    dist.barrier()
    manager.save(2, model, optimizer)
    manager.wait()
    manager.close()
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](Path(sys.argv[2]))
    os._exit(0)  # a group that lost a rank cannot be destroyed in order
