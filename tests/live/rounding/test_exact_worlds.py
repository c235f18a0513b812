"""Which numbers of ranks average equal gradients without rounding, and what `load` says of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from ckptmap.live.rounding.continuing import EXACT_WORLDS, RoundingContinuation, SavedRounding
from ckptmap.live.rounding.record import RoundingRecord


def every_order(count: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield each way to add `count` equal numbers: all trees of sums, as functions of the number."""
    if count == 1:
        yield lambda g: g
    for left in range(1, count // 2 + 1):
        for one in every_order(left):
            for other in every_order(count - left):
                yield lambda g, one=one, other=other: one(g) + other(g)  # type: ignore[misc]


def mantissas() -> Tensor:
    """Every float32 of [1, 2), the first and last of each run of 64."""
    steps = torch.arange(1 << 17).mul(64)
    return torch.cat([steps, steps + 63, steps + 22]).to(torch.float32) / (1 << 23) + 1


@pytest.mark.parametrize("world", range(1, 9))
def test_only_sums_over_these_worlds_are_exact_in_every_order(world: int) -> None:
    g = mantissas()
    exact = all(torch.equal(add(g) / world, g) for add in every_order(world))
    exact &= all(torch.equal(add(g / world), g) for add in every_order(world))
    assert exact == (world in EXACT_WORLDS)


def continuation(saved: int, live: int, states: bool = True) -> RoundingContinuation:
    records = [RoundingRecord(1, states, dict)]
    return RoundingContinuation([SavedRounding(records, 1)], True, (saved, live))


@pytest.mark.parametrize(("saved", "live"), [(1, 2), (2, 1), (4, 1), (1, 4), (4, 2), (2, 4)])
def test_one_two_and_four_go_on_without_a_note(saved: int, live: int) -> None:
    one = continuation(saved, live)
    assert one.goes_on_elsewhere and not [*one.reasons(())] and not [*one.caveats()]


@pytest.mark.parametrize(("saved", "live"), [(4, 3), (3, 1), (8, 4), (1, 6)])
def test_other_numbers_of_ranks_are_noted(saved: int, live: int) -> None:
    one = continuation(saved, live)
    (note,) = one.caveats()
    assert one.goes_on_elsewhere and not [*one.reasons(())]
    assert f"saved by {saved} ranks, {live} now" in note
    (refused,) = continuation(saved, live, states=False).reasons(())
    assert f"(saved by {saved} ranks, {live} now" in refused
    assert not [*continuation(saved, live, states=False).caveats()]
