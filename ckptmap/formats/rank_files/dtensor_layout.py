"""Join the DTensors that all ranks saved into whole tensors: Shard and Replicate, on meshes of any
number of dimensions.

    N x DTensor{local [ceil(rows / N), cols], Shard(0)} -> [rows, cols]

The mesh coordinate and the placements of a rank give the box that its local tensor fills. If several
ranks hold one box, the first copy is kept, and the conversion compares the others with it. A plain
tensor under the same key on all ranks is a replicated value: it is never concatenated. Source:
torch/distributed/tensor/placement_types.py (`Shard`, `_StridedShard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckptmap.core.formatting import counted
from ckptmap.errors import SourceError
from ckptmap.formats.rank_files.dtensor_fast_join import join_regular
from ckptmap.formats.rank_files.rank_trees import RankValues
from ckptmap.sharding.dtensor_spec import (
    Placed,
    chunks_in_whole,
    cut_rows,
    is_dtensor,
    read_placed,
    shares_no_rank,
)
from ckptmap.tensors import Box, Cut, Leaf, Opaque, StoredTensor, TensorInfo, as_inert

_ONE_SAVE = (
    "copy the files of one save into a directory of their own; plain 1-D slices of tensors cannot be"
    " joined, because the files do not hold the shapes"
)


class DTensorLayout:
    """Joins the local tensors of ranks. Cuts a tensor as FSDP2 does on a mesh of one dim."""

    name = "dtensor"

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """Return (rank, box) of each rank that holds rows. Rank 0 holds a scalar or an empty tensor."""
        return cut_rows(info, world_size)

    def join(self, values: Sequence[Leaf], key: str) -> StoredTensor | Cut | None:
        """Return the whole tensor; None if a value is no tensor, or the only value is no DTensor.

        Raise SourceError CKM110 if ranks are missing or their meshes differ, CKM112 if the local
        tensors do not tile the tensor, CKM113 if they differ in global shape, dtype or class.
        """
        if isinstance(values, RankValues):
            joined = join_regular(values, key)
            if joined is not None:
                return joined
        kinds = {_kind(value) for value in values if value is not None}
        if not kinds or "" in kinds or (len(values) == 1 and kinds != {"DTensor"}):
            return None
        if len(kinds) > 1:
            raise SourceError(
                "CKM113",
                f"{key}: expected values of one kind, found {' and '.join(sorted(kinds))} on different ranks",
                _ONE_SAVE,
            )
        if kinds == {"DTensor"}:
            placed = [(r, read_placed(v, key)) for r, v in enumerate(values) if is_dtensor(v)]
            return join_placed(placed, key)
        return _join_replicated(values, key)


def _kind(value: Leaf) -> str:
    """Return "DTensor", "plain tensor", or the class name of another tensor; "" for no tensor."""
    if is_dtensor(value):
        return "DTensor"
    if isinstance(value, StoredTensor):
        return "plain tensor"
    return value.class_name if isinstance(value, Opaque) and value.info is not None else ""


# --------------------------------------------------------------------------- replicated values


def _join_replicated(values: Sequence[Leaf], key: str) -> StoredTensor | Cut:
    tensors = {r: v for r, v in enumerate(values) if isinstance(v, StoredTensor | Opaque)}
    infos = [(rank, tensor.info) for rank, tensor in tensors.items() if tensor.info is not None]
    info = _one_info(infos, key)
    whole = Box.whole(info.shape)
    return _assemble(info, [LocalBox(whole, tensor, None) for tensor in tensors.values()], key)


def _one_info(infos: Iterable[tuple[int, TensorInfo]], key: str) -> TensorInfo:
    """Return the shape and dtype of the tensor. Raise SourceError CKM113 if the ranks' differ."""
    ranks: dict[TensorInfo, list[int]] = {}
    for rank, info in infos:
        ranks.setdefault(info, []).append(rank)
    if len(ranks) > 1:
        infos_text = "; ".join(
            f"{info} on rank {_first_ranks(ranks_of_info)}"
            for info, ranks_of_info in list(ranks.items())[:4]
        )
        raise SourceError("CKM113", f"{key}: ranks hold different tensors: {infos_text}", _ONE_SAVE)
    return next(iter(ranks))


def _first_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")


# --------------------------------------------------------------------------- parts


def join_placed(parts: Sequence[tuple[int, Placed]], key: str) -> StoredTensor | Cut:
    """Return the whole tensor of which each rank of `parts` holds a part. Raise SourceError as `join`."""
    info = _one_info([(rank, part.info) for rank, part in parts], key)
    _check_meshes(parts, key)
    pieces: list[LocalBox] = []
    for rank, part in parts:
        _check_local(rank, part, key)
        geometry = part.geometry
        if 0 not in geometry.sizes or not info.numel:
            pieces += [LocalBox(box, part.local, local) for box, local in geometry.pieces]
    for parts_on_mesh in _by_mesh(parts):
        _check_complete(
            info, parts_on_mesh, {box for _, part in parts_on_mesh for box in _boxes(part)}, key
        )
    return _assemble(info, pieces, key)


def _boxes(part: Placed) -> list[Box]:
    return [box for box, _ in part.geometry.pieces if box.numel or not part.info.numel]


def _by_mesh(parts: Sequence[tuple[int, Placed]]) -> Iterable[Sequence[tuple[int, Placed]]]:
    """Return the parts, grouped by mesh.

    The parts on each mesh must tile the whole tensor alone: half a tensor on one pipeline stage and
    half on another could be halves of two different tensors.
    """
    by_mesh: dict[tuple[int, ...], list[tuple[int, Placed]]] = {}
    for rank, part in parts:
        by_mesh.setdefault(part.ranks, []).append((rank, part))
    return by_mesh.values()


def _check_meshes(parts: Sequence[tuple[int, Placed]], key: str) -> None:
    """Raise SourceError CKM110 unless all meshes and placements have one form.

    The meshes of pipeline stages may differ if they share no rank."""
    first, meshes = parts[0][1], {parts[0][1].ranks: set(parts[0][1].ranks)}
    for rank, part in parts:
        if part.ranks not in meshes and shares_no_rank(part.ranks, meshes.values()):
            meshes[part.ranks] = set(part.ranks)
        if part.ranks not in meshes or (part.shape, part.cuts) != (first.shape, first.cuts):
            raise SourceError(
                "CKM110",
                f"{key}: rank {rank} was saved on a mesh of {list(part.shape)}, "
                f"rank {parts[0][0]} on {list(first.shape)}, or placed differently",
                _ONE_SAVE,
            )


def _check_local(rank: int, part: Placed, key: str) -> None:
    """Raise SourceError CKM112 if the local tensor has another shape, or other rows, than its mesh
    coordinate determines, CKM113 if its dtype is not that of its DTensor."""
    info, geometry = part.local.info, part.geometry
    sizes = geometry.sizes
    wrong_shape = info is None or (info.shape != sizes and (info.numel or 0 not in sizes))
    if wrong_shape or not geometry.is_as_fsdp_cuts:
        shape = list(info.shape) if info is not None else "no shape"
        at = [runs[0][0] for runs in geometry.runs]
        rows = "" if wrong_shape else ", in rows that FSDP does not assign to it"
        raise SourceError(
            "CKM112",
            f"{key}: rank {rank} holds {shape}, expected {list(sizes)} at {at} "
            f"of {list(part.info.shape)}{rows}",
            "torch saves wrong metadata for some uneven TP + FSDP shards; save a full state dict",
        )
    if isinstance(part.local, StoredTensor) and part.local.info.dtype != part.info.dtype:
        raise SourceError(
            "CKM113",
            f"{key}: rank {rank} holds {part.local.info.dtype}, but its DTensor states {part.info.dtype}",
            _ONE_SAVE,
        )


def _check_complete(
    info: TensorInfo, parts: Sequence[tuple[int, Placed]], boxes: set[Box], key: str
) -> None:
    """Raise SourceError CKM110 or CKM112 if the boxes do not tile the tensor. The boxes of
    different mesh coordinates are disjoint, so a count of elements proves it."""
    if sum(box.numel for box in boxes) == info.numel and (boxes or not info.numel):
        return
    world = len(parts[0][1].ranks)
    if len(parts) < world:
        raise SourceError(
            "CKM110",
            f"{key}: is cut over the {world} ranks of a mesh {list(parts[0][1].shape)}, found the "
            f"parts of {len(parts)}; {counted(world - len(parts), 'rank file', 'is', 'are')} missing",
            "open the directory that holds the files of all ranks",
        )
    raise SourceError(
        "CKM112",
        f"{key}: the ranks' parts hold {sum(box.numel for box in boxes)} elements of {info.numel}",
        _ONE_SAVE,
    )


class LocalBox(NamedTuple):
    """A box of the whole tensor, and the box of a rank's local tensor that fills it (None: all of it)."""

    box: Box
    local: StoredTensor | Opaque
    within: Box | None


def _assemble(info: TensorInfo, pieces: Sequence[LocalBox], key: str) -> StoredTensor | Cut:
    """Return the tensor that the pieces make. A later piece of the same box is a replica."""
    stored = [
        (box, local, within) for box, local, within in pieces if isinstance(local, StoredTensor)
    ]
    if len(stored) < len(pieces):
        return _cut(info, pieces, key)
    first: dict[Box, tuple[StoredTensor, Box | None]] = {}
    replicas = []
    for box, local, within in stored:
        if first.setdefault(box, (local, within))[0] is not local:
            replicas += chunks_in_whole(box, local, within)
    shares: list[tuple[object, Box | None]] = []
    for local, within in first.values():
        share = local.share
        if share is None:  # it cannot be told from another tensor, so the whole is tied to none
            shares = []
            break
        shares.append((share, within))
    return StoredTensor(
        info,
        lambda: [
            chunk
            for box, (local, within) in first.items()
            for chunk in chunks_in_whole(box, local, within)
        ],
        replicas,
        tuple(shares) or None,
    )


def _cut(info: TensorInfo, pieces: Sequence[LocalBox], key: str) -> Cut:
    for box, local, within in pieces:
        if within is not None and (local.info is None or within.sizes != local.info.shape):
            raise SourceError(
                "CKM112",
                f"{key}: expected a plain tensor where a rank's rows go to several places, as to"
                f" {list(box.offsets)}, found {as_inert(local).class_name}",
                "save a full state dict",
            )
    return Cut(info, tuple((box, as_inert(local)) for box, local, _ in pieces))
