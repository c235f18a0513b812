"""Join the shards that ranks hold of a pickled torchao tensor: codes by their boxes, scales by their grid.

    N x Int8QuantizedTrainingLinearWeight [rows/N, in]  ->  codes i8 [rows, in], scale [rows, 1]

Each shard must begin and end at blocks. A box that several ranks hold is a replica, which the run compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptmap.quantization.blockwise import block_geometry
from ckptmap.quantization.blockwise.group_checks import malformed
from ckptmap.quantization.torchao.subclass_reader import TorchaoParts, unpack
from ckptmap.tensors import Box, Chunk, Cut, Region, StoredTensor, TensorInfo

Placed = Sequence[tuple[Box, StoredTensor]]


def unpack_cut(fqn: str, cut: Cut) -> TorchaoParts:
    """Return the joined parts. Raises SourceError CKM115 where shards differ in kind or split a block."""
    pieces = [(box, unpack(fqn, leaf)) for box, leaf in cut.pieces]
    first = pieces[0][1]
    block = _block(fqn, cut.info, pieces)
    for box, piece in pieces:
        same = (piece.kind, piece.info.dtype, piece.attributes, sorted(piece.extra)) == (
            first.kind, first.info.dtype, first.attributes, sorted(first.extra),
        )  # fmt: skip
        if (
            not same
            or piece.info.shape != box.sizes
            or (piece.zero is None) != (first.zero is None)
        ):
            raise malformed(
                fqn, f"its ranks hold different tensors, {first.kind} {first.info} and "
                f"{piece.kind} {piece.info}", "these ranks are not from one save",
            )  # fmt: skip
    info = TensorInfo(cut.info.shape, first.info.dtype)
    grid = block_geometry.grid_shape(info.shape, block)
    on_grid = [(block_geometry.grid_box(box, block), piece) for box, piece in pieces]
    codes = joined(info.shape, [(box, piece.codes) for box, piece in pieces])
    scale = joined(grid, [(box, piece.scale) for box, piece in on_grid])
    zeros = [(box, piece.zero) for box, piece in on_grid if piece.zero is not None]
    zero = joined(grid, zeros) if zeros else None
    return replace(first, info=info, block=block, codes=codes, scale=scale, zero=zero)


def _block(
    fqn: str, info: TensorInfo, pieces: Sequence[tuple[Box, TorchaoParts]]
) -> tuple[int, ...]:
    """Return the block sizes of the whole tensor. Raises SourceError CKM115 where a shard splits a block."""
    block = []
    for dim, size in enumerate(info.shape):
        own = max(piece.block[dim] for _, piece in pieces)
        cut_here = any(box.sizes[dim] != size for box, _ in pieces)
        bad = cut_here and any(
            box.offsets[dim] % own or (box.offsets[dim] + box.sizes[dim] < size and box.sizes[dim] % own)
            for box, _ in pieces
        )  # fmt: skip
        if bad:
            raise malformed(
                fqn, f"its pieces cut blocks of {own} along dim {dim}: their scales are of parts",
                "save it as a full state dict",
            )  # fmt: skip
        block.append(own)
    return tuple(block)


def joined(shape: Sequence[int], pieces: Placed) -> StoredTensor:
    """Return one tensor whose pieces lie at their boxes; a repeated box is a replica."""
    first: dict[Box, StoredTensor] = {}
    again = []
    for box, part in pieces:
        if first.setdefault(box, part) is not part:
            again.append((box, part))
    info = TensorInfo(tuple(shape), pieces[0][1].info.dtype)
    return StoredTensor(
        info,
        lambda: [chunk for box, part in first.items() for chunk in _moved(box, part)],
        [chunk for box, part in again for chunk in _moved(box, part)],
    )


def _moved(box: Box, part: StoredTensor) -> list[Chunk]:
    made = []
    for chunk in part.chunks:
        offsets = tuple(a + b for a, b in zip(box.offsets, chunk.box.offsets, strict=True))
        region: Region = chunk.region
        made.append(Chunk(Box(offsets, chunk.box.sizes), region, chunk.crc32))
    return made
