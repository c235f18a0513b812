"""Measure the kernels of 8-bit encodings against those of torchao, bitsandbytes and transformers.

    python benchmarks/kernels_8bit.py
    python benchmarks/kernels_8bit.py --only decode --size 2048

The measurement is that of `kernels_4bit.py`: one CPU thread, 4096 x 4096 elements, and every result
is checked before it is timed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import kernels_4bit as kernels
from kernels_4bit import Contest, Kernel

CONTESTS = (
    Contest("encode int8 (torchao's)", "ours_int8", ("torchao_int8",), "5x torchao"),
    Contest("encode int8 (bitsandbytes')", "ours_bnb", ("bnb_int8",), ""),
    Contest("encode float8 (torchao's)", "ours_float8", ("torchao_float8",), ""),
    Contest("encode fp8 tiles (transformers')", "ours_fp8", ("transformers_fp8",), ""),
    Contest("encode ct-int8, packed", "ours_packed", ("ct_int8",), ""),
    Contest("decode int8", "ours_decode_int8", ("torchao_decode_int8",), ""),
    Contest("decode int8 (bitsandbytes')", "ours_decode_bnb", ("bnb_decode",), ""),
    Contest("decode fp8 tiles", "ours_decode_fp8", ("transformers_decode_fp8",), ""),
    Contest("encode 8-bit moments", "ours_moments", ("torchao_moments",), "10x torchao"),
    Contest("decode 8-bit moments", "ours_decode_moments", ("torchao_decode_moments",), ""),
)


def _row(w: Any) -> tuple[int, int]:
    return (1, w.shape[1])


def _int8(w: Any) -> Any:
    from ckptmap.quantization.torchao.int8 import Int8

    return Int8(_row(w))


def _bnb(w: Any) -> Any:
    from ckptmap.quantization.bnb.int8 import BnbInt8

    return BnbInt8()


def _fp8(w: Any) -> Any:
    from ckptmap.quantization.deepseek_fp8 import BLOCK, Fp8

    return Fp8(BLOCK)


def ours_int8(w: Any) -> Kernel:
    return kernels._ours(_int8(w), w)


def ours_bnb(w: Any) -> Kernel:
    return kernels._ours(_bnb(w), w)


def ours_float8(w: Any) -> Kernel:
    from ckptmap.quantization.torchao.float8 import Float8

    return kernels._ours(Float8(_row(w)), w)


def ours_fp8(w: Any) -> Kernel:
    return kernels._ours(_fp8(w), w)


def ours_packed(w: Any) -> Kernel:
    from ckptmap.quantization.compressed_tensors.packed import Packed

    return kernels._ours(Packed(_row(w), str(w.dtype).removeprefix("torch.")), w)


def ours_decode_int8(w: Any) -> Kernel:
    return kernels._decode(_int8(w), w)


def ours_decode_bnb(w: Any) -> Kernel:
    return kernels._decode(_bnb(w), w)


def ours_decode_fp8(w: Any) -> Kernel:
    return kernels._decode(_fp8(w), w)


def ours_moments(w: Any) -> Kernel:
    """Return the encoding of moments into the tensors of a live optimizer, as torchao's `copy_`."""
    from ckptmap.optim import lowbit_codes

    state, values = _moments(w), w.float()

    def run() -> Any:
        lowbit_codes.encode(values, state.block_size, state.qmap, state.codes, state.scale)
        return state

    return run, 0


def ours_decode_moments(w: Any) -> Kernel:
    from ckptmap.optim import lowbit_codes

    state = ours_moments(w)[0]()
    args = state.codes, state.block_size, state.qmap, state.scale
    return lambda: lowbit_codes.decode(*args).view(w.shape), 4 * w.numel()


def _moments(w: Any) -> Any:
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit.zeros(w.shape)


# ------------------------------------------------------------------------------- the libraries


def torchao_moments(w: Any) -> Kernel:
    state, values = _moments(w), w.float()
    return lambda: state.copy_(values), 0


def torchao_decode_moments(w: Any) -> Kernel:
    return torchao_moments(w)[0]().dequantize, 4 * w.numel()


def torchao_int8(w: Any) -> Kernel:
    from torchao.quantization import Int8Tensor, PerRow

    return lambda: Int8Tensor.from_hp(w, PerRow()), w.numel()


def torchao_decode_int8(w: Any) -> Kernel:
    return torchao_int8(w)[0]().dequantize, w.numel() * w.element_size()


def torchao_float8(w: Any) -> Kernel:
    from torchao.quantization import Float8Tensor, PerRow

    return lambda: Float8Tensor.from_hp(w, granularity=PerRow()), w.numel()


def bnb_int8(w: Any) -> Kernel:
    import torch
    from bitsandbytes.functional import int8_vectorwise_quant

    return lambda: int8_vectorwise_quant(w.to(torch.float16)), w.numel()


def bnb_decode(w: Any) -> Kernel:
    from bitsandbytes.functional import int8_vectorwise_dequant

    codes, scb, _ = bnb_int8(w)[0]()
    return lambda: int8_vectorwise_dequant(codes, scb).to(w.dtype), w.numel() * w.element_size()


class _Finegrained:
    class quantization_config:
        weight_block_size = (128, 128)
        scale_fmt = "float"


def transformers_fp8(w: Any) -> Kernel:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    operation = Fp8Quantize(_Finegrained())
    return lambda: operation.convert({"w.weight": w}), w.numel()


def transformers_decode_fp8(w: Any) -> Kernel:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    made, operation = transformers_fp8(w)[0](), Fp8Dequantize(_Finegrained())
    codes, scale = made["w.weight"], made["w.weight_scale_inv"]
    return lambda: operation._dequantize_one(codes, scale, w.dtype), w.numel() * w.element_size()


def ct_int8(w: Any) -> Kernel:
    """Return compressed-tensors' encoding with given scales: `calculate_qparams` is not timed."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize

    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    scale = w.abs().amax(1, keepdim=True) / 127.5
    return lambda: pack_to_int32(quantize(w, scale, None, args, torch.int8), 8), w.numel()


# ------------------------------------------------------------------------------- check, measure


def check(w: Any) -> None:
    """Raise AssertionError if our codes, scales or values differ from the libraries' in any bit."""
    import torch

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))

    for mine, theirs in ((ours_int8, torchao_int8), (ours_float8, torchao_float8)):
        found, wanted = mine(w)[0](), theirs(w)[0]()
        assert same(found["qdata"], wanted.qdata) and same(found["scale"], wanted.scale), theirs
    codes, scb, _ = bnb_int8(w)[0]()
    found = ours_bnb(w)[0]()
    assert same(found[""], codes) and same(found["SCB"], scb), "bitsandbytes"
    found, wanted = ours_moments(w)[0](), torchao_moments(w)[0]()
    assert same(found.codes, wanted.codes) and same(found.scale, wanted.scale), "moments"
    found, wanted = ours_fp8(w)[0](), transformers_fp8(w)[0]()
    assert same(found[""], wanted["w.weight"]), "transformers' codes"
    assert same(found["scale_inv"], wanted["w.weight_scale_inv"]), "transformers' scales"
    for mine, theirs in (
        (ours_decode_int8, torchao_decode_int8), (ours_decode_bnb, bnb_decode),
        (ours_decode_fp8, transformers_decode_fp8), (ours_decode_moments, torchao_decode_moments),
    ):  # fmt: skip
        assert same(mine(w)[0](), theirs(w)[0]()), theirs


if __name__ == "__main__":
    kernels.main(sys.modules[__name__])
