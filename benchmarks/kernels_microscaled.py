"""Measure the kernels of MXFP4, MXFP8 and NVFP4 against those of transformers, compressed-tensors and torchao.

    python benchmarks/kernels_microscaled.py
    python benchmarks/kernels_microscaled.py --only decode --size 2048

The measurement is that of `kernels_4bit.py`: one CPU thread, 4096 x 4096 elements, and every result
is checked before it is timed. The goal of decoding is 1 GB of bfloat16 a second, 34 ms.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import kernels_4bit as kernels
from kernels_4bit import Contest, Kernel

CONTESTS = (
    Contest("decode MXFP4 (gpt-oss)", "ours_decode_gpt_oss", ("transformers_decode",), "34 ms"),
    Contest("decode MXFP4", "ours_decode_mxfp4", ("ct_decode_mxfp4", "torchao_decode_mxfp4"), "34 ms"),
    Contest("decode NVFP4", "ours_decode_nvfp4", ("ct_decode_nvfp4", "torchao_decode_nvfp4"), "34 ms"),
    Contest("decode MXFP8", "ours_decode_mxfp8", ("torchao_decode_mxfp8",), "34 ms"),
    Contest("encode MXFP4 (gpt-oss)", "ours_gpt_oss", ("torchao_mxfp4",), ""),
    Contest("encode MXFP4 (torchao's)", "ours_mxfp4", ("torchao_mxfp4",), ""),
    Contest("encode NVFP4 (torchao's)", "ours_nvfp4", ("torchao_nvfp4",), ""),
    Contest("encode MXFP8 (torchao's)", "ours_mxfp8", ("torchao_mxfp8",), ""),
)  # fmt: skip


def _ao(kind: str) -> Any:
    from ckptmap.quantization.torchao import microscaled_encodings as made

    if kind == "mxfp8":
        return made.AoMxfp8((1, 32))
    return made.AoMxfp4() if kind == "mxfp4" else made.AoNvfp4()


def _gpt_oss() -> Any:
    from ckptmap.quantization.microscaling.gpt_oss import GptOssFp4

    return GptOssFp4()


def ours_gpt_oss(w: Any) -> Kernel:
    return kernels._ours(_gpt_oss(), w)


def ours_mxfp4(w: Any) -> Kernel:
    return kernels._ours(_ao("mxfp4"), w)


def ours_nvfp4(w: Any) -> Kernel:
    return kernels._ours(_ao("nvfp4"), w)


def ours_mxfp8(w: Any) -> Kernel:
    return kernels._ours(_ao("mxfp8"), w)


def ours_decode_gpt_oss(w: Any) -> Kernel:
    return kernels._decode(_gpt_oss(), w)


def ours_decode_mxfp4(w: Any) -> Kernel:
    return kernels._decode(_ao("mxfp4"), w)


def ours_decode_nvfp4(w: Any) -> Kernel:
    return kernels._decode(_ao("nvfp4"), w)


def ours_decode_mxfp8(w: Any) -> Kernel:
    return kernels._decode(_ao("mxfp8"), w)


# ------------------------------------------------------------------------------- theirs


def _mx(w: Any, dtype: str) -> Kernel:
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    elements, mode = getattr(torch, dtype), ScaleCalculationMode.RCEIL
    return lambda: MXTensor.to_mx(w, elements, 32, mode), w.numel()


def torchao_mxfp4(w: Any) -> Kernel:
    return _mx(w, "float4_e2m1fn_x2")


def torchao_mxfp8(w: Any) -> Kernel:
    return _mx(w, "float8_e4m3fn")


def torchao_nvfp4(w: Any) -> Kernel:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def run() -> Any:
        scale = per_tensor_amax_to_scale(w.abs().max())
        return NVFP4Tensor.to_nvfp4(w, per_tensor_scale=scale)

    return run, w.numel() // 2


def _dequantized(made: Any, w: Any) -> Kernel:
    return made.dequantize, w.numel() * w.element_size()


def torchao_decode_mxfp4(w: Any) -> Kernel:
    return _dequantized(torchao_mxfp4(w)[0](), w)


def torchao_decode_mxfp8(w: Any) -> Kernel:
    return _dequantized(torchao_mxfp8(w)[0](), w)


def torchao_decode_nvfp4(w: Any) -> Kernel:
    return _dequantized(torchao_nvfp4(w)[0](), w)


def transformers_decode(w: Any) -> Kernel:
    """Return the decoding of the codes of one expert, [in, out] as `w`."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made = torchao_mxfp4(w.t().contiguous())[0]()
    scale = made.scale.view(made.qdata.dtype).unsqueeze(0)
    blocks = made.qdata.view(*scale.shape, 16)
    nbytes = w.numel() * w.element_size()
    return lambda: convert_moe_packed_tensors(blocks, scale, dtype=w.dtype)[0], nbytes


def _compressed(made: Any, w: Any, preset: str, **scales: Any) -> Kernel:
    """Return compressed-tensors' `decompress` of codes and scales that torchao made."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    form = {"NVFP4A16": "nvfp4-pack-quantized", "MXFP4A16": "mxfp4-pack-quantized"}[preset]
    compressor = BaseCompressor.get_value_from_registry(form)
    state = {"weight_packed": made.qdata, **scales}
    nbytes = w.numel() * w.element_size()
    return lambda: compressor.decompress(state, scheme)["weight"], nbytes


def ct_decode_mxfp4(w: Any) -> Kernel:
    made = torchao_mxfp4(w)[0]()
    return _compressed(made, w, "MXFP4A16", weight_scale=made.scale.view(made.qdata.dtype))


def ct_decode_nvfp4(w: Any) -> Kernel:
    made = torchao_nvfp4(w)[0]()
    overall = (1 / made.per_tensor_scale).view(1)
    return _compressed(made, w, "NVFP4A16", weight_scale=made.scale, weight_global_scale=overall)


# ------------------------------------------------------------------------------- check, measure


def check(w: Any) -> None:
    """Raise AssertionError if our codes, scales or values differ from torchao's or transformers' in any bit."""
    import torch

    def same(a: Any, b: Any) -> bool:
        first, second = (x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
        return torch.equal(first, second)

    for mine, theirs in (
        (ours_mxfp4, torchao_mxfp4), (ours_nvfp4, torchao_nvfp4), (ours_mxfp8, torchao_mxfp8),
    ):  # fmt: skip
        found, wanted = mine(w)[0](), theirs(w)[0]()
        codes = found["packed"] if "packed" in found else found["qdata"]
        assert same(codes, wanted.qdata) and same(found["scale"], wanted.scale), theirs
    for mine, theirs in (
        (ours_decode_mxfp4, torchao_decode_mxfp4), (ours_decode_nvfp4, torchao_decode_nvfp4),
        (ours_decode_mxfp8, torchao_decode_mxfp8), (ours_decode_gpt_oss, transformers_decode),
        (ours_decode_mxfp4, ct_decode_mxfp4),
    ):  # fmt: skip
        assert same(mine(w)[0](), theirs(w)[0]()), theirs


if __name__ == "__main__":
    kernels.main(sys.modules[__name__])
