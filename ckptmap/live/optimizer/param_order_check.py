"""Checks the order by which numbered optimizer state got its FQNs against the live optimizer.

Mostly the same program built the optimizer of the file. Where its groups are not in the order of the
model (names that were sorted, 10 before 2), those of the file may not be either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.errors import LoadError
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.optimizer.local_state import ParamOwner
from ckptmap.optim.index_order import MODEL_ORDER, fits
from ckptmap.storage.lazy_tensor import LazyTensor


def refuse_other_order(
    checkpoint: Checkpoint, owners: Sequence[ParamOwner], targets: Sequence[LiveTensor]
) -> None:
    """Raise LoadError CKM506 where the state got its FQNs by the order of the model's state dict, and
    the live optimizer has another order."""
    other = _other(checkpoint, owners)
    if other is None or not _of_its_own(owners, targets):
        return
    number, there, here = other
    raise LoadError(
        "CKM506",
        f"{checkpoint.path}: parameter {number} of the optimizer is {there} by {MODEL_ORDER}, and"
        f" {here} in the order of the live optimizer; the file has no names",
        "say which parameter is which: ckptmap.open(path, param_order=...)",
    )


def says_others(checkpoint: Checkpoint, owners: Sequence[ParamOwner]) -> bool:
    """Return whether the order of the live optimizer gives other FQNs than that of the model's state
    dict."""
    return _other(checkpoint, owners) is not None


def _other(checkpoint: Checkpoint, owners: Sequence[ParamOwner]) -> tuple[int, str, str] | None:
    """Return (number, FQN by the model's order, live FQN) of the first difference, where all shapes fit."""
    if checkpoint.optimizer_order != MODEL_ORDER or any(owner.is_flat for owner in owners):
        return None
    live = _grouped(owners)
    stored = checkpoint.optimizer_groups
    counts = [len(group["params"]) for group in stored if group["params"]]
    if counts != [len(group) for group in live]:
        return None
    there = [fqn for group in stored for fqn in group["params"]]
    here = [owner.members[0][0] for group in live for owner in group]
    pairs = list(zip(there, here, strict=True))
    if not all(_fits(checkpoint.optimizer.get(fqn, {}), target) for fqn, target in pairs):
        return None
    differ = ((n, f, t.fqn) for n, (f, t) in enumerate(pairs) if f not in t.known)
    return next(differ, None)


def _grouped(owners: Sequence[ParamOwner]) -> list[list[ParamOwner]]:
    found: dict[int, list[ParamOwner]] = {}
    for owner in owners:
        found.setdefault(id(owner.part.group), []).append(owner)
    return list(found.values())


def _fits(state: Mapping[str, LazyTensor], target: LiveTensor) -> bool:
    shapes = ((name, lazy.shape) for name, lazy in state.items() if lazy.shape)
    return all(fits(name, shape, tuple(target.tensor.shape)) for name, shape in shapes)


def _of_its_own(owners: Sequence[ParamOwner], targets: Sequence[LiveTensor]) -> bool:
    """Return whether a live group is not in the order of the model."""
    place = {id(target): at for at, target in enumerate(targets)}
    groups = [[place[id(owner.members[0][0])] for owner in group] for group in _grouped(owners)]
    return any(a > b for group in groups for a, b in pairwise(group))
