"""Adapters as peft saves them: the config, and which tensor is which part of which module.

    base_model.model.model.layers.0.mlp.up_proj.lora_A.weight -> A of model.layers.0.mlp.up_proj

On disk the adapter's name is dropped from keys, in a model's own state dict (as FSDP2 and DCP save
it) it is there; both are read. Formulas, defaults and key forms are those of peft's LoraConfig and
`get_peft_model_state_dict`, 0.21.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open
from ckptmap.errors import SourceError
from ckptmap.formats.probe import ADAPTER_CONFIG, adapters_in, look
from ckptmap.storage.files import whole
from ckptmap.storage.hub.resolve import locate
from ckptmap.storage.lazy_tensor import LazyTensor

CONFIG = ADAPTER_CONFIG
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
HEAD = "base_model.model."
"""What peft puts before every name of the model that it wraps."""
_LOW = re.compile(
    r"(?P<module>.+)\.(?P<half>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight$|bias$)(?P<name>[^.]+))?(?:\.(?P<leaf>weight|bias))?"
)
_SAVED = re.compile(r"\.modules_to_save\.(?P<name>[^.]+)(?=\.)")
_WHOLE = ".modules_to_save."
_ORIGINAL = ".original_module."
_WRAPPERS = re.compile(r"(?:\.base_layer)+(?=\.|$)")
"""Between what peft has put around a module, often several times, and what is inside."""
_TRAINING = ".lora_velora_"
"""Buffers of VeLoRA, by which activations are compressed for the backward."""
_NESTED = re.compile(r"\)[*+{]|(?:[*+{].*){5}")
"""A repeated group, or much repetition: what makes a search take time without end, and no module's
name needs it."""
_UNMERGEABLE = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config",
    "monteclora_config", "trainable_token_indices", "use_bdlora", "use_qalora",
)  # fmt: skip
_KNOWN = frozenset((
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias",
    "lora_dropout", "lora_ga_config", "megatron_core", "merge_weights", "modules_to_save",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "alpha_pattern",
    "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_dora",
    "use_rslora", "velora_config",
))  # fmt: skip
"""Settings that are read here, or change nothing of what an adapter adds once it is trained."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin that take something out of the base, which the file does not have."""
_HALVES = {"lora_embedding_A": "lora_A", "lora_embedding_B": "lora_B"}


@dataclass(frozen=True)
class LoraConfig:
    """What an adapter_config.json says that merging needs."""

    r: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rslora: bool
    dora: bool
    fan_in_fan_out: bool
    parameters: tuple[str, ...]
    """Ends of the names of parameters that were targeted themselves, not by their module."""
    text: Mapping[str, Any] = field(repr=False)
    """The same as it stands in the file, for a manifest."""

    def wraps(self, module: str) -> tuple[str, ...]:
        """Names of the module's own parameters that an adapter of it may be of."""
        leaves = dict.fromkeys(target.rpartition(".")[2] for target in self.parameters)
        names = [f"{module}.{leaf}" for leaf in leaves]
        ends = tuple(f".{target}" for target in self.parameters)
        return tuple(name for name in names if f".{name}".endswith(ends))

    def rank(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski 2023)."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


@dataclass(frozen=True)
class Low:
    """The low-rank change of one tensor of a module.

    embedding  its halves are an embedding's
    names      what the tensor may be called; several where peft has wrapped parameters of a module
               one around the other, of which shapes tell one from the other
    wrapped    peft has wrapped a parameter, not the module
    """

    module: str
    a: LazyTensor
    b: LazyTensor
    embedding: bool
    names: tuple[str, ...]
    wrapped: bool = False
    magnitude: LazyTensor | None = None
    bias: LazyTensor | None = None


@dataclass(frozen=True)
class Adapter:
    """An adapter, opened: headers and config only.

    lows    low-rank changes by module, in the order of the file
    trained tensors that take the place of the base's, by FQN
    left    keys that a merge has no use for, with the reason
    files   everything that it is read from
    others  folders of further adapters in its directory, which are not read
    """

    path: str
    config: LoraConfig
    lows: Mapping[str, Low]
    trained: Mapping[str, LazyTensor]
    left: Mapping[str, str]
    files: tuple[str, ...]
    ckpt: Checkpoint
    others: tuple[str, ...] = ()

    def without(self, patterns: Sequence[str]) -> Adapter:
        """The same without the modules and whole tensors that a pattern matches. Raises SourceError
        CKM321 where one matches nothing."""
        left = dict(self.left)
        for pattern in patterns:
            modules = [
                k for k, low in self.lows.items() if fnmatch.filter((k, low.module), pattern)
            ]
            found = modules + fnmatch.filter(self.trained, pattern)
            if not found:
                raise SourceError(
                    "CKM321",
                    f"--leave {pattern}: matches no module and no whole tensor of {self.path}",
                    "a module is named as in the base, as model.layers.0.mlp.up_proj",
                )
            left |= dict.fromkeys(found, f"--leave {pattern}")
        return replace(
            self,
            lows={name: low for name, low in self.lows.items() if name not in left},
            trained={name: lazy for name, lazy in self.trained.items() if name not in left},
            left=left,
        )


def open_adapter(
    path: str | os.PathLike[str], config: str | os.PathLike[str] | None = None
) -> Adapter:
    """The adapter at `path`: a peft directory, or a checkpoint with the config beside it.

    `config` is its adapter_config.json, where that lies elsewhere. Raises SourceError CKM101 where
    nothing is at the path; CKM320 where there is no config, or it asks for what cannot be merged;
    CKM322 where a half is missing.
    """
    place = locate(path).path
    seen = look(place)
    weights = next((place / name for name in WEIGHTS if (place / name).is_file()), place)
    several = adapters_in(seen) if seen.is_dir else []
    if seen.is_dir and weights is place and not registry.knows(seen):
        raise SourceError(
            "CKM320",
            f"{path}: holds none of {', '.join(WEIGHTS)}, nor a checkpoint"
            + (f"; it holds adapters: {', '.join(several[:6])}" if several else ""),
            f"name one of them: {quote(str(place / several[-1]))}"
            if several
            else "give the directory that peft's save_pretrained wrote",
        )
    file = _config_file(place, config)
    ckpt = open(weights)
    settings = read_config(file)
    lows, trained, left = _sorted_out(ckpt, settings)
    files = (*ckpt.index.files, str(file.absolute()))
    return Adapter(str(path), settings, lows, trained, left, files, ckpt, tuple(several))


def _config_file(place: Path, given: str | os.PathLike[str] | None) -> Path:
    if given is not None:
        found = locate(given).path
        return found / CONFIG if found.is_dir() else found
    folder = place if place.is_dir() else place.parent
    for candidate in (folder / CONFIG, folder.parent / CONFIG):
        if candidate.is_file():
            return candidate
    raise SourceError(
        "CKM320",
        f"{place}: has no {CONFIG}, which alone tells how much an adapter adds",
        f"give it with --adapter-config PATH, or copy it beside the adapter as {CONFIG}",
    )


# --------------------------------------------------------------------------------- config


def read_config(file: Path) -> LoraConfig:
    """Raises SourceError CKM320 where it is none of a LoRA that can be merged."""
    try:
        text = json.loads(whole(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(
            "CKM320", f"{file}: is no JSON: {error}", "save the adapter again"
        ) from error
    if not isinstance(text, dict) or text.get("peft_type") != "LORA":
        kind = text.get("peft_type") if isinstance(text, dict) else type(text).__name__
        raise SourceError(
            "CKM320",
            f"{file}: peft_type {kind!r}, expected 'LORA'",
            "only LoRA and what peft makes of it (rsLoRA, DoRA) can be merged",
        )
    _refuse_variants(file, text)
    number, flag = (int, float), (bool,)
    return LoraConfig(
        r=_value(file, text, "r", (int,), 8),
        alpha=_value(file, text, "lora_alpha", number, 8),
        rank_pattern=_patterns(file, text, "rank_pattern", (int,)),
        alpha_pattern=_patterns(file, text, "alpha_pattern", number),
        rslora=_value(file, text, "use_rslora", flag, False),
        dora=_value(file, text, "use_dora", flag, False),
        fan_in_fan_out=_value(file, text, "fan_in_fan_out", flag, False),
        parameters=_strings(file, text, "target_parameters"),
        text={name: text[name] for name in _RECORDED if text.get(name)},
    )


_RECORDED = (
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out",
    "bias", "modules_to_save", "target_parameters", "base_model_name_or_path",
)  # fmt: skip


def _refuse_variants(file: Path, text: Mapping[str, Any]) -> None:
    for name in _UNMERGEABLE:
        if text.get(name):
            raise SourceError(
                "CKM320",
                f"{file}: {name} is set: such an adapter is no sum of a base and a product",
                "merge it with peft itself, or keep it apart",
            )
    for name, value in text.items():
        if name not in _KNOWN and (value is True or (value and isinstance(value, (dict, list)))):
            raise SourceError(
                "CKM320",
                f"{file}: {name} is set, which peft 0.21 does not know: whether it changes what the"
                " adapter adds cannot be told",
                f"merge it with the peft that wrote it; if it changes nothing, take {name} out",
            )
    begun = text.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        raise SourceError(
            "CKM320",
            f"{file}: init_lora_weights {begun!r} changed the base's weights before training",
            "save the adapter converted to LoRA (save_pretrained with"
            " path_initial_model_for_weight_conversion), or merge with the changed base by peft",
        )


def _value(
    file: Path, text: Mapping[str, Any], name: str, kinds: tuple[type, ...], default: Any
) -> Any:
    value = text.get(name)
    value = default if value is None else value
    sound = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if not sound or (int in kinds and not 0 < abs(value) < math.inf) or (name == "r" and value < 1):
        kind = " or ".join(kind.__name__ for kind in kinds)
        raise SourceError(
            "CKM320", f"{file}: {name} is {value!r}, expected {kind}", "save the adapter again"
        )
    return value


def _strings(file: Path, text: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = text.get(name) or ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise SourceError(
            "CKM320", f"{file}: {name} is {value!r}, expected names", "save the adapter again"
        )
    return tuple(value)


def _patterns(
    file: Path, text: Mapping[str, Any], name: str, kinds: tuple[type, ...]
) -> dict[str, Any]:
    """Patterns as they stand; only those are taken that are quick to match."""
    value = text.get(name) or {}
    if not isinstance(value, dict):
        raise SourceError(
            "CKM320", f"{file}: {name} is {value!r}, expected an object", "save the adapter again"
        )
    for pattern in value:
        try:
            re.compile(pattern)
            sound = len(pattern) <= 1000 and not _NESTED.search(pattern)
        except re.error:
            sound = False
        if not sound:
            raise SourceError(
                "CKM320",
                f"{file}: {name}: {pattern!r} is no plain pattern of module names",
                "write the modules out, without repeated groups",
            )
    return {pattern: _value(file, value, pattern, kinds, 1) for pattern in value}


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that ends the module's name, at a dot: as peft matches."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


# --------------------------------------------------------------------------------- tensors


def _sorted_out(
    ckpt: Checkpoint, config: LoraConfig
) -> tuple[dict[str, Low], dict[str, LazyTensor], dict[str, str]]:
    found: dict[str, dict[str, LazyTensor]] = {}
    trained: dict[str, LazyTensor] = {}
    left: dict[str, str] = {}
    embeddings: set[str] = set()
    names: set[str | None] = set()
    for key in ckpt:
        plain = key
        while plain.startswith(HEAD):
            plain = plain.removeprefix(HEAD)
        low, saved = _LOW.fullmatch(plain), _SAVED.search(plain)
        if low is not None:
            half = _HALVES.get(low["half"], low["half"])
            embeddings |= {low["module"]} if low["half"] in _HALVES else set()
            half += ".bias" if low["leaf"] == "bias" else ""
            found.setdefault(low["module"], {})[half] = ckpt[key]
            names.add(low["name"])
        elif _TRAINING in plain:
            left[key] = "of training alone"
        elif _ORIGINAL in plain:
            left[key] = "of a module that was trained as a whole: as it was before"
        elif plain.endswith(".modules_to_save.bias") and key.replace(_WHOLE, ".") in ckpt:
            left[key] = "of a module that was trained as a whole: its bias once more"
        else:
            name = _SAVED.sub("", plain) if saved else _WRAPPERS.sub("", plain)
            trained[name] = ckpt[key]
            names |= {saved["name"]} if saved else set()
    named = sorted(name for name in names if name is not None)
    if len(named) > 1:
        raise SourceError(
            "CKM320",
            f"{ckpt.path}: holds the adapters {', '.join(named)}, expected one",
            "save the one to be merged with peft's save_pretrained(selected_adapters=[...])",
        )
    lows = {module: _low(ckpt, config, module, half, embeddings) for module, half in found.items()}
    return lows, trained, left


def _low(
    ckpt: Checkpoint,
    config: LoraConfig,
    module: str,
    halves: Mapping[str, LazyTensor],
    embeddings: set[str],
) -> Low:
    known = ("lora_A", "lora_B", "lora_magnitude_vector", "lora_B.bias")
    stranger = next((half for half in halves if half not in known), None)
    if stranger is not None:
        raise SourceError(
            "CKM322", f"{ckpt.path}: {module}.{stranger} has no meaning here", "save it again"
        )
    for half in ("lora_A", "lora_B"):
        if half not in halves:
            raise SourceError(
                "CKM322",
                f"{ckpt.path}: {module} has no {half}, only {', '.join(halves)}",
                "the adapter was saved in part; save it again, gathered from all ranks",
            )
    holder = _WRAPPERS.sub("", module)
    names = config.wraps(holder)
    if not names and module.endswith(".base_layer"):
        raise SourceError(
            "CKM322",
            f"{ckpt.path}: {module} is inside a wrapper, and target_parameters name none of {holder}",
            "give the adapter_config.json that was saved with the adapter",
        )
    return Low(
        holder, halves["lora_A"], halves["lora_B"], module in embeddings,
        names or (f"{holder}.weight",), bool(names), halves.get("lora_magnitude_vector"),
        halves.get("lora_B.bias"),
    )  # fmt: skip
