"""How optimizer state was placed when it was saved: whole on each rank, or a DTensor cut in some way.

    extra.ckptmap.placements = {"up.weight": {"average": "whole", "moment": "param", "row": ["S0"]}}

    whole         a plain tensor: every rank has all of it
    param         a DTensor with the placements of the parameter
    ["R", "S0"]   a DTensor with these placements, Replicate and Shard(0), on the parameter's mesh
    unknown       a DTensor placed otherwise, which comes back as the live optimizer would place it

Shapes do not tell: a square matrix has preconditioners of its own shape, which every rank needs whole.
Recorded for parameters that are DTensors, of the entries that no family of ckptmap knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ckptmap.live.model.live_tensor import is_dtensor
from ckptmap.live.optimizer import run_settings
from ckptmap.live.optimizer.family import STEP
from ckptmap.live.optimizer.local_state import ParamOwner

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import Placement

    from ckptmap.checkpoint.checkpoint import Checkpoint

T = TypeVar("T")

WHOLE, LIKE_PARAM, UNKNOWN = "whole", "param", "unknown"

Placements: TypeAlias = Mapping[str, Mapping[str, object]]
"""FQN -> name of the entry -> its placement."""


def described(owners: Sequence[ParamOwner]) -> dict[str, dict[str, object]]:
    """Return the placements of the state of these parameters, as plain values."""
    found: dict[str, dict[str, object]] = {}
    for owner in owners:
        part = owner.part
        if not is_dtensor(part.param):
            continue
        own = () if part.family.name == "other" else {STEP, *part.family.needs(part)}
        known: dict[str, object] = {
            name: of
            for name, value in part.family.entries(part.state).items()
            if name not in own and (of := _placement(value, part.param))
        }
        if not known:
            continue
        for target, _ in owner.members:
            found.update({fqn: known for fqn in target.names})
    return found


def recorded(checkpoint: Checkpoint) -> Placements:
    """Return the placements that a checkpoint records; {}: an older one does not."""
    found = run_settings.recorded(checkpoint).get(run_settings.PLACEMENTS)
    return found if isinstance(found, Mapping) else {}


def of_param(placements: Placements, owner: ParamOwner) -> Mapping[str, object]:
    """Return the placements of one parameter's entries, under the first of its names that has any."""
    names = (name for target, _ in owner.members for name in target.known)
    found = next((placements[name] for name in names if name in placements), {})
    return found if isinstance(found, Mapping) else {}


def placed(
    live: T, placement: object, param: torch.Tensor, shape: Sequence[int]
) -> T | torch.Tensor:
    """Return the fresh entry `live` as it was placed when it was saved, of zeros where it is placed
    otherwise; `live` itself where nothing is recorded or the mesh has other dims."""
    import torch

    if not placement or not isinstance(live, torch.Tensor) or not is_dtensor(param):
        return live
    if placement == WHOLE:
        if not is_dtensor(live):
            return live
        with torch.no_grad():
            return torch.zeros(tuple(shape), dtype=live.dtype, device=param.to_local().device)
    wanted = _parsed(placement, param.placements)
    if not wanted or any(getattr(p, "dim", -1) >= len(shape) for p in wanted):
        return live
    if is_dtensor(live) and live.placements == wanted:
        return live
    from torch.distributed.tensor import zeros

    return zeros(*shape, dtype=live.dtype, device_mesh=param.device_mesh, placements=wanted)


def _placement(value: object, param: torch.Tensor) -> str | list[str] | None:
    """Return how an entry is placed; None: it is no tensor."""
    import torch

    assert is_dtensor(param)
    if not isinstance(value, torch.Tensor):
        return None
    if not is_dtensor(value):
        return WHOLE
    if value.device_mesh != param.device_mesh:
        return UNKNOWN
    if value.placements == param.placements:
        return LIKE_PARAM
    names = [_name(one) for one in value.placements]
    return names if all(names) else UNKNOWN


def _name(placement: Placement) -> str:
    if placement.is_replicate():
        return "R"
    return f"S{placement.dim}" if type(placement).__name__ == "Shard" else ""  # type: ignore[attr-defined]


def _parsed(placement: object, of_live_param: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return the placements on the live parameter's mesh; (): they do not fit its dims."""
    from torch.distributed.tensor import Replicate, Shard

    if placement == LIKE_PARAM:
        return tuple(of_live_param)
    names = [str(name) for name in placement] if isinstance(placement, list | tuple) else []
    if names and all(name == "R" for name in names):
        return (Replicate(),) * len(of_live_param)
    if len(names) != len(of_live_param):
        return ()
    digits = [name[1:] for name in names if name != "R"]
    if not all(one.isdecimal() and len(one) < 4 for one in digits):
        return ()
    return tuple(Replicate() if name == "R" else Shard(int(name[1:])) for name in names)
