"""Which ranks may give values that all of them save, and which differences are refused."""

from __future__ import annotations

import pytest

from ckptmap.errors import ArgumentError
from ckptmap.live.save.extra_values import digests, require_same, require_same_step

NONE: dict[str, str] = {}


def test_values_are_the_same_or_given_on_rank_0_alone() -> None:
    values = digests({"seen": [1, 2]})
    require_same([values, values])
    require_same([values, NONE])
    require_same([NONE, NONE])


@pytest.mark.parametrize("other", [digests({"seen": [1, 3]}), digests({"seen": [1, 2], "more": 0})])
def test_other_values_are_refused(other: dict[str, str]) -> None:
    with pytest.raises(ArgumentError, match="differs between rank 0 and rank 1"):
        require_same([digests({"seen": [1, 2]}), other])


def test_values_that_rank_0_does_not_give_are_not_lost_in_silence() -> None:
    with pytest.raises(ArgumentError, match=r"extra\['seen'\]: differs between rank 0 and rank 2"):
        require_same([NONE, NONE, digests({"seen": [1, 2]})])


def test_steps() -> None:
    require_same_step([5, None, 5])
    for steps in ([5, 6], [None, 5]):
        with pytest.raises(ArgumentError, match="expected the same on all ranks"):
            require_same_step(steps)
