"""Settings of a run in which its ranks differ, as the stages of a pipeline do.

[{a: 1, b: 2}, {a: 1, b: 3}, {a: 1}]  ->  {a: 1, b: 2, of_ranks: [False, {b: 3}, {b: None}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckptmap.checkpoint import base_record
from ckptmap.live.model import unsaved_buffers
from ckptmap.live.model.rank_group import rank_and_world
from ckptmap.live.optimizer import run_settings

if TYPE_CHECKING:
    from ckptmap.checkpoint.checkpoint import Checkpoint
    from ckptmap.live.model.live_tensor import LiveTensor
    from ckptmap.live.optimizer.optimizer_types import ParamGroup
    from ckptmap.live.optimizer.param_groups import StoredGroup

KEY = "of_ranks"
"""Setting that has, for each rank, its settings that are others than rank 0's; None of what it has not."""
GROUPS = "group_numbers"
"""Setting that has, for each rank, the numbers of the stored groups of its optimizer's, in their order. It is there
where ranks have other parameters."""
IN_OTHER_WAYS = frozenset({"layout", base_record.KEY, unsaved_buffers.KEY})
"""Settings that have a way of their own to be recorded for each rank, or that are rank 0's."""


def of_all_ranks(settings: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return what to add to the settings of rank 0; empty where no rank has others."""
    first, *rest = map(_compared, settings)
    found = [
        {key: one.get(key) for key in {**first, **one} if one.get(key) != first.get(key)} or False
        for one in rest
    ]
    return {KEY: [False, *found]} if any(found) else {}


def of_rank(saved: Mapping[str, object], rank: int) -> dict[str, object]:
    """Return the settings that the rank of this number recorded."""
    by_rank, own = saved.get(KEY), dict(saved)
    others = by_rank[rank] if isinstance(by_rank, list | tuple) and rank < len(by_rank) else None
    if isinstance(others, Mapping):
        own |= others
        own = {key: value for key, value in own.items() if value is not None}
    return own


def is_same_layout(
    checkpoint: Checkpoint,
    targets: Sequence[LiveTensor],
    becomes: Mapping[str, tuple[str, str]] | None = None,
) -> bool:
    """Return whether this rank holds the tensors that it held when as many ranks saved them, cut alike. `becomes`
    as for `layout_digest`."""
    saved = run_settings.recorded(checkpoint)
    rank, world = rank_and_world()
    layouts = saved.get("layout")
    if saved.get("world_size") != world or not isinstance(layouts, list | tuple):
        return False
    return rank < len(layouts) and layouts[rank] == run_settings.layout_digest(targets, becomes)


def without_params(
    checkpoint: Checkpoint, live: Sequence[ParamGroup], stored: Sequence[StoredGroup]
) -> tuple[list[ParamGroup], list[StoredGroup]]:
    """Return the live groups without parameters, and the checkpoint's, `stored`, for them. They go by their order, and
    where ranks had other parameters by the numbers that this rank's groups had. Of ranks as many as now, or not, one
    may have groups without parameters that another has no use for."""
    empty = [group for group in live if not group["params"]]
    stored_empty = [group for group in stored if not group["params"]]
    by_rank = run_settings.recorded(checkpoint).get(GROUPS)
    if not isinstance(by_rank, list | tuple):
        return empty, stored_empty
    rank, world = rank_and_world()
    numbers = by_rank[rank] if len(by_rank) == world else ()
    if isinstance(numbers, list | tuple) and len(numbers) == len(live):
        known = dict(enumerate(stored))
        pairs = zip(live, map(known.get, numbers), strict=True)
        return empty, [saved for group, saved in pairs if saved and not group["params"]]
    return empty, stored_empty[: len(empty)]


def _compared(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings without those that rank 0 alone records."""
    return {k: _without_numbers(v) for k, v in settings.items() if k not in IN_OTHER_WAYS}


def _without_numbers(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {k: _without_numbers(v) for k, v in value.items() if k != run_settings.NUMBERS}
