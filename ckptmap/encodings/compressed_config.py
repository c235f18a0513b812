"""What config.json says of compressed-tensors weights, as `QuantizationConfig` writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ckptmap.blocks.scaled import Scaled
from ckptmap.loaded_names import loaded_as
from ckptmap.protocols import Encoding
from ckptmap.tensors import TensorInfo

Key = tuple[str, int, str, bool, bool, str, tuple[int, ...]]


def declared(
    encoded: Mapping[str, tuple[Encoding, TensorInfo]], dense: Collection[str]
) -> Mapping[str, Any]:
    """One group for each way of quantizing; the only one targets every linear layer, several name
    their modules, as on disk and as they are called once loaded. `dense` are ignored. Activations
    are not quantized."""
    others = loaded_as([*encoded, *(f"{module}.weight" for module in dense)])
    groups: dict[Key, list[str]] = {}
    for name, (encoding, info) in encoded.items():
        if isinstance(encoding, Scaled):
            module = name.removesuffix(".weight")
            groups.setdefault(_key(encoding, info), []).extend((module, *others(module)))
    formats = {key[2] for key in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{number}": _group(key, ["Linear"] if len(groups) == 1 else names)
            for number, (key, names) in enumerate(groups.items())
        },
        "ignore": sorted(dense),
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
    }


def _key(encoding: Scaled, info: TensorInfo) -> Key:
    """Type, bits, format, whether it is symmetric, whether groups follow activations, strategy and
    its sizes."""
    packed = encoding.codes_part == "packed"
    bits = int(getattr(encoding, "bits", 8))
    form = "pack-quantized" if packed else "naive-quantized"
    block = encoding.block_of(info)
    kind = "float" if encoding.codes_dtype.startswith("float8") else "int"
    common = kind, bits, form, not encoding.zero_dtype, bool(getattr(encoding, "ordered", False))
    if block == info.shape:
        return *common, "tensor", ()
    if block == (1, info.shape[-1]):
        return *common, "channel", ()
    if block[0] == 1:
        return *common, "group", block[1:]
    return *common, "block", block


def _group(key: Key, targets: list[str]) -> dict[str, Any]:
    kind, bits, form, symmetric, ordered, strategy, sizes = key
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": sizes[0] if strategy == "group" else None,
        "dynamic": False,
    }
    if ordered:
        weights["actorder"] = "group"
    if strategy == "block":
        weights["block_structure"] = list(sizes)
    return {
        "targets": targets,
        "format": form,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
