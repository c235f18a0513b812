"""Check the order that gave FQNs to optimizer state keyed by index, against the live optimizer.

Usually the same program built the optimizer whose state is in the file. If the live groups are not in
the order of the model (sorted names put 10 before 2), those of the file may not be in it either.
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
    difference = _first_difference(checkpoint, owners)
    if difference is None or not _is_not_in_model_order(owners, targets):
        return
    number, model_fqn, live_fqn = difference
    raise LoadError(
        "CKM506",
        f"{checkpoint.path}: parameter {number} of the optimizer is {model_fqn} by {MODEL_ORDER}, and"
        f" {live_fqn} in the order of the live optimizer; the file has no names",
        "say which parameter is which: ckptmap.open(path, param_order=...)",
    )


def says_others(checkpoint: Checkpoint, owners: Sequence[ParamOwner]) -> bool:
    """Return whether the order of the live optimizer gives other FQNs than that of the model's state
    dict."""
    return _first_difference(checkpoint, owners) is not None


def _first_difference(
    checkpoint: Checkpoint, owners: Sequence[ParamOwner]
) -> tuple[int, str, str] | None:
    """Return (number, FQN by the model's order, live FQN) of the first difference, where all shapes fit."""
    if checkpoint.optimizer_order != MODEL_ORDER or any(owner.is_flat for owner in owners):
        return None
    live = _by_group(owners)
    stored = checkpoint.optimizer_groups
    counts = [len(group["params"]) for group in stored if group["params"]]
    if counts != [len(group) for group in live]:
        return None
    model_fqns = [fqn for group in stored for fqn in group["params"]]
    live_targets = [owner.members[0][0] for group in live for owner in group]
    pairs = list(zip(model_fqns, live_targets, strict=True))
    if not all(_fits(checkpoint.optimizer.get(fqn, {}), target) for fqn, target in pairs):
        return None
    differ = ((n, f, t.fqn) for n, (f, t) in enumerate(pairs) if f not in t.known)
    return next(differ, None)


def _by_group(owners: Sequence[ParamOwner]) -> list[list[ParamOwner]]:
    by_group: dict[int, list[ParamOwner]] = {}
    for owner in owners:
        by_group.setdefault(id(owner.part.group), []).append(owner)
    return list(by_group.values())


def _fits(state: Mapping[str, LazyTensor], target: LiveTensor) -> bool:
    shapes = ((name, lazy.shape) for name, lazy in state.items() if lazy.shape)
    return all(fits(name, shape, tuple(target.tensor.shape)) for name, shape in shapes)


def _is_not_in_model_order(owners: Sequence[ParamOwner], targets: Sequence[LiveTensor]) -> bool:
    """Return whether a live group is not in the order of the model."""
    number_of = {id(target): at for at, target in enumerate(targets)}
    groups = [
        [number_of[id(owner.members[0][0])] for owner in group] for group in _by_group(owners)
    ]
    return any(a > b for group in groups for a, b in pairwise(group))
