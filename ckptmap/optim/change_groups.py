"""Regroup the optimizer's parameters for a target that groups them in another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptmap.errors import PlanError
from ckptmap.optim.state import NAMES, PARAMS, Optimizer, ParamGroup
from ckptmap.storage.lazy_tensor import LazyTensor


def regrouped(optimizer: Optimizer, order: Sequence[Sequence[str]]) -> Optimizer:
    """Return the state with the groups `order`, which list every parameter once.

    A group that gets no parameter has the hyper-parameters of the first. Raises PlanError CKM207
    where parameters of one new group were trained with different hyper-parameters.
    """
    group_of = {fqn: group for group in optimizer.groups for fqn in group[PARAMS]}
    groups = [
        _new_group(names, [group_of[fqn] for fqn in names] or [optimizer.groups[0]])
        for names in order
    ]
    return replace(optimizer, groups=groups)


def _new_group(names: Sequence[str], sources: Sequence[ParamGroup]) -> ParamGroup:
    first = sources[0]
    for fqn, other in zip(names, sources, strict=False):
        if other is first:
            continue
        differing = next((key for key in {**first, **other} if _differs(key, first, other)), None)
        if differing is not None:
            raise PlanError(
                "CKM207",
                f"{fqn}: was trained with {differing} {other.get(differing)!r:.40}, {names[0]} with"
                f" {first.get(differing)!r:.40}; the loader of this format puts both into one group",
                "leave the optimizer behind with --optimizer drop",
            )
    return {**{key: value for key, value in first.items() if key != NAMES}, PARAMS: list(names)}


def _differs(key: str, first: ParamGroup, second: ParamGroup) -> bool:
    if key in (PARAMS, NAMES):
        return False
    first_value, second_value = first.get(key), second.get(key)
    if isinstance(first_value, LazyTensor) or isinstance(second_value, LazyTensor):
        return first_value is not second_value
    return bool(first_value != second_value)
