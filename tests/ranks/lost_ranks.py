"""A rank of three dies, or never comes, while the others save or load.

python -m tests.ranks.lost_ranks SCENARIO FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import ckptmap
from ckptmap.errors import RunError
from ckptmap.live.load.load import PlannedLoad
from ckptmap.live.save import write_dcp
from ckptmap.live.save.save import save
from tests.support.resume_model import built

LOST = 1
"""The rank that is lost."""


def die(*_: object, **__: object) -> Any:
    """End this process at once, as a kill does."""
    os._exit(0)


def die_inside(number: int) -> None:
    """End this process in one of the next exchanges of objects, once the others know that it has come: its
    size has gone out, and its values have not."""
    gather, gather_object, calls = c10d.all_gather, dist.all_gather_object, count(1)

    def exchange(found: Any, value: Any, group: Any = None) -> None:
        if next(calls) == number:
            sizes = iter((gather, die))
            c10d.all_gather = lambda *args, **how: next(sizes)(*args, **how)  # type: ignore[attr-defined]
        gather_object(found, value, group=group)

    dist.all_gather_object = exchange


def expect_lost(
    folder: Path, outcome: str, call: Callable[[], Any], what: str = "did not come to"
) -> None:
    begun = time.monotonic()
    try:
        call()
    except RunError as error:
        text = f"rank {LOST} of 3 {what} a collective of all ranks: "
        assert error.code == "CKM307" and error.message.startswith(text), error
        assert error.message.endswith(f"; {outcome}"), error
    else:
        raise AssertionError("no RunError")
    assert time.monotonic() - begun < 60
    (folder / f"told-{dist.get_rank()}").touch()


def wait_until_told(folder: Path) -> None:
    """Wait on the lost rank, alive, until the others have raised their errors."""
    until = time.monotonic() + 60
    while time.monotonic() < until and len(list(folder.glob("told-*"))) < 2:
        time.sleep(0.05)


def never_saves(folder: Path) -> None:
    model = built("fsdp2", "eager", 0)
    if dist.get_rank() == LOST:
        return wait_until_told(folder)
    out = folder / "out"
    expect_lost(folder, f"{out} is as it was", lambda: save(out, model, timeout=2))
    assert not out.exists()


def dies_while_it_writes(folder: Path) -> None:
    """In the background; a checkpoint is there before."""
    model, out = built("fsdp2", "eager", 0), folder / "out"
    save(out, model, step=1).wait()
    if dist.get_rank() == LOST:
        write_dcp._write_file = die
    handle = save(out, model, step=2, overwrite=True)
    expect_lost(folder, f"{out} is as it was", handle.wait)
    with ckptmap.open(out) as ckpt:
        assert ckpt.extra["step"] == 1


def never_loads(folder: Path) -> None:
    model, out = built("fsdp2", "eager", 0), folder / "out"
    save(out, model).wait()
    if dist.get_rank() == LOST:
        return wait_until_told(folder)
    expect_lost(folder, "the model is as it was", lambda: ckptmap.load(out, model, timeout=2))


def dies_while_it_loads(folder: Path) -> None:
    model, out = built("fsdp2", "eager", 0), folder / "out"
    save(out, model).wait()
    if dist.get_rank() == LOST:
        PlannedLoad.run = die  # type: ignore[method-assign]
    outcome = "some ranks may have loaded their shards, others not: load it again, on all ranks"
    expect_lost(folder, outcome, lambda: ckptmap.load(out, model))


def dies_inside_a_save(folder: Path) -> None:
    model, out = built("fsdp2", "eager", 0), folder / "out"
    save(out, model, step=1).wait()
    if dist.get_rank() == LOST:
        die_inside(1)
    handle = lambda: save(out, model, step=2, overwrite=True).wait()  # noqa: E731
    expect_lost(folder, f"{out} is as it was", handle, "died in")
    with ckptmap.open(out) as ckpt:
        assert ckpt.extra["step"] == 1


def dies_after_the_rename(folder: Path) -> None:
    """In the last exchange of the files' group, of the notes of rank 0."""
    model, out = built("fsdp2", "eager", 0), folder / "out"
    save(out, model, step=1).wait()
    if dist.get_rank() == LOST:
        write_dcp._mine = lambda *args, mine=write_dcp._mine: (die_inside(2), mine(*args))[1]
    handle = lambda: save(out, model, step=2, overwrite=True).wait()  # noqa: E731
    expect_lost(folder, f"{out} is complete and published", handle, "died in")
    with ckptmap.open(out) as ckpt:
        assert ckpt.extra["step"] == 2


def dies_inside_a_load(folder: Path) -> None:
    model, out = built("fsdp2", "eager", 0), folder / "out"
    save(out, model).wait()
    before = [p.to_local().clone() for p in model.parameters()]
    if dist.get_rank() == LOST:
        die_inside(1)
    expect_lost(folder, "the model is as it was", lambda: ckptmap.load(out, model), "died in")
    assert all(
        torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True)
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](Path(sys.argv[2]))
    # The store lives in rank 0; a group that lost a rank cannot be destroyed in order.
    if dist.get_rank() == 0:
        time.sleep(1)
    os._exit(0)
