"""Encode values to blocks of ggml: values f32 [n, 32] -> blocks u8 [n, bytes of a block].

    Q8_0   d = absmax / 127                     code = round(x / d), halves away from zero
    Q4_0   d = m / -8, m the value of absmax    code = trunc(x / d + 8.5), at most 15
    Q4_1   d = (max - min) / 15                 code = trunc((x - min) / d + 0.5)
    Q5_0   d = m / -16                          code = trunc(x / d + 16.5), at most 31
    Q5_1   d = (max - min) / 31                 code = trunc((x - min) / d + 0.5)
    MXFP4  2 ** (floor(log2(absmax)) - 2)       the nearest value, the smaller of two

The codes are computed with d in fp32, before it is rounded to fp16, as ggml and `gguf.quants.quantize` do, and are
the same bytes. Source: ggml, src/ggml-quants.c (`quantize_row_*_ref`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from ckptmap.errors import RunError
from ckptmap.formats.gguf.block_types import BY_NAME
from ckptmap.protocols import Write
from ckptmap.quantization.blockwise.chunks import chunk_numel
from ckptmap.quantization.blockwise.exact_division import divide
from ckptmap.quantization.dense import flat
from ckptmap.quantization.gguf.small_blocks import E2M1_DOUBLED, powers_halved

if TYPE_CHECKING:
    import torch

Pack: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
CHUNK_NUMEL = 256 * 1024


def _q8_0(x: torch.Tensor) -> torch.Tensor:
    import torch

    d = divide(x.abs().amax(1, keepdim=True), 127.0)
    scaled = x * _inverse(d)
    size = scaled.abs()
    whole = size.floor()
    code = (whole + ((size - whole) * 2).floor_()).mul_(scaled.sign())
    return torch.cat([_half(d), code.to(torch.int8).view(torch.uint8)], 1)


def _symmetric(x: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return d f32 [n, 1] and codes u8 [n, 32]: the value of the largest magnitude has the code 0."""
    import torch

    largest = x.gather(1, x.abs().argmax(1, keepdim=True))
    d = largest / -(levels // 2)
    codes = (x * _inverse(d)).add_(levels // 2 + 0.5).trunc_().clamp_(0, levels - 1)
    return d, codes.to(torch.uint8)


def _between(x: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return d and the minimum f32 [n, 1], and codes u8 [n, 32]."""
    import torch

    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    d = divide(high - low, levels - 1.0)
    codes = ((x - low) * _inverse(d)).add_(0.5).trunc_().clamp_(0, levels - 1)
    return d, low, codes.to(torch.uint8)


def _q4_0(x: torch.Tensor) -> torch.Tensor:
    import torch

    d, codes = _symmetric(x, 16)
    return torch.cat([_half(d), _nibbles(codes)], 1)


def _q4_1(x: torch.Tensor) -> torch.Tensor:
    import torch

    d, low, codes = _between(x, 16)
    return torch.cat([_half(d), _half(low), _nibbles(codes)], 1)


def _q5_0(x: torch.Tensor) -> torch.Tensor:
    import torch

    d, codes = _symmetric(x, 32)
    return torch.cat([_half(d), _fifth_bits(codes), _nibbles(codes & 15)], 1)


def _q5_1(x: torch.Tensor) -> torch.Tensor:
    import torch

    d, low, codes = _between(x, 32)
    return torch.cat([_half(d), _half(low), _fifth_bits(codes), _nibbles(codes & 15)], 1)


def _mxfp4(x: torch.Tensor) -> torch.Tensor:
    import torch

    absmax = x.abs().amax(1, keepdim=True)
    exponent = absmax.double().log2().float().floor().add_(125).clamp_(0, 254)
    exponent = torch.where(absmax > 0, exponent, 0).to(torch.int32)
    scale = powers_halved(x.device)[exponent]
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    least = x.abs()
    for code, level in enumerate(E2M1_DOUBLED[1:], 1):
        error = (scale * level - x).abs_()
        codes.masked_fill_(error < least, code)
        least = torch.minimum(least, error)
    return torch.cat([exponent.to(torch.uint8), _nibbles(codes)], 1)


def _inverse(d: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.where(d == 0, 0.0, 1 / d)


def _half(d: torch.Tensor) -> torch.Tensor:
    """Return numbers f32 [n, 1] as fp16: u8 [n, 2]."""
    import torch

    return d.to(torch.float16).view(torch.uint8)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes u8 [n, 32] of 4 bits: code i and code i + 16 share byte i."""
    return codes[:, :16] | codes[:, 16:] << 4


def _fifth_bits(codes: torch.Tensor) -> torch.Tensor:
    """Pack the fifth bit of codes u8 [n, 32], the first in the lowest bit: u8 [n, 4]."""
    import torch

    bits = torch.arange(8, dtype=torch.uint8, device=codes.device)
    return ((codes >> 4).view(-1, 4, 8) << bits).sum(2, dtype=torch.uint8)


ENCODERS: Mapping[str, Pack] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "MXFP4": _mxfp4,
}


class BlockEncoder:
    """Encodes block by block, in any order of blocks."""

    splittable = True
    state_nbytes = 0

    def __init__(self, kind: str) -> None:
        self._kind, self._pack = BY_NAME[kind], ENCODERS[kind]
        self.step = self._kind.numel
        self._beyond: list[torch.Tensor] = []

    def feed(self, offset: int, values: torch.Tensor) -> Iterator[Write]:
        """Encode values [m] of any float; m and `offset` are multiples of `step`."""
        import torch

        most = max(1, chunk_numel(values.device, CHUNK_NUMEL) // self.step) * self.step
        for start in range(0, values.numel(), most):
            part = values.narrow(0, start, min(most, values.numel() - start))
            blocks = part.to(torch.float32).view(-1, self.step)
            limit = blocks.abs().amax().le(self._largest).logical_not_()  # NaN, too
            if not limit.is_cpu or bool(limit):  # a CPU is asked at once: see NotFinite.note
                self._beyond.append(limit)
            packed = self._pack(blocks).view(-1)
            at = (offset + start) // self.step * self._kind.nbytes
            yield Write("", flat(at, packed.numel()), packed)

    @property
    def _largest(self) -> float:
        """The largest magnitude that a scale of fp16, or of 8 bits of exponent, can hold."""
        halves = {"Q8_0": 127, "Q4_0": 8, "Q5_0": 16, "Q4_1": 1, "Q5_1": 1}
        return 65504.0 * halves[self._kind.name] if self._kind.name in halves else 3.4e38

    def finish(self) -> Iterable[Write]:
        """Raise RunError CKM309 where a value was not finite, or no scale holds it."""
        import torch

        if self._beyond and bool(torch.stack(self._beyond).any()):
            raise RunError(
                "CKM309",
                f"expected finite values of at most {self._largest:.6g}, which gguf-{self._kind.name.lower()}"
                " holds, found others",
                "leave this tensor unquantized with --no-encode, or repair it",
            )
        return ()
