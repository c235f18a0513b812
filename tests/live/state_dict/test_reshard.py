"""Messages between ranks: what comes before the first of them, and a rank that fails."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.errors import RunError
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.state_dict.live_checkpoint import LiveStateDict
from ckptmap.live.state_dict.memory_blocks import Memory
from ckptmap.live.state_dict.reshard import Exchange, Need, ReshardTask
from ckptmap.tensors import Box, Path, TensorInfo
from tests.corpus.ranks import run_ranks

FQN: Path = ("w",)
ROUNDS = 2


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_fails_leaves_no_other_waiting(world: int) -> None:
    run_ranks("tests.ranks.reshard_failure", world, timeout=120)


class Peers(RankGroup):
    """Rank 0 of two, whose peer needs all of `w`, and fails where the log has `fails_at` lines."""

    log: list[str]
    fails_at: int

    def any(self, flag: bool) -> bool:
        self.log.append("agree")
        return flag or len(self.log) == self.fails_at

    def all(self, value: Any) -> list[Any]:
        if value is None or isinstance(value, tuple):  # an error, or none
            failed = len(self.log) == self.fails_at
            return [value, ("CKM306", "out of memory", "") if failed else None]
        if isinstance(value, list):
            return [value, [[(FQN, Box((0,), (64,)), False)]]]
        return [value, value]


def exchange(
    monkeypatch: pytest.MonkeyPatch, backends: str, device: str, fails_at: int = 0
) -> tuple[Exchange, list[str]]:
    """Return an exchange in `ROUNDS` rounds of messages that are recorded, not sent."""
    log: list[str] = []
    peers = Peers(0, 2, None)
    object.__setattr__(peers, "log", log)
    object.__setattr__(peers, "fails_at", fails_at)

    def reduce(tensor: torch.Tensor, group: object = None) -> None:
        log.append(f"all_reduce on {tensor.device}")

    def post(operations: list[tuple[str, torch.Tensor, int]]) -> list[Any]:
        log.extend(f"{kind} on {tensor.device}" for kind, tensor, _ in operations)
        return []

    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(dist, "P2POp", lambda kind, tensor, peer, group: ("send", tensor, peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", post)
    memory = Memory()
    memory.add_own(FQN, Box((0,), (64,)), torch.ones(64))
    sources = {FQN: (TensorInfo((64,), "float32"), [(0, Box((0,), (64,)))])}
    live = LiveStateDict(cast(Checkpoint, None), memory, sources, peers)
    return Exchange(live, 256 // ROUNDS, torch.device(device)), log


def run(made: Exchange) -> None:
    own = Need(FQN, Box((0,), (64,)), torch.empty(64), torch.device("cpu"))
    made.run([ReshardTask([own])], cast(Any, None))


def test_all_ranks_meet_on_the_device_before_the_first_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, log = exchange(monkeypatch, "cpu:gloo,meta:nccl", "meta")
    run(made)
    first = log.index("send on meta")
    assert log[:first].count("all_reduce on meta") == 1 == log.count("all_reduce on meta")
    run(made)
    assert log.count("all_reduce on meta") == 1, "once for an exchange"


def test_every_round_is_agreed_on_after_its_messages_are_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, log = exchange(monkeypatch, "cpu:gloo,meta:nccl", "meta")
    real = made._message

    def message(parts: Any) -> torch.Tensor:
        log.append("allocate")
        return real(parts)

    monkeypatch.setattr(made, "_message", message)
    run(made)
    assert log.count("allocate") == log.count("send on meta") > 0
    for at, what in enumerate(log):
        if what == "allocate":
            assert log[at : at + 3] == ["allocate", "agree", "send on meta"]


def test_gloo_needs_no_collective_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made, log = exchange(monkeypatch, "cpu:gloo", "cpu")
    run(made)
    assert "send on cpu" in log and "all_reduce on cpu" not in log


def test_nothing_is_sent_after_another_rank_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, told = exchange(monkeypatch, "cpu:gloo,meta:nccl", "meta")
    run(whole)
    at = told.index("send on meta")  # the number of what was agreed just before
    made, log = exchange(monkeypatch, "cpu:gloo,meta:nccl", "meta", fails_at=at)
    with pytest.raises(RunError, match=r"\[rank 1\] out of memory"):
        run(made)
    assert "send on meta" not in log and len(log) == at
