"""hooks.install(): plain `load_state_dict` that takes foreign names, encodings and shardings.

    model.load_state_dict(anything)      a pre-hook loads it as `ckptmap.translate` would,
                                         a post-hook reports missing names in torch's own way
    optimizer.load_state_dict(anything)  state keyed by FQN or index, of any optimizer, into this one

A state dict that fits the model goes through torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptmap.core import argument_checks
from ckptmap.core.signatures import nearest_keyword
from ckptmap.core.sizes import Size
from ckptmap.errors import ArgumentError
from ckptmap.live.model.collective_errors import peer_groups
from ckptmap.live.model.find_targets import find_targets
from ckptmap.live.model.flat_params import is_fsdp1
from ckptmap.live.model.live_tensor import is_dtensor
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.model.value_range import narrows, overflows
from ckptmap.live.optimizer.live_order import live_order
from ckptmap.live.optimizer.local_state import owners
from ckptmap.live.optimizer.unwrap import unwrapped
from ckptmap.live.options import PRECISIONS
from ckptmap.live.state_dict.fsdp1_hooks import Fsdp1Hooks, is_own_state
from ckptmap.live.state_dict.handle import Handle
from ckptmap.live.state_dict.live_checkpoint import any_sharded, open_state_dict
from ckptmap.live.state_dict.load_state_dict import load_live
from ckptmap.live.state_dict.translate import EXTRA_STATE, MAX_MEMORY, PURPOSE, joined, load_weights
from ckptmap.tensors import TensorInfo

if TYPE_CHECKING:
    import torch
    from torch.nn.modules.module import _IncompatibleKeys

    from ckptmap.checkpoint.checkpoint import Checkpoint

__all__ = ["Handle", "install"]  # fmt: skip

DENSE = {"Tensor", "Parameter", "Buffer"}
"""Classes of tensors that torch itself copies into each other."""


@nearest_keyword
def install(
    model: torch.nn.Module,
    optimizer: object = None,
    *,
    config: object = None,
    precision: str = "keep",
    max_memory: Size = MAX_MEMORY,
) -> Handle:
    """Let `model.load_state_dict` and `optimizer.load_state_dict` take state dicts of any setup that
    `ckptmap.translate` takes, until `remove()` of the handle.

    model       as it is trained, in its outermost wrapper: plain, DDP, compiled, `fully_shard`ed,
                FSDP1. The ranks that hold it together load together
    optimizer   built from the model's parameters
    config      the model's config, where names of another scheme need sizes
    precision   of moments, as in `ckptmap.load`
    max_memory  bytes of messages a rank, or `"64MiB"`

    A state dict that fits the model goes to torch alone. Under FSDP1 only flat shards do, as its
    LOCAL_STATE_DICT and its optimizer's own `state_dict()` have them; everything else is loaded into
    the shards without gathering a unit.
    """
    argument_checks.module("model", model)
    argument_checks.choice("precision", precision, PRECISIONS)
    max_memory = argument_checks.nbytes("max_memory", max_memory)
    argument_checks.optimizer(optimizer)
    if isinstance(optimizer, Mapping | list | tuple):
        raise ArgumentError(
            "CKM516",
            f"optimizer: is a {type(optimizer).__name__}, expected one torch.optim.Optimizer",
            "call install for each part of the model with its own optimizer, or use ckptmap.load",
        )
    if optimizer is not None:
        # `owners` refuses an optimizer of another model.
        owners(unwrapped(optimizer), find_targets(model)[0])
    handle = Handle()
    if any(is_fsdp1(module) for module in model.modules()):
        Fsdp1Hooks(handle, model, config, max_memory)
    else:
        _ModuleHooks(handle, model, config, max_memory)
    if optimizer is not None:
        _OptimizerHooks(handle, model, unwrapped(optimizer), precision, max_memory)
    return handle


class _ModuleHooks:
    def __init__(
        self, handle: Handle, model: torch.nn.Module, config: object, max_memory: int
    ) -> None:
        self._handle, self._config, self._max_memory = handle, config, max_memory
        self._prefix: str | None = None
        before = model.register_load_state_dict_pre_hook(self._before)  # type: ignore[no-untyped-call]
        after = model.register_load_state_dict_post_hook(self._after)  # type: ignore[no-untyped-call]
        handle.add(before.remove)
        handle.add(after.remove)

    def _before(
        self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Load what matches. torch does not tell a pre-hook whether `strict` is set, so that its own
        message reports the names that do not match."""
        self._prefix = None
        argument_checks.weights(state_dict, module.state_dict().keys() if not prefix else ())
        own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        weights = {k: v for k, v in own.items() if not k.endswith(EXTRA_STATE)}
        targets, buffers_on_meta = find_targets(module)
        peers = joined(weights, module)
        if all(peers.all(_fits(weights, module))):
            return
        report = load_weights(
            module, weights, targets, buffers_on_meta, peers, self._config, self._max_memory
        )
        self._handle.reports["model"] = report
        self._prefix = prefix
        errors: list[str] = rest[-1]
        errors += [f"size mismatch for {mismatch}" for mismatch in report.mismatched]
        for key in weights:
            del state_dict[prefix + key]

    def _after(self, module: torch.nn.Module, incompatible: _IncompatibleKeys) -> None:
        """Correct torch's missing keys: it was not given the tensors that are loaded already."""
        if self._prefix is None:
            return
        prefix, report = self._prefix, self._handle.reports["model"]
        self._prefix = None
        extra = [key for key in incompatible.missing_keys if key.endswith(EXTRA_STATE)]
        others = [key for key in incompatible.missing_keys if not key.startswith(prefix)]
        missing = [prefix + fqn for fqn in report.missing]
        incompatible.missing_keys[:] = list(dict.fromkeys([*others, *missing, *extra]))
        incompatible.unexpected_keys.extend(prefix + key for key in report.unexpected)


def _fits(state: Mapping[str, torch.Tensor], module: torch.nn.Module) -> bool:
    """Return whether torch can take the state dict alone: nothing quantized, no value that the live dtype might
    not hold, the same names, shapes, meshes and placements."""
    live = {k: v for k, v in module.state_dict().items() if not k.endswith(EXTRA_STATE)}
    return set(live) == set(state) and all(_alike(live[key], state[key]) for key in live)


def _alike(live: torch.Tensor, given: torch.Tensor) -> bool:
    if is_dtensor(live) != is_dtensor(given) or live.shape != given.shape:
        return False
    if narrows(given.dtype, live.dtype) or overflows(given.dtype, live.dtype):
        return False
    if is_dtensor(live) and is_dtensor(given):
        local, other = live.to_local(), given.to_local()
        same = live.device_mesh == given.device_mesh and live.placements == given.placements
    else:
        local, other, same = live, given, True
    return bool(same) and {type(local).__name__, type(other).__name__} <= DENSE


# ------------------------------------------------------------------------------- the optimizer


class _OptimizerHooks:
    """Hooks around the optimizer's own `load_state_dict`, which casts moments to the parameter's dtype.
    It gets the parameter groups alone, and the loaded state is put back afterwards."""

    def __init__(
        self,
        handle: Handle,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: str,
        max_memory: int,
    ) -> None:
        import torch

        self._handle, self._model, self._optimizer = handle, model, optimizer
        self._precision, self._max_memory = precision, max_memory
        self._state: dict[torch.Tensor, object] | None = None
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            handle.add(optimizer.register_load_state_dict_pre_hook(self._before).remove)
            handle.add(optimizer.register_load_state_dict_post_hook(self._after).remove)
        else:  # the optimizer's class has a method of its own that calls no hooks
            optimizer.__dict__["load_state_dict"] = self._in_place_of
            handle.add(lambda: optimizer.__dict__.pop("load_state_dict", None))

    def _before(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, object]
    ) -> dict[str, object] | None:
        if not self._load(state_dict):
            return None
        self._state = dict(optimizer.state)
        return _groups_alone(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        if self._state is not None:
            optimizer.state.update(self._state)
            self._state = None

    def _in_place_of(self, state_dict: dict[str, object]) -> None:
        if not self._load(state_dict):
            type(self._optimizer).load_state_dict(self._optimizer, state_dict)

    def _load(self, state_dict: Mapping[str, object]) -> bool:
        """Load the state; False: the state dict has groups alone, or is FSDP1's own local state."""
        targets, _ = find_targets(self._model)
        tensors = list(_tensors(state_dict))
        spread = bool(peer_groups(self._model)) or any_sharded(tensors)
        peers = RankGroup.join(PURPOSE) if spread else RankGroup()
        if not any(peers.all(bool(tensors))):
            return False
        if is_own_state(self._optimizer, state_dict, owners(self._optimizer, targets), peers):
            return False
        weights = {
            name: TensorInfo(tuple(target.tensor.shape), target.dtype)
            for target in targets
            for name in target.names
        }
        live = open_state_dict(state_dict, peers, "optimizer", weights)
        self._handle.reports["optimizer"] = load_live(
            live,
            targets,
            optimizer=self._optimizer,
            order=live_order(self._optimizer, targets, self._model),
            weights=False,
            precision=self._precision,
            max_memory=self._max_memory,
        )
        return True


def name_by_live(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: object) -> Checkpoint:
    """Return the checkpoint with optimizer state named in the live optimizer's order, where the
    state is keyed by index and nothing in the checkpoint says what an index means.

    The optimizer's own `load_state_dict` takes it so. Raises SourceError CKM207 where shapes
    refute the order.
    """
    if not checkpoint.optimizer_by_index:
        return checkpoint
    targets, _ = find_targets(model)
    return checkpoint.with_optimizer_order(live_order(optimizer, targets, model, checkpoint))


def _tensors(value: object) -> list[object]:
    import torch

    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def _groups_alone(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return a state dict of the optimizer's own groups, with parameters by number and no state."""
    groups, first = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        groups.append({**group, "params": list(range(first, first + count))})
        first += count
    return {"state": {}, "param_groups": groups}
