"""Measure the decoding of GPTQ and AWQ against auto-round's formulas for the CPU, in torch.

    python benchmarks/kernels_gptq.py
    python benchmarks/kernels_gptq.py --only awq --size 2048

The measurement is that of `kernels_4bit.py`: one CPU thread, 4096 x 4096 elements in fp16 of random words in groups of
128, and every result is checked before it is timed. auto-round is not needed: its formulas are restated here from
`QuantLinear.forward` (auto_round_extension/torch, 0.16.1) and `dequantize_gemm` (AutoAWQ 0.2.9), and leave the weight
as [in, out], where ours writes [out, in].
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import kernels_4bit as kernels
from kernels_4bit import Contest, Kernel

GROUP = 128
CONTESTS = (
    Contest("decode gptq", "ours_gptq", ("formula_gptq",), "33 ms"),
    Contest("decode awq", "ours_awq", ("formula_awq",), "33 ms"),
)


def _encoding(kind: str) -> Any:
    from ckptmap.quantization.gptq.encodings import Awq, Gptq

    return (Gptq if kind == "gptq" else Awq)(4, GROUP)


def _parts(kind: str, w: Any) -> dict[str, Any]:
    import torch

    draw, made = torch.Generator().manual_seed(1), {}
    for name, part in _encoding(kind).parts(kernels._info(w.half())).items():
        words = torch.randint(-(1 << 31), 1 << 31, part.shape, generator=draw)
        scales = torch.rand(part.shape, generator=draw).half()
        made[name] = words.to(torch.int32) if part.dtype == "int32" else scales
    return made


def _ours(kind: str, w: Any) -> Kernel:
    import torch

    from ckptmap.tensors import Box

    encoding, info, parts = _encoding(kind), kernels._info(w.half()), _parts(kind, w)
    out, rows = torch.zeros(w.shape, dtype=torch.float16), max(1, (1 << 19) // w.shape[1])

    def run() -> Any:
        for row in range(0, w.shape[0], rows):
            box = Box((row, 0), (min(rows, w.shape[0] - row), w.shape[1]))
            cut = {
                name: _cut(part, encoding.part_box(info, name, box)) for name, part in parts.items()
            }
            encoding.decode(info, cut, box, out[row : row + rows])
        return out

    return run, 0


def _cut(part: Any, box: Any) -> Any:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        part = part.narrow(dim, offset, size)
    return part


def ours_gptq(w: Any) -> Kernel:
    return _ours("gptq", w)


def ours_awq(w: Any) -> Kernel:
    return _ours("awq", w)


def _unpacked(words: Any, dim: int) -> Any:
    """Codes of words i32 [a, b], 8 a word along a dim."""
    import torch

    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
    spread = words.unsqueeze(1 + dim) >> shifts.view(shape)
    return spread.to(torch.int8).bitwise_and_(15).flatten(dim, dim + 1)


def formula_gptq(w: Any) -> Kernel:
    import torch

    parts = _parts("gptq", w)
    groups = torch.arange(w.shape[1]) // GROUP

    def run() -> Any:
        zeros = _unpacked(parts["qzeros"], 1) + 1
        return parts["scales"][groups] * (_unpacked(parts["qweight"], 0) - zeros[groups])

    return run, w.numel() * 2


def formula_awq(w: Any) -> Kernel:
    import torch

    parts = _parts("awq", w)
    order = torch.arange(w.shape[0]).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].flatten()

    def run() -> Any:
        codes = _unpacked(parts["qweight"], 1)[:, order]
        zeros = _unpacked(parts["qzeros"], 1)[:, order].repeat_interleave(GROUP, 0)
        return (codes - zeros) * parts["scales"].repeat_interleave(GROUP, 0)

    return run, w.numel() * 2


def check(w: Any) -> None:
    """Raise AssertionError if our values differ from those of the formulas in any bit."""
    import torch

    for kind, wanted in (("gptq", formula_gptq), ("awq", formula_awq)):
        found = _ours(kind, w)[0]()
        assert torch.equal(
            found.view(torch.int16), wanted(w)[0]().t().contiguous().view(torch.int16)
        ), kind


if __name__ == "__main__":
    kernels.main(sys.modules[__name__])
