"""Store given codes as GPTQ or AWQ does: the codes bit for bit, scales and zero points in words beside them.

codes i8 [out, in], scales f32 [out, groups], perhaps zero points  ->  qweight, qzeros, scales S, perhaps g_idx
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ckptmap.errors import RunError
from ckptmap.protocols import Write
from ckptmap.quantization.gptq.column_encoder import BAND, ColumnForm, WeightColumns, column_write

if TYPE_CHECKING:
    import torch

Packs = Callable[["torch.Tensor"], "torch.Tensor"]


class ColumnRecoder:
    """Keeps the words of the whole tensor, as `ColumnEncoder` does.

    spread  makes of the scales, or zero points, of given blocks those of this form
    """

    def __init__(
        self,
        shape: tuple[int, int],
        form: ColumnForm,
        packs: tuple[Packs, Packs],
        spread: Packs,
        fidelity: str,
    ) -> None:
        self._width, self._form, self._spread = shape[1], form, spread
        self._pack, self._pack_zeros = packs
        self._words = WeightColumns(shape[0])
        self.step = BAND * shape[1]
        self.state_nbytes = shape[0] * shape[1] * form.bits // 8
        self.fidelity = fidelity

    def feed(self, offset: int, codes: torch.Tensor, scales: torch.Tensor) -> Iterable[Write]:
        rows = codes.view(-1, self._width)
        for start in range(0, len(rows), BAND):
            band = rows[start : start + BAND]
            self._words.add(self._pack(band), len(band))
        return ()

    def finish(self, scales: torch.Tensor) -> Iterable[Write]:
        """Yield all parts. `scales` are [out, groups], or [2, out, groups] with zero points.

        Raise RunError CKM309 where a scale or a zero point does not fit.
        """
        import torch

        form = self._form
        zeros = self._spread(scales[1]) if scales.dim() == 3 else None
        factors = self._spread(scales[0] if scales.dim() == 3 else scales)
        stored = factors.to(getattr(torch, form.scale_dtype))
        if not bool(stored.isfinite().all()) or bool(((stored == 0) & (factors != 0)).any()):
            raise RunError(
                "CKM309",
                f"its scales, from {float(factors.abs().amin()):.6g} to {float(factors.abs().amax()):.6g}, do not"
                f" fit {form.scale_dtype}",
                "decode it first (--to hf-bf16), then quantize",
            )
        yield column_write("qweight", self._words.whole)
        yield column_write("scales", stored.t())
        yield column_write("qzeros", self._pack_zeros(self._stored_zeros(zeros, factors).t()))
        if form.listed:
            yield column_write("g_idx", torch.arange(self._width, dtype=torch.int32) // form.group)

    def _stored_zeros(self, zeros: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Return zero points i8 [out, groups] as they are stored. Raise RunError CKM309 where one does not fit."""
        import torch

        offset, half = self._form.offset, 1 << (self._form.bits - 1)
        if zeros is None:
            return torch.full(like.shape, -offset, dtype=torch.int8)
        low, high = int(zeros.amin()) + half, int(zeros.amax()) + half
        if low < offset or high >= 2 * half + offset:
            raise RunError(
                "CKM309",
                f"its zero points are {low} to {high}, expected {offset} to {2 * half - 1 + offset}, which this form"
                " holds",
                "give a release with checkpoint_format gptq_v2 to --as; or decode it first (--to hf-bf16), then quantize",
            )
        return zeros.sub(offset).to(torch.int8)
