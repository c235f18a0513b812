"""A tensor seen in another dtype: read as it is stored, then cast as `torch.Tensor.to` casts.

An encoder rounds values of the dtype that its form states. Weights that were trained in another one are
cast first, so that codes and scales are those of the form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.protocols import Encoder, Encoding, Group, Refusal
from ckptmap.quantization.dense import DenseEncoder
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CastView:
    """The encoding of a cast tensor; `inner` is that of the tensor as it is stored, with `held`."""

    inner: Encoding
    held: TensorInfo

    name = "dense cast"
    lossy = True
    quantized = False

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        return {"": info}

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return self.inner.part_box(self.held, part, box)

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        raise AssertionError("a cast tensor is read through the tensor that it is a view of")

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        return DenseEncoder()

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        return None


class TensorInDtype(LazyTensor):
    """The view of `inner` in another dtype."""

    __slots__ = ("inner",)

    def __init__(self, inner: LazyTensor, dtype: str) -> None:
        info = TensorInfo(inner.shape, dtype)
        view = CastView(inner.encoding_, inner.info)
        super().__init__(inner.fqn, Group(inner.fqn, info, view, inner.parts), inner.files)
        self.inner = inner

    @property
    def beneath(self) -> Iterable[StoredTensor]:
        return self.inner.beneath

    @property
    def sources(self) -> Iterable[LazyTensor]:
        return self.inner.sources

    @property
    def quantized(self) -> bool:
        return self.inner.quantized

    def read_into(self, box: Box, out: torch.Tensor) -> None:
        import torch

        held = torch.empty(box.sizes, dtype=self.inner.torch_dtype, device=out.device)
        self.inner.read_into(box, held)
        out.copy_(held)


def cast_to(lazy: LazyTensor, dtype: str) -> LazyTensor:
    """Return the tensor with its values cast to `dtype` when they are read; itself if they have it."""
    return lazy if lazy.dtype == dtype else TensorInDtype(lazy, dtype)
