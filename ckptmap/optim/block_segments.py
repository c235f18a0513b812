"""Where a box of a moment lies in the blocks of the whole tensor, which it cuts.

[2, 640] in blocks of 256, columns 320..640  ->  blocks 1 to 4, and of the box's 640 elements, row by row:
                                                 192 in block 1, 128 in block 2; 64 in block 3, 256 in block 4

Each rank that holds a part of a block has its scale; so it knows the values of its own codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ckptmap.core.strided_dims import flat_span
from ckptmap.tensors import Box, contiguous_strides

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class BlockSegments:
    """The elements of a box, row by row, as runs that lie in one block each.

    first    number of the block in which the box begins
    count    blocks from that one to the one in which the box ends; the box need not touch each
    block    elements of a block
    lengths  elements of each run, int64
    blocks   its block, counted from `first`, int64
    numel    elements of the box
    """

    first: int
    count: int
    block: int
    lengths: torch.Tensor
    blocks: torch.Tensor
    numel: int

    @property
    def are_whole(self) -> bool:
        """Is the box whole blocks, each in one run?"""
        return bool((self.lengths == self.block).all())

    def on(self, device: torch.device) -> BlockSegments:
        """Return the same segments on a device."""
        lengths, blocks = self.lengths.to(device), self.blocks.to(device)
        return BlockSegments(self.first, self.count, self.block, lengths, blocks, self.numel)

    def of_each(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the scale of each element, of those of all `count` blocks."""
        of_runs = scale.index_select(0, self.blocks)
        return of_runs.repeat_interleave(self.lengths, output_size=self.numel)

    def peaks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude among the box's elements of each block; 0 where it has none. NaN is larger
        than all others."""
        import torch

        magnitudes = values.abs().view(-1)
        runs = torch.segment_reduce(magnitudes, "max", lengths=self.lengths, unsafe=True)
        return runs.new_zeros(self.count).scatter_reduce_(0, self.blocks, runs, "amax")


@lru_cache(maxsize=64)
def segments_of(shape: tuple[int, ...], box: Box, block: int) -> BlockSegments:
    """Return the segments of a box of a tensor of this shape, on the CPU."""
    import torch

    starts, width = _runs(shape, box)
    low, high = starts // block, (starts + width - 1) // block
    counts = high - low + 1
    run = torch.arange(len(starts), device="cpu").repeat_interleave(counts)
    begins = counts.cumsum(0) - counts
    blocks = low[run] + torch.arange(len(run), device="cpu") - begins[run]
    first_element = torch.maximum(starts[run], blocks * block)
    past_last = torch.minimum(starts[run] + width, (blocks + 1) * block)
    first, last = block_range(shape, box, block)
    return BlockSegments(
        first, last - first, block, past_last - first_element, blocks - first, box.numel
    )


@lru_cache(maxsize=64)
def segments_on(
    shape: tuple[int, ...], box: Box, block: int, device: torch.device
) -> BlockSegments:
    """Likewise, on a device: the moments of all parameters that are cut alike share them."""
    return segments_of(shape, box, block).on(device)


def _runs(shape: Sequence[int], box: Box) -> tuple[torch.Tensor, int]:
    """Return the flat position of each run of consecutive elements of a box, and the length that all have."""
    import torch

    strides = contiguous_strides(shape, 1)
    depth = len(shape)
    while depth and (depth == len(shape) or box.sizes[depth] == shape[depth]):
        depth -= 1
    starts = torch.zeros((), dtype=torch.int64, device="cpu")
    for at, size, stride in zip(box.offsets[:depth], box.sizes, strides, strict=False):
        starts = starts.unsqueeze(-1) + (torch.arange(size, device="cpu") + at) * stride
    inner = sum(
        at * stride for at, stride in zip(box.offsets[depth:], strides[depth:], strict=True)
    )
    return starts.reshape(-1) + inner, Box(box.offsets[depth:], box.sizes[depth:]).numel


def block_range(shape: Sequence[int], box: Box, block: int) -> tuple[int, int]:
    """Return the number of the block in which a box begins, and of the one after that in which it ends."""
    start, stop = flat_span(shape, box)
    return start // block, -(-stop // block)
