"""ModelOpt's arithmetic for integer codes, and how it packs two rows of 4-bit codes into bytes.

    rows [r, w] T  ->  scale f32 = absmax / 127 (of 4 bits / 7),  code = clamp(round(x / scale))        in fp32
    codes i8 [2 r, w]  ->  bytes u8 [r, w], the even row in the low half

Source: `get_scaling_factor`, `to_quantized_weight` and `pack_int4_in_uint8` (modelopt 0.47, torch/export/quant_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from ckptmap.protocols import Write
from ckptmap.quantization.blockwise.exact_division import divide
from ckptmap.quantization.blockwise.scaled_encoder import ScaledEncoder
from ckptmap.quantization.dense import flat

if TYPE_CHECKING:
    import torch


class Int8Rule:
    """The scale of a block of zeros, for which ModelOpt stops, is 1."""

    codes_dtype: ClassVar[str] = "int8"
    takes: ClassVar[str] = "float32"
    reach: ClassVar[float] = 128.0

    def scales(self, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = divide(absmax, self.reach - 1)
        scale = scale.masked_fill(scale == 0, 1.0)
        return scale, scale

    def apply(self, values: torch.Tensor, operand: torch.Tensor) -> None:
        values.div_(operand).round_().clamp_(-self.reach, self.reach - 1)


class Int4Rule(Int8Rule):
    reach: ClassVar[float] = 8.0


def paired(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes i8 [2 r, w] of 4 bits -> bytes u8 [r, w]."""
    import torch

    low, high = codes[0::2], codes[1::2]
    return low.bitwise_and(15).bitwise_or(high << 4).view(torch.uint8)


def unpaired(packed: torch.Tensor, row: int, rows: int) -> torch.Tensor:
    """Return the codes i8 [rows, w] from `row` on; `packed` u8 holds them and no pair before."""
    import torch

    pairs = packed.view(torch.int8)
    both = torch.stack(((pairs << 4) >> 4, pairs >> 4), 1).flatten(0, 1)
    return both.narrow(0, row % 2, rows)


class PairsEncoder:
    """Packs the codes that another encoder makes of pairs of rows."""

    splittable = True
    state_nbytes = 0

    def __init__(self, inner: ScaledEncoder, width: int) -> None:
        self._inner, self._width = inner, width
        self.step = 2 * width

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        for write in self._inner.feed(offset, values):
            if write.part != "packed":
                yield write
                continue
            packed = paired(write.values.view(-1, self._width))
            yield Write("packed", flat(offset // 2, packed.numel()), packed.reshape(-1))

    def finish(self) -> Iterable[Write]:
        return self._inner.finish()
