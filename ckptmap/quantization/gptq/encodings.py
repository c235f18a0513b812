"""How GPTQ and AWQ hold codes in words.

    GPTQ  qweight i32 [in * bits / 32, out]    codes along a column of words, the first in the lowest bits; a
                                               code of 3 bits may span two words
    AWQ   qweight i32 [in, out / 8]            8 codes of 4 bits of a row in a word, in the order 0 2 4 6 1 3 5 7

Zero points are packed along each row, as AWQ's codes are, or in their order for GPTQ, which stores them minus 1
in its first version (`checkpoint_format` "gptq") and as they are in its second ("gptq_v2") and in planes ("gptq_p").
Sources: AutoGPTQ's `QuantLinear.pack` as auto-round 0.16 has it (auto_round_extension/torch/qlinear_torch_zp.py
and qlinear_torch.py), AutoAWQ 0.2.9 (awq/modules/linear/gemm.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ckptmap.protocols import Refusal
from ckptmap.quantization.blockwise.chunks import constant
from ckptmap.quantization.blockwise.word_packing import WORD, PlanePacking, packed
from ckptmap.quantization.gptq.columns import GroupedColumns
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

AWQ_BITS = 4
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output whose code is at each place of a word, from the lowest bits on."""


@dataclass(frozen=True)
class GptqV2(GroupedColumns):
    name: ClassVar[str] = "gptq"
    scheme: ClassVar[str] = "gptq-v2"

    def words(self, info: TensorInfo) -> tuple[int, int]:
        return self.packing.words(info.shape[1]), info.shape[0]

    def word_box(self, box: Box) -> Box:
        low, count = self.packing.span(box.offsets[1], box.sizes[1])
        return Box((low, box.offsets[0]), (count, box.sizes[0]))

    def unpacked(self, words: torch.Tensor, box: Box, inner: Box) -> torch.Tensor:
        along = words.narrow(1, inner.offsets[0] - box.offsets[0], inner.sizes[0]).t().contiguous()
        return self.packing.unpacked(along, box.offsets[1], box.sizes[1]).contiguous()

    def packed_band(self, codes: torch.Tensor) -> torch.Tensor:
        return packed(codes, self.bits, False).t()

    def packed_zeros(self, zeros: torch.Tensor) -> torch.Tensor:
        return packed(zeros, self.bits, False)


@dataclass(frozen=True)
class Gptq(GptqV2):
    scheme: ClassVar[str] = "gptq"
    zero_offset: ClassVar[int] = 1


@dataclass(frozen=True)
class GptqPlanes(GptqV2):
    """gptqmodel's "gptq_p": bits of codes and zero points in planes, see `PlanePacking`."""

    scheme: ClassVar[str] = "gptq-p"

    @property
    def packing(self) -> PlanePacking:
        return PlanePacking(self.bits)

    def refusal(self, info: TensorInfo) -> Refusal | None:
        if any(size % WORD for size in info.shape):
            return Refusal(f"packs 32 codes together, found shape {list(info.shape)}")
        return super().refusal(info)

    def packed_band(self, codes: torch.Tensor) -> torch.Tensor:
        return self.packing.packed(codes).t()

    def packed_zeros(self, zeros: torch.Tensor) -> torch.Tensor:
        return self.packing.packed(zeros)


@dataclass(frozen=True)
class Awq(GroupedColumns):
    name: ClassVar[str] = "awq"
    scheme: ClassVar[str] = "awq"

    def refusal(self, info: TensorInfo) -> Refusal | None:
        if self.bits != AWQ_BITS or self.order:
            return Refusal(f"packs {AWQ_BITS} bits, with groups in their order, found {self.bits}")
        return super().refusal(info)

    def packed_sizes(self, info: TensorInfo) -> tuple[int, ...]:
        return info.shape[:1]

    def words(self, info: TensorInfo) -> tuple[int, int]:
        return info.shape[1], self.packing.words(info.shape[0])

    def word_box(self, box: Box) -> Box:
        low, count = self.packing.span(box.offsets[0], box.sizes[0])
        return Box((box.offsets[1], low), (box.sizes[1], count))

    def unpacked(self, words: torch.Tensor, box: Box, inner: Box) -> torch.Tensor:
        low, count = self.packing.span(inner.offsets[0], inner.sizes[0])
        some = words.narrow(1, low - self.packing.span(box.offsets[0], 1)[0], count)
        codes = _in_order(some)
        return codes.narrow(0, inner.offsets[0] - low * 8, inner.sizes[0])

    def zero_points(self, words: torch.Tensor, row: int, rows: int) -> torch.Tensor:
        return _in_order(words).narrow(0, row % 8, rows)

    def packed_band(self, codes: torch.Tensor) -> torch.Tensor:
        return _packed_in_order(codes)

    def packed_zeros(self, zeros: torch.Tensor) -> torch.Tensor:
        return _packed_in_order(zeros.t())


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Unpack words i32 [n, m] in AWQ's order -> codes i8 [8 m, n].

    The bytes of a word are four planes [m, n] that lie apart in memory, each of two codes: no write skips memory.
    """
    import torch

    height, width = words.shape
    planes = words.contiguous().view(-1).view(torch.uint8).view(height, width, 4).permute(1, 2, 0)
    planes = planes.contiguous()
    codes = planes.new_empty((width, 8, height))
    for place, output in enumerate(AWQ_ORDER):
        plane = planes[:, place // 2]
        torch.bitwise_and(plane >> 4 if place % 2 else plane, 15, out=codes[:, output])
    return codes.flatten(0, 1).view(torch.int8).sub_(8)


def _packed_in_order(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes i8 [8 m, n] -> words i32 [n, m] in AWQ's order."""
    import torch

    order = constant("awq order", codes.device, lambda: torch.tensor(AWQ_ORDER, device="cpu"))
    turned = codes.reshape(-1, 8, codes.shape[1]).index_select(1, order).permute(2, 0, 1)
    return packed(turned.flatten(1), AWQ_BITS, False)
