"""Blocks of quantized moments: where a live moment's blocks lie in a stored one, and values made into codes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptmap.core.strided_dims import flat_span
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.optimizer import whole_blocks
from ckptmap.live.optimizer.family import Codes, Moment, local_of
from ckptmap.optim import lowbit_codes
from ckptmap.optim.lowbit import CODES, QMAP, SCALE, LowBit
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

Boxes = Sequence[tuple[Box, Box]]
"""(box of the whole tensor, the same box in the local one) of what this rank holds."""


def takes_codes(lazy: LazyTensor, codes: Codes, boxes: Boxes) -> bool:
    """Return whether the stored codes and scales of this rank's blocks can be copied."""
    return _is_alike(lazy, codes, boxes) and (
        _places(lazy, codes, boxes) is not None or whole_blocks.fit(lazy, codes, boxes[0][0])
    )


def copy_codes(reader: TensorReader, lazy: LazyTensor, codes: Codes, boxes: Boxes) -> bool:
    """Copy codes and scales where scheme, table and block boundaries agree; return whether."""
    import torch

    if not takes_codes(lazy, codes, boxes):
        return False
    device = codes.codes.device
    if QMAP in lazy.parts and codes.qmap is not None:
        table = reader.part(lazy, QMAP, Box.whole(lazy.parts[QMAP].info.shape), device)
        if not torch.equal(table, codes.qmap):
            return False
    places = _places(lazy, codes, boxes)
    if places is None:
        whole_blocks.copy(reader, lazy, codes, boxes[0][0])
        return True
    for part, live in ((CODES, codes.codes), (SCALE, codes.scale)):
        live.view(-1).copy_(reader.part(lazy, part, places[part], device))
    return True


def _is_alike(lazy: LazyTensor, codes: Codes, boxes: Boxes) -> bool:
    """Return whether the stored moment has the scheme, block size and sign of a live one in one box."""
    encoding = lazy.encoding_
    return (
        isinstance(encoding, LowBit)
        and len(boxes) == 1
        and (encoding.name, encoding.block_size, encoding.signed)
        == (codes.scheme, codes.block_size, codes.signed)
    )


def _places(lazy: LazyTensor, codes: Codes, boxes: Boxes) -> Mapping[str, Box] | None:
    """Return the boxes of stored codes and scales of just this rank's blocks; None: they are no such run."""
    encoding = lazy.encoding_
    assert isinstance(encoding, LowBit)
    if codes.segments is not None or encoding.whole:
        return None
    if codes.span is not None:
        return None if encoding.cells else encoding.run(*codes.span)
    box = boxes[0][0]
    for number, cell in enumerate(encoding.cells):
        if cell.quantized and cell.box.intersect(box) == box:
            inside = _whole_blocks(cell.box.sizes, box.relative_to(cell.box.offsets), encoding)
            base = encoding.place(number)
            return inside and {
                part: Box((base[part].offsets[0] + run.offsets[0],), run.sizes)
                for part, run in inside.items()
            }
    return None if encoding.cells else _whole_blocks(lazy.shape, box, encoding)


def _whole_blocks(shape: Sequence[int], box: Box, encoding: LowBit) -> Mapping[str, Box] | None:
    """Return the boxes of codes and scales of a box that is a run of whole blocks; None: it is not."""
    start, stop = flat_span(shape, box)
    block = encoding.block_size
    whole = stop % block == 0 or stop == math.prod(shape)
    if stop - start != box.numel or start % block or not whole:
        return None
    return encoding.run(start, stop)


def values_of_span(
    reader: TensorReader, lazy: LazyTensor, span: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Return the decoded values between two flat positions of a stored tensor, float32."""
    import torch

    row = math.prod(lazy.shape[1:])
    first, last = span[0] // row, -(-span[1] // row)
    box = Box((first, *(0 for _ in lazy.shape[1:])), (last - first, *lazy.shape[1:]))
    values = torch.zeros(box.sizes, dtype=torch.float32, device=device)
    with reader.meter.hold(values.nbytes, values.device):
        reader.decoded(lazy, box, values)
    return values.view(-1)[span[0] - first * row : span[1] - first * row]


def encode(live: Moment, codes: Codes, values: torch.Tensor) -> None:
    """Quantize float32 values into live codes."""
    import torch

    if codes.encoder is not None:
        codes.encoder(codes, values)
        return
    on_device = values.to(codes.codes.device)
    if not lowbit_codes.encode(on_device, codes.block_size, codes.qmap, codes.codes, codes.scale):
        assert isinstance(live, torch.Tensor), "Codes without a tensor bring their own encoder"
        held: Any = local_of(live)
        (held if codes.span is None else held.blocks).copy_(values)


def encode_cut(
    reader: TensorReader, lazy: LazyTensor, codes: Codes, values: torch.Tensor, factor: float = 1.0
) -> None:
    """Quantize float32 values into live codes of blocks that the shard cuts: the rest of these blocks is read, for
    their scales. `factor` is what values were multiplied by after they were read."""
    import torch

    segments = codes.segments
    assert segments is not None
    piece = max(1, reader.max_memory // (16 * segments.block))
    peaks = torch.zeros_like(codes.scale)
    for at in range(0, segments.count, piece):
        count = min(piece, segments.count - at)
        span = tuple((segments.first + n) * segments.block for n in (at, at + count))
        blocks = values_of_span(reader, lazy, (span[0], span[1]), peaks.device)
        torch.amax(blocks.view(-1, segments.block).abs_(), 1, out=peaks.narrow(0, at, count))
    whole_blocks.encode(codes, values.to(codes.codes.device), peaks.mul_(factor))


def relative_error(values: torch.Tensor, approximation: torch.Tensor) -> float:
    """Return the root mean square of the difference, divided by that of the values."""
    norm = values.norm()
    return float((approximation - values).norm() / norm) if float(norm) else 0.0
