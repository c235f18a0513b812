"""Encode values to packed 4-bit codes with exponents as scales, or store given codes with new scales.

values [m] T, row-major  ->  Write("packed"), Write("scale")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ckptmap.errors import RunError
from ckptmap.protocols import Write
from ckptmap.quantization.blockwise.chunks import chunk_numel
from ckptmap.quantization.blockwise.exponents import ExponentRule, exponents_of, inverses
from ckptmap.quantization.blockwise.not_finite import NotFinite
from ckptmap.quantization.blockwise.quantizer import absmax_of
from ckptmap.quantization.dense import flat
from ckptmap.quantization.microscaling import e2m1
from ckptmap.tensors import TensorInfo

if TYPE_CHECKING:
    import torch


class Fp4Encoder:
    """Encodes block by block.

    Blocks of a tensor that is stored transposed run along its second last dim: the codes of one matrix are
    kept until it is complete, because they are written in the order in which they are stored.
    """

    def __init__(
        self,
        info: TensorInfo,
        rule: ExponentRule,
        block: int,
        transposed: bool,
        packed_dtype: str,
        scale_dtype: str,
    ) -> None:
        self._rule, self._block, self._finite = rule, block, NotFinite()
        self._dtypes = packed_dtype, scale_dtype
        self._transposed = transposed
        self._height, self._width = info.shape[-2:]
        self.splittable = not transposed
        self.step = block * self._width if transposed else block
        matrix = self._height * self._width
        self.state_nbytes = matrix // 2 + matrix // block if transposed else 0
        self._codes: torch.Tensor | None = None
        self._exponents: torch.Tensor | None = None

    def feed(self, offset: int, values: torch.Tensor) -> Iterator[Write]:
        """Encode values [m] T; m and `offset` are multiples of `step`."""
        most = max(1, chunk_numel(values.device, e2m1.CHUNK_NUMEL) // self.step) * self.step
        if self._transposed:
            yield from self._feed_matrix(offset, values, most)
            return
        for start in range(0, values.numel(), most):
            part = values.narrow(0, start, min(most, values.numel() - start))
            codes, exponents = self._encoded(part.view(-1, self._block))
            at = offset + start
            yield self._write("packed", at // 2, e2m1.pack(codes).view(-1))
            yield self._write("scale", at // self._block, exponents)

    def finish(self) -> Iterable[Write]:
        """Raise RunError CKM309 where a value was not finite."""
        self._finite.require_none()
        return ()

    def _encoded(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode values whose blocks run along dim 1 -> codes u8, exponents u8 without that dim."""
        import torch

        absmax = absmax_of(values, (1,))
        self._finite.note(absmax)
        exponents = self._rule.exponents(absmax)
        return e2m1.rounded(_scaled(values, inverses(exponents).unsqueeze(1))), exponents.to(
            torch.uint8
        )

    def _feed_matrix(self, offset: int, values: torch.Tensor, most: int) -> Iterator[Write]:
        """Put bands of `block` rows into the codes of their matrix; yield a matrix that is complete."""
        matrix = self._height * self._width
        start = 0
        while start < values.numel():
            number, inside = divmod(offset + start, matrix)
            count = min(most, values.numel() - start, matrix - inside)
            self._put(inside // self.step, values.narrow(0, start, count))
            start += count
            if inside + count == matrix:
                yield from self._matrix(number)

    def _put(self, first: int, values: torch.Tensor) -> None:
        bands = values.view(-1, self._block, self._width)
        codes, exponents = self._encoded(bands)
        packed = e2m1.pack(codes, 1)  # [bands, block / 2, width]
        if self._codes is None or self._exponents is None:
            grid = self._width, self._height // self._block
            self._codes = packed.new_empty((*grid, self._block // 2))
            self._exponents = packed.new_empty(grid)
        self._codes.narrow(1, first, len(bands)).copy_(packed.permute(2, 0, 1))
        self._exponents.narrow(1, first, len(bands)).copy_(exponents.t())

    def _matrix(self, number: int) -> Iterator[Write]:
        codes, exponents = self._codes, self._exponents
        assert codes is not None and exponents is not None, "all of its bands were put"
        self._codes = self._exponents = None
        yield self._write("packed", number * codes.numel(), codes.view(-1))
        yield self._write("scale", number * exponents.numel(), exponents.view(-1))

    def _write(self, part: str, at: int, values: torch.Tensor) -> Write:
        import torch

        dtype = getattr(torch, self._dtypes[part == "scale"])
        return Write(part, flat(at, values.numel()), values.view(dtype))


def _scaled(values: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """Multiply values of dtype T by powers of two f32, in T where it has 16 bits: no code changes by that.

    The product is exact in T unless it is subnormal, and then its code is that of a zero of its sign.
    """
    import torch

    if values.dtype == torch.bfloat16:  # which has all of these powers
        return values * powers.to(torch.bfloat16)
    wide = values.to(torch.float32).mul_(powers) if values.element_size() == 2 else values * powers
    return wide.to(values.dtype)


class Fp4Recoder:
    """Stores given codes unchanged, and their scales, which are powers of two, as exponents."""

    step = 1
    state_nbytes = 0

    def __init__(self, packed_dtype: str, scale_dtype: str, fidelity: str = "exact") -> None:
        self._packed, self._scale, self.fidelity = packed_dtype, scale_dtype, fidelity

    def feed(self, offset: int, codes: torch.Tensor, scales: torch.Tensor) -> Iterable[Write]:
        import torch

        values = codes.view(getattr(torch, self._packed))
        return (Write("packed", flat(offset, codes.numel()), values),)

    def finish(self, scales: torch.Tensor) -> Iterable[Write]:
        """Yield the scales. Raise RunError CKM309 where one is no power of two."""
        import torch

        stored = exponents_of(scales.reshape(-1)).view(torch.float8_e8m0fnu)
        if not torch.equal(stored.to(torch.float32), scales.reshape(-1)):
            raise RunError(
                "CKM309",
                "its scales are not powers of two, which this encoding stores",
                "decode it first (--to hf-bf16), then quantize",
            )
        yield Write("scale", flat(0, stored.numel()), stored.view(getattr(torch, self._scale)))
