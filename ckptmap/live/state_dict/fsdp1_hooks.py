"""A `load_state_dict` for a model that FSDP1 wraps, which replaces FSDP1's own.

FSDP1's hooks gather every unit before any other hook sees the state dict, and expect its state dict
type. So the method is replaced on the instance, and loads straight into the flat shards. A state dict
of flat shards, as LOCAL_STATE_DICT has them, goes to FSDP1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptmap.live.model.find_targets import find_targets
from ckptmap.live.model.load_report import LoadReport
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.optimizer.local_state import ParamOwner
from ckptmap.live.state_dict.handle import Handle
from ckptmap.live.state_dict.translate import EXTRA_STATE, joined, load_weights
from ckptmap.mapping.wrappers import strip_wrappers

if TYPE_CHECKING:
    import torch
    from torch.nn.modules.module import _IncompatibleKeys

    from ckptmap.live.optimizer.optimizer_types import LiveOptimizer

FLAT = ("_flat_param", "flat_param")
"""The key of a unit's flat parameter in a LOCAL_STATE_DICT."""


class Fsdp1Hooks:
    """The replaced method, until `handle.remove()`. All ranks load together."""

    def __init__(
        self, handle: Handle, model: torch.nn.Module, config: object, max_memory: int
    ) -> None:
        self._handle, self._model = handle, model
        self._config, self._max_memory = config, max_memory
        object.__setattr__(model, "load_state_dict", self._load)
        handle.add(lambda: model.__dict__.pop("load_state_dict", None))

    def _load(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load as `torch.nn.Module.load_state_dict`, but fill parameters in place also with `assign`.
        Raises RuntimeError as torch does, after loading what fits."""
        from torch.nn.modules.module import _IncompatibleKeys

        model = self._model
        weights = {k: v for k, v in state_dict.items() if not k.endswith(EXTRA_STATE)}
        targets, buffers_on_meta = find_targets(model)
        peers = joined(weights, model)
        if any(peers.all(any(key.rpartition(".")[2] in FLAT for key in weights))):
            own = type(model).load_state_dict
            keys: _IncompatibleKeys = own(model, state_dict, strict=strict, assign=assign)
            return keys
        report = load_weights(
            model, weights, targets, buffers_on_meta, peers, self._config, self._max_memory
        )
        self._handle.reports["model"] = report
        extra = {k: v for k, v in state_dict.items() if k.endswith(EXTRA_STATE)}
        lost, strange = set_extra_state(model, extra)
        missing, unexpected = [*report.missing, *lost], [*report.unexpected, *strange]
        _refuse(model, report, missing if strict else [], unexpected if strict else [])
        return _IncompatibleKeys(missing, unexpected)


def _refuse(
    model: torch.nn.Module, report: LoadReport, missing: Sequence[str], unexpected: Sequence[str]
) -> None:
    found = [f"size mismatch for {mismatch}" for mismatch in report.mismatched]
    for title, names in (("Missing", missing), ("Unexpected", unexpected)):
        if names:
            listed = ", ".join(f'"{name}"' for name in names)
            found.append(f"{title} key(s) in state_dict: {listed}. ")
    if found:
        lines = "\n\t".join(found)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{lines}")


def set_extra_state(
    model: torch.nn.Module, state: Mapping[str, object]
) -> tuple[list[str], list[str]]:
    """Set the extra state of modules; return the (missing, unexpected) plain keys."""
    from torch import nn

    paths = {
        f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE: module
        for path, module in model.named_modules()
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }
    live = {plain: paths[key] for key, plain in strip_wrappers(paths, "model").items()}
    given = {plain: state[key] for key, plain in strip_wrappers(state, "state dict").items()}
    for name, value in given.items():
        if name in live:
            live[name].set_extra_state(value)
    return [name for name in live if name not in given], [n for n in given if n not in live]


# ------------------------------------------------------------------------------- the optimizer


def is_own_state(
    optimizer: LiveOptimizer,
    state_dict: Mapping[str, object],
    owners: Sequence[ParamOwner],
    peers: RankGroup,
) -> bool:
    """Return whether the state dict is one that the optimizer itself makes on each rank: state of local
    shards by index, which torch alone can load."""
    flat = any(owner.is_flat for owner in owners)
    return all(peers.all(flat and _is_local(optimizer, state_dict)))


def _is_local(optimizer: LiveOptimizer, state_dict: Mapping[str, Any]) -> bool:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = state_dict.get("state", {})
    if not all(type(key) is int and key < len(params) for key in state):
        return False
    return all(_has_shape(value, tuple(params[key].shape)) for key, value in state.items())


def _has_shape(value: object, shape: tuple[int, ...]) -> bool:
    """Return whether any tensor of a nested value has the shape."""
    if isinstance(value, Mapping):
        return any(_has_shape(item, shape) for item in value.values())
    return tuple(getattr(value, "shape", (-1,))) == shape
