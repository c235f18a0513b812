"""Codes and scales of blocks of the whole tensor, for a shard that cuts them, or from shards that did.

stored  one run of blocks, or cells: boxes that ranks held, which are whole blocks or cut them
live    blocks of the whole tensor: a box that cuts them, a box or a run that is whole ones

A block has one scale wherever it lies, so that codes can move from any of these to any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from ckptmap.core.strided_dims import flat_span
from ckptmap.live.model.tensor_reader import TensorReader, window
from ckptmap.live.optimizer.family import Codes
from ckptmap.optim import lowbit_codes
from ckptmap.optim.block_segments import block_range, segments_of
from ckptmap.optim.lowbit import CODES, SCALE, LowBit
from ckptmap.optim.lowbit_codes import LEAST
from ckptmap.quantization.blockwise.exact_division import divide
from ckptmap.storage.box_reader import row_major_boxes
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, contiguous_strides

if TYPE_CHECKING:
    import torch


def fit(lazy: LazyTensor, codes: Codes, box: Box) -> bool:
    """Return whether a stored moment and a live one, of which this rank holds `box`, are both in the blocks of the
    whole tensor. The scheme is the same."""
    encoding = lazy.encoding_
    assert isinstance(encoding, LowBit)
    shape = tuple(lazy.shape)
    cuts_blocks = codes.segments is not None or codes.start is not None
    is_whole = cuts_blocks or _is_whole(shape, box, codes.block_size)
    return is_whole and _has_whole_blocks(encoding, shape)


@lru_cache(maxsize=1024)
def _has_whole_blocks(encoding: LowBit, shape: tuple[int, ...]) -> bool:
    """Return whether a moment is stored in blocks of the whole tensor."""
    return all(
        cell.quantized and (encoding.whole or _is_whole(shape, cell.box, encoding.block_size))
        for cell in encoding.cells
    )


def _is_whole(shape: tuple[int, ...], box: Box, block: int) -> bool:
    """Return whether a box is whole blocks of the tensor, each in one run of its elements."""
    return not box.numel % block and segments_of(shape, box, block).are_whole


def copy(reader: TensorReader, lazy: LazyTensor, codes: Codes, box: Box) -> None:
    """Fill live codes and scales of `box` with the stored ones, which `fit`."""
    shape, block = tuple(lazy.shape), codes.block_size
    encoding = lazy.encoding_
    assert isinstance(encoding, LowBit)
    span = codes.span
    region = box if span is None else _rows(shape, span)
    device = codes.codes.device
    found = _read_codes(reader, lazy, encoding, region, device).view(-1)
    first, last = block_range(shape, region, block)
    scale = _read_scales(reader, lazy, encoding, (first, last), device)
    if span is not None:
        found = found[span[0] - flat_span(shape, region)[0] :][: span[1] - span[0]]
        scale = scale[span[0] // block - first :][: -(-span[1] // block) - span[0] // block]
    elif codes.segments is None:
        scale = scale[segments_of(shape, region, block).blocks.to(device)]
    codes.scale.copy_(scale)
    _fill(codes, found, encoding.kind.packed)


def _rows(shape: tuple[int, ...], span: tuple[int, int]) -> Box:
    """Return the rows in which a span of flat positions lies."""
    row = math.prod(shape[1:])
    first, last = span[0] // row, -(-span[1] // row)
    return Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))


def _fill(codes: Codes, found: torch.Tensor, packed: int) -> None:
    import torch

    target = codes.codes.view(-1).view(torch.uint8)
    if packed == 1:
        target.copy_(found)
        return
    filled = found.new_zeros(target.numel() * packed)
    filled[: found.numel()] = found
    lowbit_codes.pack(filled, target)


def encode(codes: Codes, values: torch.Tensor, peaks: torch.Tensor) -> None:
    """Quantize values f32 of a shard into live codes of blocks that it cuts, by the largest magnitude of each of
    these blocks, as torchao does."""
    import torch

    assert codes.segments is not None
    scale = peaks.clip(LEAST)
    if codes.qmap is None:
        scale = divide(scale, torch.finfo(codes.codes.dtype).max)
    codes.scale.copy_(scale)
    lowbit_codes.encode_each(values, codes.segments.of_each(scale), codes.qmap, codes.codes)


# ------------------------------------------------------------------------------- stored cells


def _cells(encoding: LowBit, shape: tuple[int, ...]) -> Iterator[tuple[Box, int, int]]:
    """Yield the box of each cell, and where its codes and its scales begin."""
    if not encoding.cells:
        yield Box.whole(shape), 0, 0
    for number, cell in enumerate(encoding.cells):
        place = encoding.place(number)
        yield cell.box, place[CODES].offsets[0], place[SCALE].offsets[0]


def _read_codes(
    reader: TensorReader, lazy: LazyTensor, encoding: LowBit, region: Box, device: torch.device
) -> torch.Tensor:
    """Return the codes of a region, one to an element, as u8 [region.sizes]."""
    import torch

    codes = torch.empty(region.sizes, dtype=torch.uint8, device=device)
    packed = encoding.kind.packed
    for box, base, _ in _cells(encoding, tuple(lazy.shape)):
        common = box.intersect(region)
        if common is None:
            continue
        around = math.prod(box.sizes[1:]) // math.prod(common.sizes[1:])
        for piece in row_major_boxes(common, reader.max_memory // (4 * max(1, around))):
            start, stop = flat_span(box.sizes, piece.relative_to(box.offsets))
            low, high = start // packed, -(-stop // packed)
            stored = reader.part(lazy, CODES, Box((base + low,), (high - low,)), device)
            flat = lowbit_codes.unpack(stored.view(torch.uint8), packed)[start - low * packed :]
            found = flat.as_strided(piece.sizes, contiguous_strides(box.sizes, 1))
            window(codes, piece.relative_to(region.offsets)).copy_(found)
    return codes


def _read_scales(
    reader: TensorReader, lazy: LazyTensor, encoding: LowBit, blocks: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """Return the scales of blocks from one number to another, those that the region does not touch too."""
    import torch

    first, last = blocks
    shape, block = tuple(lazy.shape), encoding.block_size
    scale = torch.zeros(last - first, dtype=torch.float32, device=device)
    for box, _, base in _cells(encoding, shape):
        begins, ends = block_range(shape, box, block)
        low, high = max(first, begins), min(last, ends)
        if low >= high:
            continue
        if encoding.whole or not encoding.cells:
            stored = Box((base + low - begins,), (high - low,))
            scale[low - first : high - first] = reader.part(lazy, SCALE, stored, device)
            continue
        numbers = segments_of(shape, box, block).blocks.to(device) + begins - first
        held = reader.part(lazy, SCALE, Box((base,), (len(numbers),)), device)
        inside = (numbers >= 0) & (numbers < len(scale))
        scale[numbers[inside]] = held[inside]
    return scale
