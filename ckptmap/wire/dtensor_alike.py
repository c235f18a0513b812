"""DTensors of ranks whose files are alike: joined by what differs, a coordinate and a place.

    N x DTensor{local [rows / N, cols] at coordinate c} -> the boxes of one tiling for its shape

What is irregular in any way is left to the general join, which says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

from ckptmap.errors import SourceError
from ckptmap.tensors import ITEMSIZE, Box, Chunk, Opaque, Region, StoredTensor
from ckptmap.wire.placement import (
    Cutting,
    Placed,
    geometry_of,
    is_dtensor,
    read_mesh,
    read_placed,
)
from ckptmap.wire.rank_trees import Parsed, RankSet, RankValues
from ckptmap.wire.torch_zip_read import ReadTensor

Parts: TypeAlias = Sequence[tuple[int, Box]]


class _Kind(NamedTuple):
    """The ranks of one parsed tree: one of them read in full, the mesh and the local tensor of the
    parsed tree, which all of them fill in."""

    placed: Placed
    mesh: Opaque
    local: ReadTensor


class _Tiling(NamedTuple):
    """Which rank holds which box: those that are kept, those that repeat one; and the shapes that
    the ranks of each kind must hold."""

    kept: tuple[tuple[int, Box], ...]
    repeated: tuple[tuple[int, Box], ...]
    sizes: tuple[set[tuple[int, ...]], ...]


def joined_alike(values: RankValues, key: str) -> StoredTensor | None:
    """None: not all of them are DTensors of plain tensors that fit together regularly."""
    ranks, kinds = values.ranks, []
    for parsed, members in ranks.kinds:
        kind = _kind(values, parsed, members[0], key)
        if kind is None:
            return None
        kinds.append(kind)
    info, mesh_ranks, mesh, _, cuts, _, _ = kinds[0].placed
    if any((kind.placed.info, kind.placed.cuts) != (info, cuts) for kind in kinds):
        return None
    coordinates = _coordinates(ranks, tuple([kind.mesh for kind in kinds]), mesh_ranks, mesh)
    if coordinates is None:
        return None
    tiling = _tiling(info.shape, mesh, coordinates, cuts, ranks.kind_of)
    if tiling is None:
        return None
    for kind, sizes in zip(kinds, tiling.sizes, strict=True):
        if sizes != {kind.local.info.shape} or kind.local.info.dtype != info.dtype:
            return None
    locals_ = tuple([kind.local for kind in kinds])
    return StoredTensor(
        info,
        partial(_chunks, ranks, locals_, tiling.kept),
        _chunks(ranks, locals_, tiling.repeated),
        share=(ranks, tiling.kept, *((t.key, t.start, t.grid.steps) for t in locals_)),
    )


def _kind(values: RankValues, parsed: Parsed, rank: int, key: str) -> _Kind | None:
    """Reads one rank in full: the others differ in their meshes, or not at all in what is read."""
    leaf = parsed.leaves.get(values.path)
    if not is_dtensor(leaf):
        return None
    local, spec = _state(leaf).get("_local_tensor"), _state(_state(leaf).get("_spec"))
    said = (spec.get("placements"), spec.get("shard_order"))
    if not isinstance(local, ReadTensor) or any(id(value) in parsed.varying for value in said):
        return None
    try:
        return _Kind(read_placed(values[rank], key), spec["mesh"], local)
    except SourceError:
        return None


def _state(value: Any) -> Mapping[Any, Any]:
    return value.state if isinstance(value, Opaque) and isinstance(value.state, dict) else {}


def _coordinates(
    ranks: RankSet, meshes: tuple[Opaque, ...], mesh_ranks: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], ...] | None:
    """Of all ranks; None where their meshes are not one of `mesh_ranks` and `shape`. Worked out
    once for the DTensors that share a mesh."""
    if meshes not in ranks.meshes:
        try:
            ranks.meshes[meshes] = [
                read_mesh(tree.filled(meshes[kind]), "mesh")
                for tree, kind in zip(ranks.trees, ranks.kind_of, strict=True)
            ]
        except SourceError:
            return None
    found = ranks.meshes[meshes]
    if any(theirs is not mesh_ranks or sizes != shape for theirs, sizes, _ in found):
        return None
    return tuple([coordinate for _, _, coordinate in found])


@lru_cache(maxsize=64)
def _tiling(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinates: tuple[tuple[int, ...], ...],
    cuts: tuple[Cutting, ...],
    kind_of: tuple[int, ...],
) -> _Tiling | None:
    """Worked out once for the tensors of one shape; None where it is no tiling by single boxes."""
    kept: dict[Box, int] = {}
    repeated = []
    sizes: dict[int, set[tuple[int, ...]]] = {}
    for rank, (coordinate, kind) in enumerate(zip(coordinates, kind_of, strict=True)):
        geometry = geometry_of(shape, mesh, coordinate, cuts)
        if len(geometry.pieces) != 1 or not geometry.is_as_fsdp_cuts:
            return None
        sizes.setdefault(kind, set()).add(geometry.sizes)
        box = geometry.pieces[0][0]
        if box.numel and kept.setdefault(box, rank) != rank:
            repeated.append((rank, box))
    # The boxes of different coordinates are disjoint, so what they hold in all tells.
    if not kept or sum(box.numel for box in kept) != prod(shape):
        return None
    boxes = tuple([(rank, box) for box, rank in kept.items()])
    return _Tiling(boxes, tuple(repeated), tuple([sizes[kind] for kind in sorted(sizes)]))


def _chunks(ranks: RankSet, locals_: Sequence[ReadTensor], parts: Parts) -> list[Chunk]:
    chunks = []
    for rank, box in parts:
        tree, local = ranks.trees[rank], locals_[ranks.kind_of[rank]]
        info, steps, _, view_nbytes, is_contiguous = local.grid
        offset, nbytes, crc32 = tree.located[local.key]
        region = Region(
            tree.records.file, offset + local.start, info.shape, steps, ITEMSIZE[info.dtype]
        )
        whole = is_contiguous and view_nbytes == nbytes
        chunks.append(Chunk(box, region, crc32 if whole else None))
    return chunks
