"""Store given codes and zero points unchanged, the zero points packed along the rows.

zero points [out, groups]  ->  weight_zero_point i32 [ceil(out * bits / 32), groups]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptmap.core.quantized_codes import Recoder
from ckptmap.errors import RunError
from ckptmap.protocols import Write
from ckptmap.quantization.blockwise.word_packing import Packing, packed
from ckptmap.quantization.dense import flat

if TYPE_CHECKING:
    import torch


class ZerosRecoder:
    """Passes codes and scales to the recoder of codes without zero points; its scales are [2, out, groups]."""

    def __init__(self, inner: Recoder, packing: Packing) -> None:
        self._inner, self._packing = inner, packing
        self.step, self.state_nbytes = inner.step, inner.state_nbytes
        self.fidelity = inner.fidelity

    def feed(self, offset: int, codes: torch.Tensor, scales: torch.Tensor) -> Iterable[Write]:
        return self._inner.feed(offset, codes, scales[0])

    def finish(self, scales: torch.Tensor) -> Iterable[Write]:
        """Yield scales and zero points. Raise RunError CKM309 where a zero point needs more bits."""
        import torch

        yield from self._inner.finish(scales[0])
        bits, zeros = self._packing.bits, scales[1]
        half = 1 << (bits - 1)
        most = int(zeros.amax())
        if most >= half or int(zeros.amin()) < -half:
            raise RunError(
                "CKM309",
                f"its zero points reach {most + half}, and {bits} bits hold 0 to {2 * half - 1}",
                "decode it first (--to hf-bf16), then quantize; or leave it as it is with --no-encode",
            )
        along = zeros.to(torch.int8).t().contiguous()
        words = packed(along, bits, self._packing.aligned).t().contiguous()
        yield Write("zero_point", flat(0, words.numel()), words.view(-1))
