"""Write and read the `quantization_config` of compressed-tensors (its class `QuantizationConfig`)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ckptmap.formats.huggingface.loaded_names import loaded_as
from ckptmap.protocols.encodings import Encoded
from ckptmap.quantization.blockwise.block_geometry import grid_shape
from ckptmap.quantization.blockwise.exponents import DTYPES as EXPONENTS
from ckptmap.quantization.blockwise.group_checks import malformed
from ckptmap.quantization.blockwise.scaled_encoding import ScaledEncoding
from ckptmap.quantization.compressed_tensors.stacked_experts import experts_target
from ckptmap.quantization.linear_weights import is_expert
from ckptmap.quantization.microscaling.packed_fp4 import PackedFp4
from ckptmap.tensors import TensorInfo

DECLARES = (
    "ct-fp8", "ct-nvfp4", "ct-mxfp4", "ct-mxfp8", *(f"ct-int{bits}" for bits in range(1, 9)),
)  # fmt: skip
"""The names of the encodings that one config can declare."""
_SCALES = {
    "nvfp4-pack-quantized": "torch.float8_e4m3fn",
    "mxfp4-pack-quantized": "torch.uint8",
    "mxfp8-quantized": "torch.uint8",
}
"""Format -> the dtype of its scales, where the config states one."""


BEYOND = ("kv_cache_scheme", "transform_config")
"""Settings that concern no weight: the cache of keys and values, the rotation of activations."""


class Quantized(NamedTuple):
    """How weights are quantized, as a group of the config says it.

    kind      "int" or "float"
    ordered   are columns grouped by the sizes of activations?
    strategy  what shares a scale: "tensor", "channel", "group", "tensor_group" or "block"
    sizes     columns of a group, or rows and columns of a block
    """

    kind: str
    bits: int
    format: str
    symmetric: bool
    ordered: bool
    strategy: str
    sizes: tuple[int, ...] = ()


def declared(
    encoded: Mapping[str, Encoded],
    dense: Collection[str],
    beyond: Mapping[str, object],
) -> Mapping[str, object]:
    """Return the config for these encoded tensors, with one group per way of quantizing.

    A single group targets every linear layer; several name their modules, as on disk and as once loaded.
    Modules in `dense` are ignored. Activations of linear layers are not quantized; `beyond` holds the other
    settings, from `beyond_weights`.
    """
    others = loaded_as([*encoded, *(f"{module}.weight" for module in dense)])
    groups: dict[Quantized, list[str]] = {}
    for name, key in _keys(encoded).items():
        module = name.removesuffix(".weight")
        groups.setdefault(key, []).extend((module, *others(module)))
    formats = {key.format for key in groups}
    attention = beyond.get("config_groups", {})
    assert isinstance(attention, Mapping), "`beyond_weights` has made it"
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{number}": _group(key, ["Linear"] if len(groups) == 1 else targets)
            for number, (key, targets) in enumerate(_targets(groups).items())
        }
        | {f"group_{len(groups) + n}": group for n, group in enumerate(attention.values())},
        "ignore": sorted(dense),
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        **{name: beyond[name] for name in BEYOND if name in beyond},
    }


def _targets(groups: Mapping[Quantized, list[str]]) -> dict[Quantized, list[str]]:
    """Return the targets of each group: its modules, with a pattern for the experts if one group has all."""
    stacked = {key: list(filter(is_expert, modules)) for key, modules in groups.items()}
    having = [key for key, experts in stacked.items() if experts]
    pattern = experts_target(stacked[having[0]]) if len(groups) > 1 and len(having) == 1 else ""
    if not pattern or not is_matched_soon(pattern.removeprefix("re:")):
        return dict(groups)
    others = [module for module in groups[having[0]] if not is_expert(module)]
    return {**groups, having[0]: [*others, pattern]}


def beyond_weights(config: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    """Return the settings of a config that concern no weight and hold for a model with these `names`.

    Static scales that the config announces must exist. The groups are those of attention.
    """
    if config.get("quant_method") != "compressed-tensors":
        return {}
    settings = {name: config[name] for name in BEYOND if config.get(name)}
    if not _scaled(settings.get("kv_cache_scheme"), "k_scale", names):
        settings.pop("kv_cache_scheme", None)
    groups = config.get("config_groups")
    attention = {
        name: group
        for name, group in (groups.items() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping) and _of_attention(group.get("targets"))
        if _scaled(group.get("input_activations"), "q_scale", names)
    }
    return settings | ({"config_groups": attention} if attention else {})


def _of_attention(targets: object) -> bool:
    """Return whether all targets are attention classes, as the library names them."""
    names = targets if isinstance(targets, list) else []
    return bool(names) and all(str(name).endswith("Attention") for name in names)


def _scaled(activations: object, scale: str, names: Collection[str]) -> bool:
    if not isinstance(activations, Mapping):
        return False
    if activations.get("dynamic") is True:
        return True
    return any(name.endswith(f".{scale}") for name in names)


def _keys(encoded: Mapping[str, Encoded]) -> dict[str, Quantized]:
    """Return how each weight is quantized: a packed row that is one group is a group where others have groups as wide.

    Both describe such a row, and transformers decodes the stacked experts of a model by one group of the config.
    """
    keys = {
        name: _key(encoding, info)
        for name, (encoding, info) in encoded.items()
        if isinstance(encoding, ScaledEncoding | PackedFp4)
    }
    known = set(keys.values())
    for name, key in keys.items():
        grouped = key._replace(strategy="group", sizes=encoded[name][1].shape[-1:])
        if key.format == "pack-quantized" and key.strategy == "channel" and grouped in known:
            keys[name] = grouped
    return keys


def _key(encoding: ScaledEncoding | PackedFp4, info: TensorInfo) -> Quantized:
    if isinstance(encoding, PackedFp4):
        is_nvfp4 = encoding.name == "ct-nvfp4"
        form = "nvfp4-pack-quantized" if is_nvfp4 else "mxfp4-pack-quantized"
        strategy = "tensor_group" if is_nvfp4 else "group"
        return Quantized("float", 4, form, True, False, strategy, (encoding.block,))
    if encoding.scale_dtype in EXPONENTS:
        block = encoding.block[-1:]
        return Quantized("float", 8, "mxfp8-quantized", True, False, "group", block)
    packed = encoding.codes_part == "packed"
    bits = int(getattr(encoding, "bits", 8))
    form = "pack-quantized" if packed else "naive-quantized"
    block = encoding.block_of(info)
    kind = "float" if encoding.codes_dtype.startswith("float8") else "int"
    ordered = bool(getattr(encoding, "ordered", False))
    strategy, sizes = _strategy(block, info.shape)
    return Quantized(kind, bits, form, not encoding.zero_dtype, ordered, strategy, sizes)


def _strategy(block: tuple[int, ...], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    if block == shape:
        return "tensor", ()
    if block == (1, shape[-1]):
        return "channel", ()
    return ("group", block[1:]) if block[0] == 1 else ("block", block)


def _group(how: Quantized, targets: list[str]) -> dict[str, object]:
    weights: dict[str, object] = {
        "num_bits": how.bits,
        "type": how.kind,
        "symmetric": how.symmetric,
        "strategy": how.strategy,
        "group_size": how.sizes[0] if how.strategy in ("group", "tensor_group") else None,
        "dynamic": False,
    }
    if how.format in _SCALES:
        weights |= {"scale_dtype": _SCALES[how.format], "zp_dtype": _SCALES[how.format]}
    if how.ordered:
        weights["actorder"] = "group"
    if how.strategy == "block":
        weights["block_structure"] = list(how.sizes)
    return {
        "targets": targets,
        "format": how.format,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }


# ------------------------------------------------------------------------------- as it is found


def weights_said(config: Mapping[str, object], module: str = "") -> list[Mapping[str, object]]:
    """Return how config.json says that weights are quantized, for each group of `groups_said`."""
    said = [group.get("weights") for group in groups_said(config, module)]
    return [weights for weights in said if isinstance(weights, Mapping)]


def groups_said(config: Mapping[str, object], module: str = "") -> list[Mapping[str, object]]:
    """Return the groups of config.json that may describe the `module`: see `ConfigGroups`."""
    return ConfigGroups(config).of(module)


class ConfigGroups:
    """The groups of a config.json, to be asked for many modules."""

    def __init__(self, config: Mapping[str, object]) -> None:
        groups = config.get("config_groups")
        found = list(groups.values()) if isinstance(groups, Mapping) else []
        self._groups = [group for group in found if isinstance(group, Mapping)]
        self._targets = [_Targets(group.get("targets")) for group in self._groups]

    def of(self, module: str) -> list[Mapping[str, object]]:
        """Return the groups that may describe the `module`.

        Where some of several groups name it, only those are returned.
        """
        if not module or len(self._groups) < 2:
            return self._groups
        both = zip(self._groups, self._targets, strict=True)
        return [group for group, targets in both if targets.name(module)] or self._groups

    def kinds(self, fqns: Sequence[str]) -> list[tuple[int, ...]]:
        """Return for each weight the ids of the groups that may describe its module."""
        if len(self._groups) < 2:
            return [(*map(id, self._groups),)] * len(fqns)
        return [(*map(id, self.of(fqn[: max(0, fqn.rfind("."))])),) for fqn in fqns]


class _Targets:
    """The targets of a group: names of modules and of classes, and patterns."""

    def __init__(self, targets: object) -> None:
        texts = (
            [text for text in targets if isinstance(text, str)] if isinstance(targets, list) else []
        )
        self._names = set(texts)
        stated = [text[3:] for text in texts if text.startswith("re:")]
        self._patterns = [pattern for pattern in stated if is_matched_soon(pattern)]

    def name(self, module: str) -> bool:
        """Return whether a target names the module, by name or pattern; its class is unknown here."""
        if module in self._names:
            return True
        if len(module) > _MAX_NAME:
            return False
        for pattern in self._patterns:
            with contextlib.suppress(re.error, RecursionError):
                if re.match(pattern, module):
                    return True
        return False


_MAX_NAME, _MAX_REPEATS = 256, 4


def is_matched_soon(pattern: str) -> bool:
    """Return whether a pattern of a config.json takes bounded time, for the file may be hostile.

    Python's matcher goes back over each repetition: `(a+)+$` doubles its time with each letter. Patterns of real
    configs repeat single characters a few times, as in `.*self_attn.*` and `layers\\.\\d+`.
    """
    repeated = re.findall(r"(?<!\\)(?:\\\\)*(.)(?:[*+]|\{\d*,?\d*\})", pattern)
    return len(pattern) <= 4 * _MAX_NAME and len(repeated) <= _MAX_REPEATS and ")" not in repeated


def version_said(config: Mapping[str, object]) -> tuple[int, int]:
    """Return (major, minor) of the compressed-tensors that wrote the config; (0, 0) up to 0.10."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})", str(config.get("version", "")))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def block_found(
    fqn: str, info: TensorInfo, scale: TensorInfo, config: Mapping[str, object]
) -> tuple[int, ...]:
    """Return the block that the shape of the scales and config.json imply. Raises SourceError CKM115."""
    if scale.numel == 1:
        return info.shape
    for weights in weights_said(config):
        said = weights.get("block_structure")
        if isinstance(said, list) and len(said) == len(info.shape) == 2:
            block = tuple(said)
            if (
                all(type(n) is int and n > 0 for n in block)
                and grid_shape(info.shape, block) == scale.shape
            ):
                return block
    tiles = (*(1 for _ in info.shape[2:]), 128, 128)[-len(info.shape) :]
    if (
        len(info.shape) == 2
        and 1 < scale.shape[0] < info.shape[0]
        and grid_shape(info.shape, tiles) == scale.shape
    ):
        return tiles
    same = len(scale.shape) == len(info.shape) and 0 not in scale.shape
    if not same or any(n % g for n, g in zip(info.shape, scale.shape, strict=True)):
        raise malformed(
            fqn, f"weight_scale {scale} of {info}, expected one scale per row, group, tile or tensor",
            "put the config.json of the model beside the weights",
        )  # fmt: skip
    return tuple(n // g for n, g in zip(info.shape, scale.shape, strict=True))
