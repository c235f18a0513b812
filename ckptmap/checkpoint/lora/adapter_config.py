"""Read the adapter_config.json that peft writes: ranks and scales by which an adapter is merged.

Defaults and formulas are those of peft's LoraConfig, 0.21. A setting that changes what an adapter
adds to its base, in a way that is not a product of two matrices, is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptmap.checkpoint.lora.targets import Targets
from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.json_file import read_json
from ckptmap.storage.peft_adapter import merged_elsewhere
from ckptmap.storage.resource_limits import unreadable

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


@dataclass(frozen=True)
class LoraConfig:
    """The settings of an adapter_config.json that merging needs."""

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
    ties: bool
    """peft keeps a head that is tied to the embedding so: both have one adapter."""
    targets: Targets = field(default_factory=Targets)
    file: str = ""
    peft_version: str = ""
    """The release of peft that made it; empty: before 0.18, or another program."""

    def wraps(self, module: str) -> tuple[str, ...]:
        """Return the names of the module's own parameters that its adapter may change."""
        leaves = dict.fromkeys(target.rpartition(".")[2] for target in self.parameters)
        names = [f"{module}.{leaf}" for leaf in leaves]
        ends = tuple(f".{target}" for target in self.parameters)
        return tuple(name for name in names if f".{name}".endswith(ends))

    def rank(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """Return alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski 2023)."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def read_config(file: Path, mounts: Mounts) -> LoraConfig:
    """Return the settings of the file. Raises SourceError CKM320 unless they are of a LoRA that can be
    merged."""
    try:
        text = read_json(file, mounts, allow_nan=False)
    except (OSError, ValueError) as error:
        if isinstance(error, PermissionError):
            raise unreadable(file, error) from error
        raise SourceError(
            "CKM320", f"{file}: cannot be read as JSON: {error}", "copy or save the adapter again"
        ) from error
    if not isinstance(text, dict) or text.get("peft_type") != "LORA":
        kind = text.get("peft_type") if isinstance(text, dict) else type(text).__name__
        raise SourceError(
            "CKM320",
            f"{file}: peft_type {kind!r}, expected 'LORA'",
            merged_elsewhere(kind),
        )
    _refuse_variants(file, text)
    _strings(file, text, "modules_to_save")
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
        ties=_value(file, text, "ensure_weight_tying", flag, False),
        targets=_targets(file, text),
        file=str(file),
        peft_version=str(text.get("peft_version") or ""),
    )


def _targets(file: Path, text: Mapping[str, object]) -> Targets:
    """Return the modules that the file targets. Raises SourceError CKM320 where it names none properly."""
    stated, excluded = text.get("target_modules"), text.get("exclude_modules")
    layers, patterns = text.get("layers_to_transform"), text.get("layers_pattern")
    indices = [layers] if type(layers) is int else layers or []
    if not isinstance(indices, list) or not all(type(index) is int for index in indices):
        raise SourceError(
            "CKM320",
            f"{file}: layers_to_transform is {str(layers)[:80]!r}, expected numbers of layers",
            "correct it there, or save the adapter again",
        )
    return Targets(
        None if stated is None or isinstance(stated, str) else _strings(file, text, "target_modules"),
        stated if isinstance(stated, str) else None,
        excluded if isinstance(excluded, str) else _strings(file, text, "exclude_modules"),
        tuple(indices) or None,
        (patterns,) if isinstance(patterns, str) and patterns else
        _strings(file, {**text, "layers_pattern": patterns or None}, "layers_pattern"),
    )  # fmt: skip


_RECORDED = (
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out",
    "bias", "modules_to_save", "target_parameters", "base_model_name_or_path",
)  # fmt: skip


def _refuse_variants(file: Path, text: Mapping[str, object]) -> None:
    for name in _UNMERGEABLE:
        if text.get(name):
            raise SourceError(
                "CKM320",
                f"{file}: {name} is set: such an adapter adds more to its base than a product of two matrices",
                "merge it with peft (model.merge_and_unload()), or load it beside its base, not merged",
            )
    for name, value in text.items():
        if name not in _KNOWN and (value is True or (value and isinstance(value, (dict, list)))):
            raise SourceError(
                "CKM320",
                f"{file}: {name} is set, which peft 0.21 does not know; it may change what the"
                " adapter adds to its base",
                f"merge it with the peft release that wrote it; if {name} changes nothing, delete it from"
                " the file",
            )
    begun = text.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        raise SourceError(
            "CKM320",
            f"{file}: init_lora_weights {begun!r} changed the base's weights before training",
            "save the adapter converted to LoRA (save_pretrained with"
            " path_initial_model_for_weight_conversion), or merge it with peft into the base that it was trained on",
        )


def _value(
    file: Path, text: Mapping[str, object], name: str, kinds: tuple[type, ...], default: Any
) -> Any:
    value: Any = text.get(name)
    value = default if value is None else value
    sound = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if not sound or (int in kinds and not 0 < abs(value) < math.inf) or (name == "r" and value < 1):
        kind = " or ".join(kind.__name__ for kind in kinds)
        raise SourceError(
            "CKM320",
            f"{file}: {name} is {value!r}, expected {kind}",
            "correct it there, or save the adapter again",
        )
    return value


def _strings(file: Path, text: Mapping[str, object], name: str) -> tuple[str, ...]:
    value = text.get(name) or ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise SourceError(
            "CKM320",
            f"{file}: {name} is {value!r}, expected a list of names",
            "correct it there, or save the adapter again",
        )
    return tuple(value)


def _patterns(
    file: Path, text: Mapping[str, object], name: str, kinds: tuple[type, ...]
) -> dict[str, Any]:
    """Return patterns -> values. Raises SourceError CKM320 for a pattern that is slow to match."""
    value = text.get(name) or {}
    if not isinstance(value, dict):
        raise SourceError(
            "CKM320",
            f"{file}: {name} is {value!r}, expected an object",
            "correct it there, or save the adapter again",
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
                f"{file}: {name}: {pattern!r} is not a valid pattern of module names, or too costly to match",
                "list the modules by name in place of the pattern",
            )
    return {pattern: _value(file, value, pattern, kinds, 1) for pattern in value}


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of the module's name, at a dot, as peft
    matches it."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
