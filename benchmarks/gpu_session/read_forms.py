"""Every form of codes in the registry, each as an encoding and a weight that it can hold.

What is written is encoded from values; of what is only read, parts of random bytes are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.gpu_session.encoders import NAME

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
CASTS = ("bf16", "fp16", "fp32", "trained-dense")
"""Schemes without codes of their own."""
MOMENTS = ("adam8bit", "adam4bit", "adamfp8", "bnb8bit")
"""Schemes of optimizers' moments, which have a comparison of their own."""
SIDES = (96, 512)
"""[out, in] of the weight, which whole blocks, words and groups of all forms divide."""


def more_forms() -> Iterator[tuple[str, Any, Any]]:
    """Yield (name of the scheme, encoding, info) of forms that no weight is encoded in when its layer is
    named: experts of gpt-oss, and what is read and perhaps given back."""
    from ckptmap import registry
    from ckptmap.planning.encoding_forms import HasExample
    from ckptmap.tensors import TensorInfo

    matrix, stack = TensorInfo(SIDES, "bfloat16"), TensorInfo((2, *SIDES), "bfloat16")
    for scheme in registry.schemes():
        if scheme.name == "gguf":
            for encoding in _blocks():
                yield scheme.name, encoding, TensorInfo(SIDES, "float32")
        elif isinstance(scheme, HasExample):
            for encoding in _variants(scheme.example(matrix)):
                yield scheme.name, encoding, matrix
        elif scheme.suffix and scheme.target(NAME, matrix) is None:
            encoding = scheme.target(EXPERTS, stack)
            if encoding is not None:
                yield scheme.name, encoding, stack


def _variants(encoding: Any) -> Iterator[Any]:
    """Yield an encoding, and those of its kind that are decoded by other code."""
    from ckptmap.quantization.gptq.columns import LISTED, ORDERED
    from ckptmap.quantization.gptq.encodings import Awq, Gptq, GptqV2
    from ckptmap.quantization.striped.hqq import PACKINGS, Hqq
    from ckptmap.quantization.striped.quanto import CODES_8, Quanto8, QuantoPacked

    yield encoding
    match encoding:
        case Awq():
            yield Awq(4, 64, "bfloat16")
        case Gptq():
            yield from (Gptq(bits, 64, order=LISTED) for bits in (2, 3, 8))
            yield from (GptqV2(4, 32, "bfloat16"), Gptq(4, 64, order=ORDERED))
        case Hqq():
            stored = {"3bit_32": "int32"}
            for packing in PACKINGS:
                for axis in (0, 1):
                    yield Hqq((), packing, 64, axis, stored.get(packing, "uint8"))
        case Quanto8():
            yield from (replace(encoding, kind=kind) for kind in CODES_8)
        case QuantoPacked():
            yield from (replace(encoding, bits=bits, shift="uint8") for bits in (2, 4))


def _blocks() -> Iterator[Any]:
    from ckptmap.quantization.gguf.decoders import DECODERS
    from ckptmap.quantization.gguf.encoding import GgufBlocks

    return map(GgufBlocks, DECODERS)


def is_encoded(encoding: Any, info: Any) -> bool:
    """Return whether values are encoded in this form, too."""
    from ckptmap.core.quantized_codes import EncodesSome
    from ckptmap.protocols.encodings import TakesDtype

    if isinstance(encoding, TakesDtype) and encoding.takes != info.dtype:
        return False
    return not isinstance(encoding, EncodesSome) or encoding.cannot_encode(info) is None


def random_parts(encoding: Any, info: Any) -> Mapping[str, Any]:
    """Return parts of random bytes, flat, on the CPU; g_idx names groups, and scales are finite."""
    import torch

    maker, made = torch.Generator().manual_seed(5), {}
    for name, part in encoding.parts(info).items():
        kind = getattr(torch, part.dtype)
        if name == "g_idx":
            values = torch.arange(part.numel) // encoding.group
            values = values.flip(0) if encoding.order == "any" else values
            made[name] = values.to(kind)
        elif kind.itemsize > 1 and kind.is_floating_point:
            made[name] = (torch.randn(part.numel, generator=maker) * 0.02).to(kind)
        else:
            count, most = part.numel * kind.itemsize, 127 if "scale" in name else 256
            bytes_ = torch.randint(0, most, (count,), generator=maker, dtype=torch.uint8)
            made[name] = bytes_.view(kind)
    return made


def compared(names: Mapping[str, int]) -> list[str]:
    """Return the schemes of the registry that are in no comparison; `names` are those that are encoded."""
    from ckptmap import registry

    known = {*names, *CASTS, *MOMENTS, *(name for name, _, _ in more_forms())}
    return [scheme.name for scheme in registry.schemes() if scheme.name not in known]
