"""A live model that peft has wrapped: the names of its tensors in a base checkpoint and in an adapter.

    live                                                  base        adapter's file
    base_model.model.X.weight                             X.weight
    base_model.model.X.base_layer.weight                  X.weight
    base_model.model.X.lora_A.default.weight                          base_model.model.X.lora_A.weight
    base_model.model.X.lora_magnitude_vector.default.weight           base_model.model.X.lora_magnitude_vector
    base_model.vera_A.default                                         base_model.vera_A
    base_model.model.X.original_module.weight             X.weight
    base_model.model.X.token_adapter.base_layer.weight    X.weight
    base_model.model.X.modules_to_save.default.weight     X.weight    base_model.model.X.weight

Source: `get_peft_model` and `get_peft_model_state_dict` of peft 0.21. An adapter's file does not name
the adapter: it is taken to be the active one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.lora.adapter_files import CONFIG, HEAD, WEIGHTS
from ckptmap.checkpoint.open import open as open_checkpoint
from ckptmap.checkpoint.open import open_in, open_run_of_adapter
from ckptmap.core.formatting import some
from ckptmap.errors import LoadError
from ckptmap.formats.detect import look
from ckptmap.live.model import module_walk
from ckptmap.live.model.live_tensor import LiveTensor, PeftNames
from ckptmap.live.model.several_models import names_of
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.files import Files
from ckptmap.storage.hub.resolve import locate
from ckptmap.storage.json_file import read_object

if TYPE_CHECKING:
    import torch

BASE_LAYER, ORIGINAL, SAVED = "base_layer", "original_module", "modules_to_save"
TOKENS = "token_adapter"
"""Wraps an embedding of which single rows are trained."""
MAGNITUDE = "lora_magnitude_vector"
"""A module in memory, a tensor of its own in a file."""
KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that do not change the base's weights."""
SETTINGS = (
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
    "fan_in_fan_out",
)  # fmt: skip
"""Settings of an adapter that decide how much its tensors add to the base."""


@dataclass(frozen=True)
class PeftWrapping:
    """The adapters that peft has put into a model.

    layers  names of the module dicts that hold an adapter's tensors: `lora_A`, ...
    active  name of the active adapter; empty: none is, or several are
    config  name of an adapter -> peft's config
    """

    layers: frozenset[str]
    active: str
    config: Mapping[str, object]


def wrapped(model: torch.nn.Module) -> PeftWrapping | None:
    """Return the adapters of a model; None: peft has not wrapped it, or it is several models."""
    if names_of(model):
        return None
    layers, active, config = set[str](), set[str](), dict[str, object]()
    for module in module_walk.modules(model):
        if not any(cls.__module__.split(".")[0] == "peft" for cls in type(module).__mro__):
            continue
        layers.update(getattr(module, "adapter_layer_names", ()))
        layers.update(_holders(module))
        active.update(getattr(module, "active_adapters", ()) or ())
    if not layers:
        return None
    for module in module_walk.modules(model):
        found = getattr(module, "peft_config", None)
        if isinstance(found, Mapping):
            config |= found
    return PeftWrapping(
        frozenset(layers - {SAVED}), active.pop() if len(active) == 1 else "", config
    )


def _holders(module: object) -> list[str]:
    """Return the names of a layer's further dicts that hold tensors: VeRA's shared matrices, AdaLoRA's
    ranks, VeLoRA's buffers."""
    from torch import nn

    def holds(place: object) -> bool:
        found = isinstance(place, nn.Module) and [*place.parameters(), *place.buffers()]
        return bool(found)

    return [
        name
        for name in getattr(module, "other_param_names", ())
        if holds(getattr(module, name, None))
    ]


def named(model: torch.nn.Module, targets: Sequence[LiveTensor]) -> list[LiveTensor]:
    """Return the targets with their names in bases and adapters, where peft has wrapped the model."""
    found = wrapped(model)
    if found is None:
        return list(targets)
    return [replace(target, adapted=_adapted(target, found)) for target in targets]


def _adapted(target: LiveTensor, found: PeftWrapping) -> PeftNames:
    forms = [_forms(name, found) for name in target.names]
    base = [base for base, _, _ in forms if base and base not in target.names]
    file = [file for _, file, _ in forms if file]
    adapter = forms[0][2]
    setting = _initialised_from_base(found.config.get(adapter)) if adapter and not base else ""
    return PeftNames(tuple(dict.fromkeys(base)), tuple(dict.fromkeys(file)), adapter, setting)


def _forms(name: str, found: PeftWrapping) -> tuple[str, str, str]:
    """Return (name in a base, name in an adapter's file, adapter), each empty where there is none."""
    inside = name.removeprefix(HEAD)
    beside = inside == name and name.startswith("base_model.")  # as what all layers share
    head, path = "" if beside else HEAD, inside.split(".")
    for at, segment in enumerate(path[:-1]):
        if segment == SAVED:
            rest = ".".join([*path[:at], *path[at + 2 :]])
            adapter = path[at + 1]
            return rest, HEAD + rest if adapter == found.active else "", adapter
        if segment in found.layers:
            adapter = path[at + 1]
            leaf = () if segment == MAGNITUDE else path[at + 2 :]
            rest = ".".join([*path[: at + 1], *leaf])
            return "", head + rest if adapter == found.active else "", adapter
    return ".".join(s for s in path if s not in (BASE_LAYER, ORIGINAL, TOKENS)), "", ""


def _initialised_from_base(config: object) -> str:
    """Return the setting by which an adapter's first values came from its base; empty: none did."""
    if getattr(config, "use_dora", False):
        return "use_dora=True"
    if getattr(config, "kasa_config", None) is not None:
        return "kasa_config"
    way = getattr(config, "init_lora_weights", True)
    return "" if way in KEEPS_BASE else f"init_lora_weights={way!r}"


# ------------------------------------------------------------------------------- what is left


def targets_to_leave(targets: Sequence[LiveTensor], found: Mapping[str, str]) -> list[LiveTensor]:
    """Return the targets that the source lacks and need not have: those of the adapter where the
    source is a base, those of the base where it is an adapter. `found` is FQN -> the source's name."""
    base, in_file, adapters = False, False, set[str]()
    for target in targets:
        adapted, name = target.adapted, found.get(target.fqn)
        if adapted is not None and name is not None:
            base = base or not adapted.adapter
            in_file = in_file or name in adapted.file
            adapters |= {adapted.adapter} if name not in adapted.base else set()
    adapters.discard("")
    if not base and not adapters:
        return []

    def need_not_be_there(adapted: PeftNames) -> bool:
        if adapted.adapter:
            return adapted.adapter not in adapters
        return in_file or not base

    return [
        target
        for target in targets
        if target.fqn not in found
        and target.adapted is not None
        and need_not_be_there(target.adapted)
    ]


def refuse_values_of_another_base(left: Sequence[LiveTensor], path: str) -> None:
    """Raise LoadError CKM514 where an adapter keeps values that peft computed from another base."""
    for target in left:
        if target.adapted is not None and target.adapted.initialised_from_base:
            raise LoadError(
                "CKM514",
                f"{path}: has no {target.fqn}, which came from the base that was wrapped, expected"
                f" its adapter too ({target.adapted.initialised_from_base})",
                "load the base before get_peft_model(model, ...), or with strict=False and the"
                " adapter after it",
            )


# ------------------------------------------------------------------------------- an adapter's file


def open_base_or_adapter(
    path: str | os.PathLike[str] | Checkpoint, model: torch.nn.Module, strict: bool
) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint at a path, which may be an adapter's directory where peft has wrapped the
    model, and the settings by which its config differs from the model's.

    Raises LoadError CKM515 for such a difference if `strict`, SourceError as `ckptmap.open` does.
    """
    if isinstance(path, Checkpoint):
        return path, []
    found = wrapped(model)
    if found is None:
        return open_checkpoint(path), []
    files = Files()
    try:
        return _open_wrapped(files, path, found, strict)
    except BaseException:
        files.close()
        raise


def _open_wrapped(
    files: Files, path: str | os.PathLike[str], found: PeftWrapping, strict: bool
) -> tuple[Checkpoint, list[str]]:
    place = look(locate(path, files.mounts).path, files.mounts)
    if CONFIG not in place.names or registry.knows(place):
        return open_in(files, path), []
    config = Path(place.path) / CONFIG
    other = _differences(config, found.config.get(found.active), files.mounts)
    if other and strict:
        raise LoadError(
            "CKM515",
            f"{path}: its adapter is not the model's: {some(other)}",
            "wrap the model with the adapter's own config: PeftConfig.from_pretrained",
        )
    ckpt = open_run_of_adapter(files, place)
    if ckpt is None:
        weights = next((name for name in WEIGHTS if name in place.names), "")
        ckpt = open_in(files, Path(place.path) / weights)
    return ckpt, [f"adapter {text}" for text in other]


def _differences(file: Path, live: object, mounts: Mounts) -> list[str]:
    """Return the settings of an adapter's config that differ from the model's, a phrase each."""
    try:
        text = read_object(file, mounts)
    except (OSError, ValueError):
        return [f"{CONFIG}: is no JSON object"]
    if live is None:
        return ["the model has no single active adapter"]
    found = []
    for name in SETTINGS:
        mine, theirs = getattr(live, name, None), text.get(name)
        mine = getattr(mine, "value", mine)
        if name in text and (mine or None) != (theirs or None):
            found.append(f"{name}: was {theirs}, is {mine}")
    return found
