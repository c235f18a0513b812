"""A `Conv1D` of GPT-2, of which bitsandbytes' codes are those of the transpose of its weight [in, out].

Values to encode come in the order of the weight, so they are held until the last one is there; then the transpose is fed to the
encoder of the form. A weight of the largest GPT-2 has 10M elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ckptmap.protocols import Encoder, Write
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch


class MayLieAcross:
    """The base of encodings whose codes may be those of the transpose of the weight."""

    transposed: bool

    def stored(self, info: TensorInfo) -> TensorInfo:
        """Return the tensor in the order of its codes: the transpose for a `Conv1D`."""
        return TensorInfo(info.shape[::-1], info.dtype) if self.transposed else info

    def turned_box(self, box: Box) -> Box:
        """Return a box of the weight in the order of its codes."""
        return Box(box.offsets[::-1], box.sizes[::-1]) if self.transposed else box


class AcrossEncoder:
    """Gives the transpose of a weight `info` [in, out] to `inner`, which encodes [out, in]."""

    splittable = False
    step = 1

    def __init__(self, inner: Encoder, info: TensorInfo, device: str) -> None:
        import torch

        dtype: torch.dtype = getattr(torch, info.dtype)
        self._inner = inner
        self._values = torch.empty(info.shape, dtype=dtype, device=device)
        self._missing = info.numel
        self.state_nbytes = 2 * info.nbytes + inner.state_nbytes

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        self._values.view(-1)[offset : offset + values.numel()].copy_(values)
        self._missing -= values.numel()
        return ()

    def finish(self) -> Iterator[Write]:
        assert self._missing == 0, f"{self._missing} elements were not fed"
        yield from self._inner.feed(0, self._values.T.reshape(-1))
        yield from self._inner.finish()
