"""Optimizers that keep what they like go on bit for bit on several ranks, or are refused.

python -m tests.ranks.resume_entries FOLDER WRAP...     each wrapper in turn, on all ranks of this start
python -m tests.ranks.resume_entries FOLDER from WRAP   what WRAP saved, on one rank
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckptmap
from tests.support import resume_model
from tests.support.odd_optimizers import RESTORED, Odd, state_of
from tests.support.resume_model import WRAPS, net


class Unlike(Odd):
    """Takes a shard for the parameter, as LAMB, CAME and Prodigy do: numbers of each rank's own, in the state and
    in the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, d=1.0, seen=torch.zeros(2), same=1.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["d"] += sum(state["own"] for state in self.state.values())
            group["seen"] = group["seen"] + group["d"]

    def update(self, param: Any, state: dict[str, Any]) -> Any:
        state["norm"] = state.get("norm", torch.zeros(())) + local(param).norm()
        state["own"] = state.get("own", 0.0) + state["norm"].item()
        return 1.0 / (1.0 + state["own"] + self.param_groups[0]["seen"].sum().item())


def built(name: str, wrap: str, seed: int) -> tuple[nn.Module, Any]:
    model = WRAPS[wrap](net(seed))
    return model, {**RESTORED, "Unlike": Unlike}[name](model.parameters())


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    resume_model.train(
        model, optimizer, first, last, dist.get_rank() if dist.is_initialized() else 0
    )


def goes_on(name: str, wrap: str, folder: Path) -> None:
    model, optimizer = built(name, wrap, 0)
    train(model, optimizer, 0, 3)
    ckptmap.save(folder, model, optimizer).wait()
    again, theirs = built(name, wrap, 1)
    train(again, theirs, 0, 1)  # a DDP that has run has other buckets
    report = ckptmap.load(folder, again, theirs, exact=True)
    assert not report.changes, report.changes
    assert state_of(again, theirs) == state_of(model, optimizer), "other state than was saved"
    train(model, optimizer, 3, 5)
    train(again, theirs, 3, 5)
    assert state_of(again, theirs) == state_of(model, optimizer), "other state after two steps"
    for ours, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(local(ours), local(other)), "other weights after two steps"


def local(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found


def unlike(wrap: str, folder: Path) -> None:
    """Of another rank nothing is taken as the own: neither on one rank, nor where ranks hold other parts."""
    inexact = ckptmap.load(folder, *built("Unlike", wrap, 1)).inexact
    for name in ("embed.weight.norm", "embed.weight.own", "d of group 0", "seen of group 0"):
        assert f"each rank had its own {name}, one was saved" in inexact, inexact
    assert not [text for text in inexact if "same of group" in text], inexact


def on_one_rank(name: str, wrap: str, folder: Path) -> None:
    """Nothing is lost on the way to one process, but what the world size decides."""
    model, optimizer = built(name, "plain", 1)
    if name == "Unlike":
        unlike("plain", folder)
    report = ckptmap.load(folder, model, optimizer)
    assert not report.changes, report.changes
    train(model, optimizer, 3, 4)


def main(folder: Path, *wraps: str) -> None:
    torch.set_num_threads(1)
    call = goes_on
    if wraps[0] == "from":
        call, wraps = on_one_rank, wraps[1:]
    else:
        dist.init_process_group("gloo")
    failed = []
    for wrap in wraps:
        for name in (*RESTORED, *(["Unlike"] if "fsdp" in wrap else [])):
            try:
                call(name, wrap, folder / f"{wrap}-{name}")
            except Exception as error:  # all cases are told of at once
                traceback.print_exc(limit=3)
                failed.append(f"{wrap} {name}: {error!r:.300}")
        if call is goes_on and wrap == "fsdp2":
            unlike("fsdp1", folder / "fsdp2-Unlike")
    if dist.is_initialized():
        dist.destroy_process_group()
    assert not failed, "\n".join(["", *failed])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
