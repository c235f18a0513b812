"""Saves of a run whose plan is known from the save before: what is the same is not exchanged again, and what is not
the same is seen.

python -m tests.ranks.resume_known_plan FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptmap
from ckptmap.errors import CkptmapError
from ckptmap.live.save import known_plan, this_rank
from ckptmap.live.save.save import save
from tests.support.cpu_sharding import fully_shard
from tests.support.resume_model import built, train

LAST = 2


def refused(code: str, text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except CkptmapError as error:
        assert error.code == code and text in str(error), error
    else:
        raise AssertionError(f"no {code}")


class Counted:
    """Counts the collectives in the block, and the plans that are made."""

    def __enter__(self) -> Counted:
        self.collectives = self.plans = 0
        self._gather, self._assign = dist.all_gather, this_rank.Assigner.assign
        self._objects = dist.all_gather_object

        def gather(*args: Any, **how: Any) -> Any:
            self.collectives += 1
            return self._gather(*args, **how)

        def objects(*args: Any, **how: Any) -> Any:
            self.collectives += 2
            return self._objects(*args, **how)

        def assign(*args: Any) -> Any:
            self.plans += 1
            return self._assign(*args)

        dist.all_gather, dist.all_gather_object = gather, objects
        this_rank.Assigner.assign = assign  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_gather, dist.all_gather_object = self._gather, self._objects
        this_rank.Assigner.assign = self._assign  # type: ignore[method-assign]


def one_collective(folder: Path) -> None:
    """While training waits; and the values are those of the call."""
    model = built("fsdp2", "eager", 0)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 0, 1)
    extra: dict[str, Any] = {"seen": [1, 2], "at": {"file": "a"}}
    save(folder / "step-1", model, optimizer, step=1, extra=extra).wait()
    train(model, optimizer, 1, 2)
    extra["seen"].append(3)
    wanted = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    with Counted() as counted:
        handle = save(folder / "step-2", model, optimizer, step=2, extra=extra)
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().zero_()
        extra["seen"].append(4)
        extra["at"]["file"] = "b"
        assert handle.wait() == ()
    assert counted.plans == 0
    dist.barrier()
    with ckptmap.open(folder / "step-2") as ckpt:
        assert ckpt.extra["step"] == 2 and ckpt.extra["seen"] == [1, 2, 3]
        assert ckpt.extra["at"] == {"file": "a"}
        for name, values in wanted.items():
            assert torch.equal(ckpt[name].read(), values), name


def collectives_of_a_call(folder: Path) -> None:
    """Counted before the background begins, after the call. A save of a part of the weights asks, too, which of them
    the ranks do not find in their base."""
    model = built("fsdp2", "eager", 0)
    save(folder / "counted", model).wait()
    ckptmap.load(folder / "counted", model)
    for name, collectives, only in (("whole", 1, None), ("part", 3, "layers.0.*")):
        save(folder / name, model, only=only).wait()
        assert in_the_call(folder / name, model, only) == [collectives], name


def in_the_call(path: Path, model: nn.Module, only: str | None) -> list[int]:
    """Return how many collectives the call of a save has."""
    with Counted() as counted:
        mine = this_rank.Mine.planned
        inside: list[int] = []

        def planned(*args: Any) -> Any:
            ready = mine(*args)
            inside.append(counted.collectives)
            return ready

        this_rank.Mine.planned = planned  # type: ignore[method-assign]
        save(path, model, only=only, overwrite=True).wait()
        this_rank.Mine.planned = mine  # type: ignore[method-assign]
    return inside


def replicas_that_drift_later(folder: Path) -> None:
    model = built("ddp", "eager", 0)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        save(folder / "replicas", model, optimizer, overwrite=True).wait()
    with torch.no_grad():
        model.module.layers[0].up.weight[3, 3] += dist.get_rank()
    for _ in range(2):
        refused(
            "CKM509", "layers.0.up.weight: ranks 0 and 1 hold replicas that differ",
            lambda: save(folder / "replicas", model, optimizer, overwrite=True),
        )  # fmt: skip
    for number in range(3):
        with Counted() as counted:
            save(folder / "replicas", model, optimizer, overwrite=True, replicas="first").wait()
        assert bool(counted.plans) == (not number)
        report = ckptmap.load(folder / "replicas", built("ddp", "eager", 1))
        assert "each rank had its own layers.0.up.weight, one was saved" in report.inexact


def buffers_that_differ_later(folder: Path) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert save(folder / "norm", model).wait() == ()
    model(torch.arange(12.0).view(3, 4) * (1 + dist.get_rank()))
    for _ in range(2):
        with Counted() as counted:
            (note,) = save(folder / "norm", model, overwrite=True).wait()
        assert note.startswith("2 buffers differ between ranks") and counted.plans == 0, note
    report = ckptmap.load(folder / "norm", model)
    assert any("its own of 2 buffers" in why for why in report.inexact), report.inexact


def other_values(folder: Path) -> None:
    """Of other kinds or names: they are refused before the call returns, or planned anew."""
    model, rank = built("fsdp2", "eager", 0), dist.get_rank()
    path = folder / "values"
    for _ in range(2):
        save(path, model, overwrite=True, extra={"a": {"b": 1}}).wait()
    refused(
        "CKM203", "object",
        lambda: save(path, model, overwrite=True, extra={"a": {"b": object()}}),
    )  # fmt: skip
    for own in ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": torch.ones(2)}}):
        with Counted() as counted:
            save(path, model, overwrite=True, extra=own if rank == 0 else None).wait()
        assert counted.plans == 1
    mine = {"at": torch.arange(rank + 2)}
    for _ in range(2):
        save(path, model, overwrite=True, extra_per_rank=mine).wait()
    if rank == LAST:
        mine = {"at": torch.arange(9), "more": torch.ones(1)}
    with Counted() as counted:
        save(path, model, overwrite=True, extra_per_rank=mine).wait()
    assert counted.plans == 1
    assert ckptmap.load(path, model).extra_per_rank.keys() == mine.keys()


class Stateful:
    """An object whose state is the same on all ranks, or is not."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "values": torch.full((2,), self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"] + int(state["values"].sum()) - 2 * state["at"]


def states_that_part(folder: Path) -> None:
    """Of a caller's object: the same on all ranks, then not, then again."""
    model, rank = built("fsdp2", "eager", 0), dist.get_rank()
    for number, at in enumerate((1, 2, 5 + rank, 7 + rank, 3)):
        save(folder / f"state-{number}", model, stateful={"one": Stateful(at)}).wait()
        found = Stateful(0)
        ckptmap.load(folder / f"state-{number}", model, stateful={"one": found})
        assert found.at == at, (number, found.at)


def copies_fail_on_one_rank(folder: Path) -> None:
    """Of a known plan: no rank waits for it in the call, and all raise it."""
    model, path = built("fsdp2", "eager", 0), folder / "copies"
    save(path, model, step=1).wait()
    own = this_rank.snapshot

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory for copies")

    for background in (True, False):
        if dist.get_rank() == LAST:
            this_rank.snapshot = fails
        try:
            save(path, model, step=2, overwrite=True, background=background).wait()
        except (CkptmapError, MemoryError) as error:
            assert "no memory for copies" in str(error), error
            assert ("[rank 2]" in str(error)) == (dist.get_rank() != LAST), error
        else:
            raise AssertionError("no error")
        this_rank.snapshot = own
    dist.barrier()
    with ckptmap.open(path) as ckpt:
        assert ckpt.extra["step"] == 1
    save(path, model, step=3, overwrite=True).wait()


def runs_by_turns(folder: Path) -> None:
    """Two models, of which rank 0 alone saves more: each has its plan."""
    one, two = built("fsdp2", "eager", 0), DistributedDataParallel(nn.Linear(8, 8))
    for number in range(3):
        with Counted() as counted:
            extra = {"more": number} if dist.get_rank() == 0 else None
            save(folder / "one", one, overwrite=True).wait()
            save(folder / "one-more", one, overwrite=True, extra=extra).wait()
            save(folder / "two", two, overwrite=True).wait()
        assert counted.plans == (0 if number else 3), (number, counted.plans)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scenario in (
        one_collective, collectives_of_a_call, replicas_that_drift_later, buffers_that_differ_later,
        other_values, states_that_part, copies_fail_on_one_rank, runs_by_turns,
    ):  # fmt: skip
        known_plan._kept.clear()
        scenario(Path(sys.argv[1]))
        dist.barrier()
    dist.destroy_process_group()
