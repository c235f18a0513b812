"""Encoder and recoder of codes with one scale a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptmap.blocks.quantizer import Quantized, absmax_of, quantize_rows, quantize_tiles
from ckptmap.blocks.rules import Rule
from ckptmap.errors import RunError
from ckptmap.protocols import Write
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

Constants = Mapping[str, tuple[str, Sequence[int]]]
"""Part -> dtype and numbers that it holds whatever the values are: a format number, a shape."""


def flat(start: int, count: int) -> Box:
    """A range of a flattened part."""
    return Box((start,), (count,))


def constant_writes(constants: Constants, device: str = "cpu") -> Iterator[Write]:
    import torch

    for name, (dtype, numbers) in constants.items():
        values = torch.tensor(list(numbers), dtype=getattr(torch, dtype), device=device)
        yield Write(name, flat(0, values.numel()), values)


class ScaledEncoder:
    """Codes and scales at once, block by block; whether all was finite is asked at the end."""

    splittable = True
    state_nbytes = 0

    def __init__(
        self,
        info: TensorInfo,
        block: tuple[int, ...],
        rule: Rule,
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

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        """values [m] T, m and `offset` multiples of the step (the last m of tiles may not be)."""
        found = self._quantized(values)
        self._note(offset, values, found)
        first = self._scale_at(offset)
        return (
            Write(self._codes, flat(offset, values.numel()), found.codes.view(-1)),
            Write(self._scale, flat(first, found.scales.numel()), found.scales.reshape(-1)),
        )

    def _quantized(self, values: torch.Tensor) -> Quantized:
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

    def _note(self, offset: int, values: torch.Tensor, found: Quantized) -> None:
        """What is not finite, or lost to the dtype that the rule casts to, is told by `finish`."""
        bad = found.absmax.isfinite().logical_not_()
        zero = found.absmax == 0
        if self._rule.takes == "float16" and not (zero.is_cpu and not bool(zero.any())):
            bad |= zero & (absmax_of(values.view(-1, self._rows), (1,)) != 0)
        if bad.is_cpu and not bool(bad.any()):  # asking is free there
            return
        self._bad.append(
            (self._scale_at(offset), bad.flatten().sum(), bad.flatten().int().argmax())
        )

    def finish(self) -> Iterable[Write]:
        """The constant parts. Raises RunError CKM309 where an input was not finite, or does not
        fit the dtype that the library casts to first."""
        found = [(at, int(count), int(first)) for at, count, first in self._bad if int(count)]
        if found:
            at, _, first = min(found)
            count = sum(count for _, count, _ in found)
            raise self._refused(count, at + first)
        return constant_writes(self._constants, self._device)

    def _refused(self, count: int, first: int) -> RunError:
        place = f"row {first}" if self._rows == self._width else f"block {first}"
        if self._rule.takes == "float16":
            return RunError(
                "CKM309",
                f"{count} rows do not fit float16, which bitsandbytes casts to first: expected "
                f"finite values whose largest is 6e-8 to 65504, not so in {place}",
                "choose another encoding (-int8), or leave this tensor out with --no-encode",
            )
        return RunError(
            "CKM309",
            f"expected finite values, found NaN or infinity in {count} blocks, first in {place}",
            "leave this tensor unquantized with --no-encode, or repair it",
        )


class ScaledRecoder:
    """Codes as they come; scales at the end."""

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
        """Raises RunError CKM309 where a scale overflows its dtype."""
        import torch

        stored = self._stored(scales).to(getattr(torch, self._dtype)).reshape(-1)
        if not bool(stored.isfinite().all()):
            raise RunError(
                "CKM309",
                f"its scales overflow {self._dtype}, the largest is {float(scales.amax()):.6g}",
                "choose another encoding for this tensor, or leave it out with --no-encode",
            )
        yield Write(self._scale, flat(0, stored.numel()), stored)
        yield from constant_writes(self._constants)
