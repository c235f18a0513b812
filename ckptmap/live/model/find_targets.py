"""The tensors of a live model by plain FQN: wrappers of DDP, FSDP and torch.compile leave no trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptmap.errors import LoadError
from ckptmap.live.model import (
    flat_params,
    fsdp1_buffers,
    fsdp2_params,
    module_walk,
    peft,
    several_models,
)
from ckptmap.live.model.live_form import is_loadable, live_forms, quantized_classes
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.values_in_memory import require_dense
from ckptmap.quantization.torchao.subclass_reader import TRAINED_DENSE

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

PlacesByName = dict[str, "tuple[torch.nn.Module, str, bool]"]
"""FQN with wrapper segments -> (module, attribute, is it a buffer)."""


def find_targets(model: torch.nn.Module) -> tuple[list[LiveTensor], list[str]]:
    """Return every parameter and persistent buffer, each once, and the names of the non-persistent
    buffers on meta, which no checkpoint has.

    Raises LoadError CKM505 for a tensor subclass that is unknown.
    """
    reshard(model)
    slices = flat_params.flat_param_slices(model)
    taken = {(id(module), name) for flat in slices for module, name in flat.places}
    found: PlacesByName = {}
    buffers_on_meta: list[str] = []
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
        prefix = f"{path}." if path else ""
        for name, value in module._parameters.items():
            if value is not None and (id(module), name) not in taken and not _is_flat(value):
                found[prefix + name] = (module, name, False)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if name not in module._non_persistent_buffers_set:
                found[prefix + name] = (module, name, True)
            elif buffer.is_meta:
                buffers_on_meta.append(prefix + name)
    keys = [_keys(flat, paths) for flat in slices]
    plain = several_models.plain_names(model, [*found, *(key for some in keys for key in some)])
    targets = _tied_together(
        found, plain, fsdp2_params.fsdp_params(model), fsdp1_buffers.forward_dtypes(model)
    )
    targets += [
        flat_params.FlatParamTensor(
            tuple(plain[key] for key in some), flat.places, False, shape=flat.shape,
            first=flat.first, count=flat.count, at=flat.at, param=flat.param,
            replicas=flat.replicas, handle=flat.handle, number=flat.number,
        )
        for flat, some in zip(slices, keys, strict=True)
    ]  # fmt: skip
    return peft.named(model, targets), buffers_on_meta


def _is_flat(value: object) -> bool:
    return type(value).__name__ == "FlatParameter" or getattr(value, "_is_flat_param", False)


def _keys(flat: flat_params.FlatParamSlice, paths: dict[int, list[str]]) -> list[str]:
    """Return all FQNs of a flat parameter's tensor, with wrapper segments."""
    return [
        f"{path}.{name}" if path else name
        for module, name in flat.places
        for path in paths[id(module)]
    ]


def _tied_together(
    found: PlacesByName,
    plain: Mapping[str, str],
    sharded: Mapping[tuple[int, str], FSDPParam],
    forward_dtypes: Mapping[int, str],
) -> list[LiveTensor]:
    """Return one LiveTensor for all names that hold the same object."""
    ties: dict[int, list[str]] = {}
    for key, (module, name, _) in found.items():
        ties.setdefault(id(getattr(module, name)), []).append(key)
    targets = []
    for identity, keys in ties.items():
        _refuse_lazy(found[keys[0]], plain[keys[0]])
        places = {(id(found[k][0]), found[k][1]): (found[k][0], found[k][1]) for k in keys}
        managed = next((sharded[place] for place in places if place in sharded), None)
        target = LiveTensor(
            tuple(plain[key] for key in keys),
            tuple(places.values()),
            found[keys[0]][2],
            managed,
            forward_dtype=forward_dtypes.get(identity, ""),
        )
        _refuse_subclass(target)
        targets.append(target)
    return targets


def reshard(model: torch.nn.Module) -> None:
    """Bring back the shards of FSDP: its root unit keeps whole parameters after a forward."""
    import torch

    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in module_walk.modules(model):
        if isinstance(module, FSDPModule):
            module.reshard()
    flat_params.reshard(model)


def _refuse_lazy(found: tuple[torch.nn.Module, str, bool], fqn: str) -> None:
    import torch

    module, name, _ = found
    if torch.nn.parameter.is_lazy(getattr(module, name)):
        raise LoadError(
            "CKM505",
            f"model: {fqn} of {type(module).__name__} has no shape yet",
            "run a forward on a batch first, so that lazy modules know their shapes",
        )


def _refuse_subclass(target: LiveTensor) -> None:
    tensor, local = target.tensor, target.local
    require_dense("CKM505", f"model: {target.fqn}", local)
    kind = type(tensor).__name__
    forms = live_forms() if local.is_meta else ()
    unmade = {name for form in forms if not form.has_values_on_meta for name in form.classes}
    if local.is_meta and kind in {*unmade, *TRAINED_DENSE}:
        raise LoadError(
            "CKM505",
            f"model: {target.fqn} is a {kind} on meta, which has no values to fill",
            "build the model on its device, then quantize it for training",
        )
    for one in (tensor, local):
        kind = type(one).__name__
        if not is_loadable(kind):
            raise LoadError(
                "CKM505",
                f"model: {target.fqn} is a {kind}, expected a dense tensor, a DTensor, or one of"
                f" {', '.join(quantized_classes())}",
                "load before quantizing or wrapping this weight",
            )
