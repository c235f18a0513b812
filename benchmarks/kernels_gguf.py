"""Measure the kernels of GGUF's types against those of the `gguf` package, which are numpy.

    python benchmarks/kernels_gguf.py
    python benchmarks/kernels_gguf.py --only Q4_K --size 2048

The measurement is that of `kernels_4bit.py`: one CPU thread, 4096 x 4096 elements in fp32 of random blocks, and every
result is checked before it is timed. The goal of decoding is 1 GB of values a second, 67 ms.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import kernels_4bit as kernels
from kernels_4bit import Contest, Kernel

DECODED = ("Q4_K", "Q6_K", "Q8_0", "IQ3_S", "MXFP4")
ENCODED = ("Q8_0", "Q4_0")
CONTESTS = (
    *(Contest(f"decode {kind}", f"ours_decode_{kind}", (f"gguf_decode_{kind}",), "67 ms") for kind in DECODED),
    *(Contest(f"encode {kind}", f"ours_{kind}", (f"gguf_{kind}",), "") for kind in ENCODED),
)  # fmt: skip


def _encoding(kind: str) -> Any:
    from ckptmap.quantization.gguf.encoding import GgufBlocks

    return GgufBlocks(kind)


def _blocks(kind: str, w: Any) -> Any:
    """Return random bytes of a tensor of this type, of the shape of `w`."""
    import torch

    of = _encoding(kind).type
    shape = w.shape[0], w.shape[1] // of.numel * of.nbytes
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, 120, shape, dtype=torch.uint8, generator=draw)


def ours_decode(kind: str, w: Any) -> Kernel:
    import torch

    from ckptmap.tensors import Box

    encoding, info, blocks = _encoding(kind), kernels._info(w.float()), _blocks(kind, w)
    out, rows = torch.zeros(w.shape), max(1, (1 << 19) // w.shape[1])

    def run() -> Any:
        for row in range(0, w.shape[0], rows):
            box = Box((row, 0), (min(rows, w.shape[0] - row), w.shape[1]))
            encoding.decode(info, {"": blocks[row : row + rows]}, box, out[row : row + rows])
        return out

    return run, 0


def gguf_decode(kind: str, w: Any) -> Kernel:
    from gguf import GGMLQuantizationType, dequantize

    blocks = _blocks(kind, w).numpy()
    return lambda: dequantize(blocks, GGMLQuantizationType[kind]), w.numel() * 4


def ours(kind: str, w: Any) -> Kernel:
    return kernels._ours(_encoding(kind), w.float())


def gguf(kind: str, w: Any) -> Kernel:
    from gguf import GGMLQuantizationType, quantize

    values, of = w.float().numpy(), _encoding(kind).type
    nbytes = w.numel() // of.numel * of.nbytes
    return lambda: quantize(values, GGMLQuantizationType[kind]), nbytes


def __getattr__(name: str) -> Any:
    """Return a contestant by its name: `ours_decode_Q4_K`."""
    for prefix, made in (
        ("ours_decode_", ours_decode), ("gguf_decode_", gguf_decode), ("ours_", ours), ("gguf_", gguf)
    ):  # fmt: skip
        if name.startswith(prefix):
            return lambda w: made(name.removeprefix(prefix), w)
    raise AttributeError(name)


def check(w: Any) -> None:
    """Raise AssertionError if our bytes or values differ from those of the `gguf` package in any bit."""
    import numpy as np

    for kind in DECODED:
        found, wanted = ours_decode(kind, w)[0]().numpy(), gguf_decode(kind, w)[0]()
        assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32)), kind
    for kind in ENCODED:
        found, wanted = ours(kind, w)[0]()[""].numpy(), gguf(kind, w)[0]()
        assert np.array_equal(found.reshape(wanted.shape), wanted), kind


if __name__ == "__main__":
    kernels.main(sys.modules[__name__])
