"""DTensors, one part a rank: Shard and Replicate on a mesh of any number of dims.

    N x DTensor{local [ceil(rows / N), cols], Shard(0)} -> [rows, cols]

A rank's part fills the box that its mesh coordinate and placements say; a box that several ranks
hold is kept once, the others are replicas to be compared in the run. Plain tensors among the ranks
are replicated values: one is kept, and they are never concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptmap.errors import SourceError
from ckptmap.tensors import Box, Chunk, Cut, Leaf, Opaque, StoredTensor, TensorInfo
from ckptmap.wire.placement import Placed, cut_rows, is_dtensor, read_placed

_ONE_SAVE = "these files are not of one save, or hold 1-D pieces whose shapes are not in them"


class DTensorLayout:
    """Joins what ranks hold of a tensor; cuts as FSDP2 does on a 1-D mesh."""

    name = "dtensor"

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """One box for each rank that holds rows. A scalar, or an empty tensor, is rank 0's."""
        return cut_rows(info, world_size)

    def join(self, values: Sequence[Leaf], key: str) -> StoredTensor | Cut | None:
        """None where the values are not tensors of ranks.

        Raises SourceError CKM110 where ranks are missing, CKM112 where parts do not fill the
        tensor, CKM113 where the ranks' tensors differ in shape, dtype or kind.
        """
        kinds = {_kind(value) for value in values if value is not None}
        if not kinds or "" in kinds or (len(values) == 1 and kinds != {"DTensor"}):
            return None
        if len(kinds) > 1:
            raise SourceError(
                "CKM113",
                f"{key}: {' and '.join(sorted(kinds))} on different ranks, expected one kind",
                _ONE_SAVE,
            )
        if kinds == {"DTensor"}:
            return _join_parts([(r, read_placed(v, key)) for r, v in _present(values)], key)
        return _join_replicated(_present(values), key)


def _present(values: Sequence[Leaf]) -> list[tuple[int, Leaf]]:
    """(rank, value) of the ranks that hold one."""
    return [(rank, value) for rank, value in enumerate(values) if value is not None]


def _kind(value: Leaf) -> str:
    """ "DTensor", "plain tensor", the class of another tensor; empty: no tensor."""
    if is_dtensor(value):
        return "DTensor"
    if isinstance(value, StoredTensor):
        return "plain tensor"
    return value.class_name if isinstance(value, Opaque) and value.info is not None else ""


# --------------------------------------------------------------------------- replicated values


def _join_replicated(values: Sequence[tuple[int, Leaf]], key: str) -> StoredTensor | Cut:
    info = _one_info([(rank, value.info) for rank, value in values], key)
    locals_ = [value for _, value in values]
    return _assemble(info, [(Box.whole(info.shape), local) for local in locals_])


def _one_info(infos: Iterable[tuple[int, TensorInfo]], key: str) -> TensorInfo:
    """The info that all ranks agree on."""
    ranks: dict[TensorInfo, list[int]] = {}
    for rank, info in infos:
        ranks.setdefault(info, []).append(rank)
    if len(ranks) > 1:
        found = "; ".join(f"{info} on rank {_some(held)}" for info, held in list(ranks.items())[:4])
        raise SourceError("CKM113", f"{key}: ranks hold different tensors: {found}", _ONE_SAVE)
    return next(iter(ranks))


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")


# --------------------------------------------------------------------------- parts


def _join_parts(parts: Sequence[tuple[int, Placed]], key: str) -> StoredTensor | Cut:
    info = _one_info([(rank, part.info) for rank, part in parts], key)
    _check_meshes(parts, key)
    pieces = []
    for rank, part in parts:
        box = part.box
        if _check_local(rank, part, box, key):
            pieces.append((box, part.local))
    _check_complete(info, parts, {box for box, _ in pieces}, key)
    return _assemble(info, pieces)


def _check_meshes(parts: Sequence[tuple[int, Placed]], key: str) -> None:
    first = parts[0][1]
    for rank, part in parts:
        if (part.ranks, part.shape, part.cuts) != (first.ranks, first.shape, first.cuts):
            raise SourceError(
                "CKM110",
                f"{key}: rank {rank} was saved on a mesh of {list(part.shape)}, "
                f"rank {parts[0][0]} on {list(first.shape)}, or placed differently",
                _ONE_SAVE,
            )


def _check_local(rank: int, part: Placed, box: Box, key: str) -> bool:
    """Does the rank hold anything? Raises where that is not what its coordinate predicts."""
    info = part.local.info
    if info is None or (info.shape != box.sizes and (info.numel or box.numel)):
        found = list(info.shape) if info is not None else "no shape"
        raise SourceError(
            "CKM112",
            f"{key}: rank {rank} holds {found}, expected {list(box.sizes)} at {list(box.offsets)} "
            f"of {list(part.info.shape)}",
            "torch saves wrong metadata for some uneven TP + FSDP shards; save a full state dict",
        )
    if isinstance(part.local, StoredTensor) and info.dtype != part.info.dtype:
        raise SourceError(
            "CKM113",
            f"{key}: rank {rank} holds {info.dtype}, its DTensor says {part.info.dtype}",
            _ONE_SAVE,
        )
    return bool(box.numel) or not part.info.numel


def _check_complete(
    info: TensorInfo, parts: Sequence[tuple[int, Placed]], held: set[Box], key: str
) -> None:
    """The boxes of different coordinates are disjoint, so what they hold in all tells."""
    if sum(box.numel for box in held) == info.numel and (held or not info.numel):
        return
    world = len(parts[0][1].ranks)
    if len(parts) < world:
        raise SourceError(
            "CKM110",
            f"{key}: is cut over the {world} ranks of a mesh {list(parts[0][1].shape)}, found the "
            f"parts of {len(parts)}; {world - len(parts)} rank files are missing",
            "open the directory that holds the files of all ranks",
        )
    raise SourceError(
        "CKM112",
        f"{key}: the ranks' parts hold {sum(box.numel for box in held)} elements of {info.numel}",
        _ONE_SAVE,
    )


def _assemble(info: TensorInfo, pieces: Sequence[tuple[Box, Leaf]]) -> StoredTensor | Cut:
    """One tensor of pieces, of which those of the same box are replicas of the first."""
    if any(isinstance(local, Opaque) for _, local in pieces):
        return Cut(info, tuple(pieces))
    first: dict[Box, StoredTensor] = {}
    replicas = []
    for box, local in pieces:
        if first.setdefault(box, local) is not local:
            replicas += _moved(box, local)
    shares = tuple(local.share for local in first.values())
    return StoredTensor(
        info,
        lambda: [chunk for box, local in first.items() for chunk in _moved(box, local)],
        replicas,
        shares if None not in shares else None,
    )


def _moved(box: Box, local: StoredTensor) -> list[Chunk]:
    """A rank's chunks, in the coordinates of the whole tensor."""
    return [
        Chunk(
            Box(
                tuple(o + c for o, c in zip(box.offsets, chunk.box.offsets, strict=True)),
                chunk.box.sizes,
            ),
            chunk.region,
            chunk.crc32,
        )
        for chunk in local.chunks
    ]
