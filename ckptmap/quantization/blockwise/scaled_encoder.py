"""Encode values to 8-bit codes and scales block by block, or store given codes unchanged with new scales.

values [m] T  ->  Write(codes part), Write(scale part)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.core.formatting import counted
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


def constant_writes(constants: Constants) -> Iterator[Write]:
    """Yield the writes of the constant parts, on the CPU."""
    import torch

    for name, (dtype, numbers) in constants.items():
        values = torch.tensor(list(numbers), dtype=getattr(torch, dtype))
        yield Write(name, flat(0, values.numel()), values)


@dataclass(frozen=True)
class _Noted:
    """What tells whether some blocks can be decoded again. Each tensor has one number a block.

    at       the number of the first block
    given    absmax of the values as they came, which a rule may cast before it takes its own
    lowest   the lowest code, None where every block has its outermost code
    """

    at: int
    given: torch.Tensor
    absmax: torch.Tensor
    scales: torch.Tensor
    lowest: torch.Tensor | None


class ScaledEncoder:
    """Encodes block by block; `finish` raises if a value was not finite, so `feed` never waits for the device.

    On a device it keeps a few numbers a block for that.
    """

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
    ) -> None:
        self._info, self._block, self._rule = info, block, rule
        self._codes, self._scale, self._constants = codes_part, scale_part, constants
        self._width = info.shape[-1]
        in_rows = all(b == 1 for b in block[:-1]) and self._width % block[-1] == 0
        self._rows = block[-1] if in_rows else 0
        tall = block[0] if len(block) == 2 else info.numel
        self.step = self._rows or tall * self._width
        self._noted: list[_Noted] = []

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        """Encode values [m] T; m and `offset` are multiples of `step`, except for the last rows of tiles."""
        quantized = self._quantized(values)
        first = self._scale_at(offset)
        self._note(first, values, quantized)
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

    def _note(self, first: int, values: torch.Tensor, quantized: QuantizedBlocks) -> None:
        """Keep what `finish` needs to judge these blocks.

        A CPU asks at once and keeps those that may be bad; to ask a device would be to wait for it.
        """
        absmax, scales, lowest = quantized.absmax, quantized.scales.reshape(-1), None
        if values.is_cpu and not self._may_be_bad(absmax, scales):
            return
        casts = self._rule.takes == "float16"
        given = absmax_of(values.view(-1, self._rows), (1,)) if casts else absmax
        if self._rule.codes_dtype == "int8" and self._rows:
            lowest = quantized.codes.amin(1)
        self._noted.append(_Noted(first, given.reshape(-1), absmax.reshape(-1), scales, lowest))

    def _may_be_bad(self, absmax: torch.Tensor, scales: torch.Tensor) -> bool:
        if not bool(absmax.isfinite().all()) or bool(self._overflows(scales).any()):
            return True
        return self._rule.takes == "float16" and not bool(absmax.all())

    def _overflows(self, scales: torch.Tensor) -> torch.Tensor:
        """Return which scales, rounded up, would decode the outermost code to infinity."""
        import torch

        most = scales.to(torch.float32) * self._rule.reach
        return most.to(getattr(torch, self._info.dtype)).isinf()

    def finish(self) -> Iterable[Write]:
        """Yield the constant parts.

        Raises RunError CKM309 where an input was not finite, does not fit the dtype that the library
        casts to first, or would decode to infinity.
        """
        self._noted.sort(key=lambda noted: noted.at)
        if self._noted:
            self._judge()
        return constant_writes(self._constants)

    def _judge(self) -> None:
        """Raise RunError CKM309 where a block is bad. Waits once for the device."""
        import torch

        noted = self._noted
        absmax, given = torch.cat([n.absmax for n in noted]), torch.cat([n.given for n in noted])
        bad = absmax.isfinite().logical_not_() | ((absmax == 0) & (given != 0))
        lost = self._overflows(torch.cat([n.scales for n in noted]))
        # Of the integer codes only -128 exceeds the largest value, and a block near the limit may
        # not contain it. Every float8 block has its outermost code.
        lowest = [n.lowest for n in noted if n.lowest is not None]
        if lowest:
            lost &= torch.cat(lowest) == -128
        counts = torch.stack([bad.sum(), lost.sum()]).tolist()
        for blocks, count, refused in zip(
            (bad, lost), counts, (self._refused, self._overflowed), strict=True
        ):
            if count:
                raise refused(count, self._place(self._number(int(blocks.int().argmax()))))

    def _number(self, place: int) -> int:
        """Return the number of a block from its place among those that were kept."""
        for noted in self._noted:
            if place < noted.absmax.numel():
                break
            place -= noted.absmax.numel()
        return noted.at + place

    def _place(self, at: int) -> str:
        return f"row {at}" if self._rows == self._width else f"block {at}"

    def _overflowed(self, count: int, place: str) -> RunError:
        return RunError(
            "CKM309",
            f"{counted(count, 'block scale', 'overflows', 'overflow')} {self._info.dtype}: values near its largest would"
            f" decode to infinity, first in {place}",
            "convert to a wider dtype first (--to hf-fp32), or leave it as it is with --no-encode",
        )

    def _refused(self, count: int, place: str) -> RunError:
        if self._rule.takes == "float16":
            return RunError(
                "CKM309",
                f"{counted(count, 'row', 'does', 'do')} not fit float16, which bitsandbytes casts to first: expected "
                f"finite values whose largest is 6e-8 to 65504, not so in {place}",
                "choose another encoding (-int8), or leave this tensor as it is with --no-encode",
            )
        return RunError(
            "CKM309",
            f"expected finite values, found NaN or infinity in {counted(count, 'block')}, first in {place}",
            "leave this tensor unquantized with --no-encode, or repair it",
        )


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
