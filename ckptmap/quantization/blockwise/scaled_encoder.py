"""Encode values to 8-bit codes and scales block by block, or store given codes unchanged with new scales.

values [m] T  ->  Write(codes part), Write(scale part)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptmap.errors import RunError
from ckptmap.protocols import Write
from ckptmap.quantization.blockwise.quantizer import (
    QuantizedBlocks,
    absmax_of,
    quantize_rows,
    quantize_tiles,
)
from ckptmap.quantization.blockwise.rounding_rules import RoundingRule
from ckptmap.quantization.dense import flat
from ckptmap.tensors import TensorInfo

if TYPE_CHECKING:
    import torch

Constants = Mapping[str, tuple[str, Sequence[int]]]
"""Part -> (dtype, numbers) for parts that do not depend on the values: a format number, a shape."""


def constant_writes(constants: Constants, device: str = "cpu") -> Iterator[Write]:
    """Yield the writes of the constant parts."""
    import torch

    for name, (dtype, numbers) in constants.items():
        values = torch.tensor(list(numbers), dtype=getattr(torch, dtype), device=device)
        yield Write(name, flat(0, values.numel()), values)


class ScaledEncoder:
    """Encodes block by block; `finish` raises if a value was not finite, so `feed` never waits for the device."""

    splittable = True
    state_nbytes = 0

    def __init__(
        self,
        info: TensorInfo,
        block: tuple[int, ...],
        rule: RoundingRule,
        codes_part: str,
        scale_part: str,
        constants: Constants,
        device: str,
    ) -> None:
        self._info, self._block, self._rule = info, block, rule
        self._codes, self._scale, self._constants = codes_part, scale_part, constants
        self._device = device
        self._width = info.shape[-1]
        in_rows = all(b == 1 for b in block[:-1]) and self._width % block[-1] == 0
        self._rows = block[-1] if in_rows else 0
        tall = block[0] if len(block) == 2 else info.numel
        self.step = self._rows or tall * self._width
        self._bad: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._lost: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        """Encode values [m] T; m and `offset` are multiples of `step`, except for the last rows of tiles."""
        quantized = self._quantized(values)
        self._note(self._bad, offset, self._not_taken(values, quantized))
        self._note(self._lost, offset, self._overflows(quantized))
        first = self._scale_at(offset)
        return (
            Write(self._codes, flat(offset, values.numel()), quantized.codes.view(-1)),
            Write(self._scale, flat(first, quantized.scales.numel()), quantized.scales.reshape(-1)),
        )

    def _quantized(self, values: torch.Tensor) -> QuantizedBlocks:
        if self._rows:
            return quantize_rows(values.view(-1, self._rows), self._rule)
        assert len(self._block) == 2, f"tiles of {self._block} in {self._info}"
        tiles = (self._block[0], self._block[1])
        return quantize_tiles(values.view(-1, self._width), tiles, self._rule)

    def _scale_at(self, offset: int) -> int:
        if self._rows:
            return offset // self._rows
        per_band = -(-self._width // self._block[1])
        return offset // self.step * per_band

    def _not_taken(self, values: torch.Tensor, quantized: QuantizedBlocks) -> torch.Tensor:
        """Return which blocks are not finite, or vanish in the dtype that the rule casts to first."""
        bad = quantized.absmax.isfinite().logical_not_()
        zero = quantized.absmax == 0
        if self._rule.takes == "float16" and not _is_none(zero):
            bad |= zero & (absmax_of(values.view(-1, self._rows), (1,)) != 0)
        return bad

    def _overflows(self, quantized: QuantizedBlocks) -> torch.Tensor:
        """Return which blocks would decode to infinity, because their scale was rounded up.

        Every float8 block has its outermost code. Of the integer codes only -128 exceeds the largest
        value, and a row near the limit may not contain it.
        """
        import torch

        most = quantized.scales.to(torch.float32) * self._rule.reach
        lost = most.to(getattr(torch, self._info.dtype)).isinf()
        if self._rule.codes_dtype != "int8" or not self._rows or _is_none(lost):
            return lost
        return lost.logical_and_(quantized.codes.amin(1) == -128)

    def _note(
        self, noted: list[tuple[int, torch.Tensor, torch.Tensor]], offset: int, bad: torch.Tensor
    ) -> None:
        """Record bad blocks for `finish`, without waiting for the device."""
        if not _is_none(bad):
            noted.append(
                (self._scale_at(offset), bad.flatten().sum(), bad.flatten().int().argmax())
            )

    def finish(self) -> Iterable[Write]:
        """Yield the constant parts.

        Raises RunError CKM309 where an input was not finite, does not fit the dtype that the library
        casts to first, or would decode to infinity.
        """
        for noted, refused in ((self._bad, self._refused), (self._lost, self._overflowed)):
            counts = [(at, int(count), int(first)) for at, count, first in noted if int(count)]
            if counts:
                at, _, first = min(counts)
                raise refused(sum(count for _, count, _ in counts), self._place(at + first))
        return constant_writes(self._constants, self._device)

    def _place(self, at: int) -> str:
        return f"row {at}" if self._rows == self._width else f"block {at}"

    def _overflowed(self, count: int, place: str) -> RunError:
        return RunError(
            "CKM309",
            f"{count} block scales overflow {self._info.dtype}: values near its largest would"
            f" decode to infinity, first in {place}",
            "convert to a wider dtype first (--to hf-fp32), or leave it as it is with --no-encode",
        )

    def _refused(self, count: int, place: str) -> RunError:
        if self._rule.takes == "float16":
            return RunError(
                "CKM309",
                f"{count} rows do not fit float16, which bitsandbytes casts to first: expected "
                f"finite values whose largest is 6e-8 to 65504, not so in {place}",
                "choose another encoding (-int8), or leave this tensor as it is with --no-encode",
            )
        return RunError(
            "CKM309",
            f"expected finite values, found NaN or infinity in {count} blocks, first in {place}",
            "leave this tensor unquantized with --no-encode, or repair it",
        )


def _is_none(bad: torch.Tensor) -> bool:
    """Return whether no block is bad, as far as asking is free: on a GPU it would wait for the device."""
    return bad.is_cpu and not bool(bad.any())


class ScaledRecoder:
    """Stores given codes unchanged, and the scales in its own dtype at the end."""

    step = 1
    state_nbytes = 0

    def __init__(
        self,
        codes_part: str,
        scale_part: str,
        scale_dtype: str,
        stored: Callable[[torch.Tensor], torch.Tensor],
        constants: Constants,
        fidelity: str,
    ) -> None:
        self._codes, self._scale, self._dtype = codes_part, scale_part, scale_dtype
        self._stored, self._constants = stored, constants
        self.fidelity = fidelity

    def feed(self, offset: int, codes: torch.Tensor, scales: torch.Tensor) -> Iterable[Write]:
        return (Write(self._codes, flat(offset, codes.numel()), codes),)

    def finish(self, scales: torch.Tensor) -> Iterable[Write]:
        """Yield the scales and constant parts. Raises RunError CKM309 where a scale overflows its dtype."""
        import torch

        stored = self._stored(scales).to(getattr(torch, self._dtype)).reshape(-1)
        if not bool(stored.isfinite().all()):
            raise RunError(
                "CKM309",
                f"its scales overflow {self._dtype}, the largest is {float(scales.amax()):.6g}",
                "choose another encoding for this tensor, or leave it as it is with --no-encode",
            )
        yield Write(self._scale, flat(0, stored.numel()), stored)
        yield from constant_writes(self._constants)
