"""Tensors of a model that share memory without being one object: a slice, or a transposed view.

The tensor that is loaded last would set the values of all of them, so that their sources must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.storage.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    import torch

MANY = 255
"""The most tensors of one cluster whose bytes are compared."""


def clusters(targets: Sequence[LiveTensor]) -> Iterator[list[LiveTensor]]:
    """Yield each set of two or more dense tensors that have bytes of memory in common."""
    spans = sorted(((str(t.local.device), *_span(t.local), n) for n, t in enumerate(targets)))
    for _, some in groupby(spans, lambda span: span[0]):
        cluster: list[LiveTensor] = []
        reach = 0
        for _, start, stop, number in some:
            if start >= reach:
                yield from _sharing(cluster)
                cluster = []
            cluster.append(targets[number])
            reach = max(reach, stop)
        yield from _sharing(cluster)


def _sharing(cluster: list[LiveTensor]) -> Iterator[list[LiveTensor]]:
    """Yield the tensors of a cluster that do share bytes: the columns of one matrix span the same
    memory, and share none."""
    if len(cluster) < 2:
        return
    taken = _Bytes(cluster)
    for number, target in enumerate(cluster):
        owners = taken.owners_of(target)
        if owners.any():
            yield cluster
            return
        owners.fill_(min(number + 1, MANY))


def conflict(
    reader: TensorReader, cluster: Sequence[tuple[LiveTensor, LazyTensor]]
) -> tuple[LazyTensor, LazyTensor] | None:
    """Return two sources that give a byte of memory different values; None: all agree."""
    import torch

    memory = _Bytes([target for target, _ in cluster])
    for number, (target, source) in enumerate(cluster):
        read = torch.empty(target.local.shape, dtype=target.local.dtype)
        for box, view in target.windows(read):
            reader.decoded(source, box, view)
        owners, values = memory.owners_of(target), memory.values_of(target)
        fresh = read.view(-1).view(torch.uint8).view(values.shape)
        wrong = owners[(owners > 0) & (fresh != values)]
        if wrong.numel():
            return cluster[int(wrong[0]) - 1][1], source
        owners.fill_(min(number + 1, MANY))
        values.copy_(fresh)
    return None


class _Bytes:
    """The memory that a cluster of tensors spans: the owner of each byte, and its value."""

    def __init__(self, targets: Sequence[LiveTensor]) -> None:
        import torch

        spans = [_span(target.local) for target in targets]
        self._start = min(start for start, _ in spans)
        size = max(stop for _, stop in spans) - self._start
        self._owners = torch.zeros(size, dtype=torch.uint8)
        self._values: torch.Tensor | None = None

    def owners_of(self, target: LiveTensor) -> torch.Tensor:
        """Return the number of the owner of each byte of a tensor, [*shape, itemsize]; 0: none."""
        return self._view(self._owners, target.local)

    def values_of(self, target: LiveTensor) -> torch.Tensor:
        """Return the bytes that were last written to a tensor, [*shape, itemsize]."""
        import torch

        if self._values is None:
            self._values = torch.zeros(len(self._owners), dtype=torch.uint8)
        return self._view(self._values, target.local)

    def _view(self, memory: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        itemsize = local.element_size()
        strides = [step * itemsize for step in local.stride()]
        at = local.data_ptr() - self._start
        return memory.as_strided((*local.shape, itemsize), (*strides, 1), at)


def _span(local: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte, and that behind the last."""
    last = sum((size - 1) * step for size, step in zip(local.shape, local.stride(), strict=True))
    start = local.data_ptr()
    return start, start + (last + 1) * local.element_size()
