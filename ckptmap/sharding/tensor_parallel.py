"""Join plain tensors that tensor parallelism cut, one part a rank, to the whole tensor.

    N x [rows / N, cols], along 0               -> [rows, cols]
    N x [gate / N; up / N], along 0, 2 sections -> [gate; up]
    N x [head, cols], along 0, 2 copies         -> N/2 heads, each on two neighbouring ranks
    N x [cols], along None                      -> [cols]

A part that several ranks hold is kept once; the others are replicas, which the run compares with it.
Sections are cut one by one, as Megatron-LM cuts a fused gate and up projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ckptmap.errors import SourceError
from ckptmap.sharding.dtensor_spec import chunks_in_whole
from ckptmap.tensors import Box, Chunk, StoredTensor, TensorInfo


class Partition(NamedTuple):
    """How a tensor is cut.

    dim       the dim that is cut; None: every rank holds the whole tensor
    sections  how many equal sections are each cut over the ranks
    copies    how many neighbouring ranks hold each part
    """

    dim: int | None
    sections: int = 1
    copies: int = 1


WHOLE = Partition(None)


class _Piece(NamedTuple):
    """A box of the whole tensor, and the part of a rank's tensor that fills it (None: all of it)."""

    box: Box
    part: StoredTensor
    within: Box | None

    def chunks(self) -> list[Chunk]:
        return chunks_in_whole(self.box, self.part, self.within)


def join_parts(parts: Sequence[StoredTensor], cut: Partition, key: str, hint: str) -> StoredTensor:
    """Return the tensor that the parts make, which are in rank order.

    Raises SourceError CKM113 if the parts differ in shape or dtype, CKM112 if `cut` does not fit
    them; `hint` is the next step that the error gives.
    """
    info = whole_info(parts, cut, key, hint)
    pieces = _pieces(parts, cut, info)
    first_of_box: dict[Box, _Piece] = {}
    replicas: list[Chunk] = []
    for piece in pieces:
        if first_of_box.setdefault(piece.box, piece) is not piece:
            replicas += piece.chunks()
    return StoredTensor(
        info,
        lambda: [chunk for piece in first_of_box.values() for chunk in piece.chunks()],
        replicas,
    )


def whole_info(parts: Sequence[StoredTensor], cut: Partition, key: str, hint: str) -> TensorInfo:
    """Return shape and dtype of the whole tensor; raises as `join_parts` does."""
    part = parts[0].info
    for rank, other in enumerate(parts):
        if other.info != part:
            raise SourceError(
                "CKM113",
                f"{key}: rank 0 holds {part}, rank {rank} {other.info}, expected the same of all",
                hint,
            )
    if cut.dim is None:
        return part
    extent = part.shape[cut.dim] if cut.dim < len(part.shape) else None
    if extent is None or extent % cut.sections or len(parts) % cut.copies:
        raise SourceError(
            "CKM112",
            f"{key}: {len(parts)} ranks hold {part} each, expected a dim {cut.dim} of"
            f" {cut.sections} equal sections, on {cut.copies} ranks each",
            hint,
        )
    shape = list(part.shape)
    shape[cut.dim] = extent * len(parts) // cut.copies
    return TensorInfo(tuple(shape), part.dtype)


def _pieces(parts: Sequence[StoredTensor], cut: Partition, info: TensorInfo) -> list[_Piece]:
    """Return the boxes of the whole tensor, rank by rank."""
    if cut.dim is None:
        return [_Piece(Box.whole(info.shape), part, None) for part in parts]
    dim, own = cut.dim, parts[0].info.shape
    length = own[dim] // cut.sections
    stride = info.shape[dim] // cut.sections
    sizes = (*own[:dim], length, *own[dim + 1 :])
    pieces = []
    for rank, part in enumerate(parts):
        for section in range(cut.sections):
            start = section * stride + rank // cut.copies * length
            box = Box(_along(dim, start, len(own)), sizes)
            within = Box(_along(dim, section * length, len(own)), sizes)
            pieces.append(_Piece(box, part, within if cut.sections > 1 else None))
    return pieces


def _along(dim: int, start: int, ndim: int) -> tuple[int, ...]:
    return tuple(start if d == dim else 0 for d in range(ndim))


def unstack(stored: StoredTensor) -> list[StoredTensor]:
    """Return a tensor for each index of the first dim, [n, ...] -> n x [...]; no byte is moved."""
    if not stored.info.shape:
        return [stored]
    info = TensorInfo(stored.info.shape[1:], stored.info.dtype)
    return [StoredTensor(info, partial(_slice, stored, at)) for at in range(stored.info.shape[0])]


def _slice(stored: StoredTensor, at: int) -> list[Chunk]:
    shape = stored.info.shape
    box = Box((at, *(0 for _ in shape[1:])), (1, *shape[1:]))
    return [
        Chunk(
            Box(whole_box.offsets[1:], whole_box.sizes[1:]),
            region._replace(sizes=region.sizes[1:], strides=region.strides[1:]),
        )
        for whole_box, region in stored.pieces(box)
    ]
