"""torch.optim.LBFGS: one state for all parameters, of lists of vectors over all of them, end to end.

state[first param] = {d: [n], old_dirs: [[n], ...], old_stps: [[n], ...], ro: [[], ...], H_diag, n_iter, ...}
saved at extra.lbfgs.<FQN of the first>, beside `params`, the FQNs in the order of the vectors

Source: `LBFGS.step` of torch 2.13. It computes `al` anew in each step. FSDP2 makes the vectors DTensors,
whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.state_paths import nest
from ckptmap.errors import LoadError
from ckptmap.live.model.live_tensor import is_dtensor
from ckptmap.live.optimizer.family import OptimizerFamily, OptimizerParam, is_a
from ckptmap.live.optimizer.local_state import ParamOwner
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Path

if TYPE_CHECKING:
    import torch

KEY = "lbfgs"
"""Key of these states among the extra values."""
PARAMS = "params"
SCRATCH = "al"


class TorchLbfgs(OptimizerFamily):
    """torch.optim.LBFGS has no state of one parameter: `held` and `Loading` carry that of all."""

    name = "lbfgs"

    def claims(self, optimizer: object) -> bool:
        return is_a(optimizer, "torch.optim", "LBFGS")

    def entries(self, state: Mapping[str, object]) -> dict[str, object]:
        return {}

    def blank(self, part: OptimizerParam, source: Mapping[str, object]) -> dict[str, object]:
        return {}


def held(owners: Sequence[ParamOwner]) -> dict[str, dict[str, object]]:
    """Return the states to save, by the FQN of the first parameter: plain values and plain tensors.

    Raises LoadError CKM508 for flat parameters of FSDP1, whose ranks would each keep vectors of a
    part, and for vectors that are not whole."""
    found = {}
    for members in _by_optimizer(owners):
        state = members[0].part.state
        if state:
            plain = {name: _whole(value) for name, value in state.items() if name != SCRATCH}
            found[members[0].fqn] = {**plain, PARAMS: [owner.fqn for owner in members]}
    return found


def _by_optimizer(owners: Sequence[ParamOwner]) -> list[list[ParamOwner]]:
    """Return the parameters of each LBFGS, in the order of its vectors."""
    found: dict[int, list[ParamOwner]] = {}
    for owner in owners:
        if owner.part.family.name != KEY:
            continue
        if owner.is_flat:
            raise LoadError(
                "CKM508",
                f"optimizer: LBFGS steps {owner.fqn} in a flat parameter of FSDP1, expected whole ones"
                " or those of FSDP2",
                "wrap the model by fully_shard, or save without the optimizer",
            )
        found.setdefault(id(owner.part.optimizer), []).append(owner)
    return list(found.values())


def _whole(value: Any) -> object:
    """Return nested values with each DTensor as the plain tensor that every rank has of it."""
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    if not is_dtensor(value):
        return value
    if not all(placement.is_replicate() for placement in value.placements):
        raise LoadError(
            "CKM508",
            f"optimizer: a vector of LBFGS is cut as {value.placements}, expected it whole on each rank",
            "save without the optimizer",
        )
    return value.to_local()


class Loading:
    """Gives every live LBFGS the state of its parameters in a checkpoint.

    lacking  FQNs of the first parameters of those that begin anew
    """

    def __init__(self, checkpoint: Checkpoint, owners: Sequence[ParamOwner]) -> None:
        everything: Mapping[Path, object] = {**checkpoint.plain, **checkpoint.other}
        inside = {path: value for path, value in everything.items() if path[0] == KEY}
        saved = nest(inside).get(KEY, {})
        self._pairs: list[tuple[list[ParamOwner], Mapping[str, Any]]] = []
        self.lacking: list[str] = []
        for members in _by_optimizer(owners) if saved else ():
            names = [owner.fqn for owner in members]
            state = saved.get(names[0])
            if not isinstance(state, Mapping) or not _fits(state, names, members):
                self.lacking.append(names[0])
            else:
                self._pairs.append((members, state))

    def run(self) -> Iterator[str]:
        """Set the states; yield the names of the entries."""
        for members, saved in self._pairs:
            first = members[0].part
            state = {name: _live(value, first.param) for name, value in saved.items()}
            del state[PARAMS]
            first.optimizer.state[first.param] = state
            yield from (f"{members[0].fqn}.{name}" for name in state)


def _fits(state: Mapping[str, Any], names: Sequence[str], members: Sequence[ParamOwner]) -> bool:
    """Return whether the vectors are over these parameters, in this order."""
    numel = sum(owner.part.model.numel() for owner in members)
    vector = state.get("d")
    return state.get(PARAMS) == list(names) and (
        not isinstance(vector, LazyTensor) or vector.shape == (numel,)
    )


def _live(value: Any, param: torch.Tensor) -> object:
    """Return nested values with their tensors read, on the device and the mesh of a parameter."""
    if isinstance(value, Mapping):  # a list with tensors in it is stored item by item
        return [_live(value[number], param) for number in sorted(value)]
    if isinstance(value, list | tuple):
        return [_live(item, param) for item in value]
    if not isinstance(value, LazyTensor):
        return value
    read = value.read().to(param.device)
    if not is_dtensor(param):
        return read
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    return DTensor.from_local(read, mesh, [Replicate()] * mesh.ndim, run_check=False)
