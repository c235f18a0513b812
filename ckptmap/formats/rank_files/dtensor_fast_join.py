"""Join the DTensors of many ranks quickly, if their pickles differ in mesh coordinates only.

    N x DTensor{local [rows / N, cols] at coordinate c} -> [rows, cols], one box per rank

Pickles are alike if they hold the same opcodes and differ in constants only (see `rank_trees`). Of
the DTensors in alike pickles, one is read in full. The boxes are computed once for all tensors of one
shape. An irregular tensor goes to the general join of `dtensor_layout`, which reports the fault.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple, TypeAlias

from ckptmap.core.row_chunks import RowChunks
from ckptmap.errors import SourceError
from ckptmap.formats.rank_files.rank_trees import Parsed, RankSet, RankTree, RankValues
from ckptmap.formats.torch_save.reader import ReadTensor
from ckptmap.sharding.dtensor_spec import (
    Cutting,
    Placed,
    geometry_of,
    is_dtensor,
    read_placed,
)
from ckptmap.sharding.pickled_mesh import attributes, read_mesh
from ckptmap.tensors import Box, Chunk, Opaque, Region, StoredTensor, TensorInfo

Parts: TypeAlias = Sequence[tuple[int, Box]]


class _Kind(NamedTuple):
    """The ranks whose pickles are alike.

    placed   the DTensor of one of the ranks
    mesh     the mesh object of the parsed tree, in which each rank fills its constants
    local    the local tensor of the parsed tree, which each rank has in its own file
    """

    placed: Placed
    mesh: Opaque
    local: ReadTensor


class _Tiling(NamedTuple):
    """Which rank holds which box of a tensor.

    first      (rank, box) of the first rank that holds each box
    repeated   (rank, box) of the others: replicas
    sizes      for each kind of ranks, the shapes that their local tensors must have
    """

    first: tuple[tuple[int, Box], ...]
    repeated: tuple[tuple[int, Box], ...]
    sizes: tuple[set[tuple[int, ...]], ...]
    bounds: tuple[int, ...]
    """First row of each box of `first`, and the number of rows at the end. Empty unless every box holds
    whole rows and follows the box before it."""


def join_regular(values: RankValues, key: str) -> StoredTensor | None:
    """Return the whole tensor; None if a value is not a DTensor of a plain tensor, or if the cut is
    irregular. Then the general join decides."""
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
    by_rows = tiling.bounds and all(local.grid.is_contiguous for local in locals_)
    place = _PlacedBoxes(ranks, locals_, tiling.first)
    return StoredTensor(
        info,
        partial(_rows, info, place, tiling.bounds) if by_rows else place.chunks,
        _PlacedBoxes(ranks, locals_, tiling.repeated).chunks(),
        share=(ranks, tiling.first, *((t.key, t.start, t.grid.steps) for t in locals_)),
    )


def _kind(values: RankValues, parsed: Parsed, rank: int, key: str) -> _Kind | None:
    """Return one DTensor that stands for all ranks of `parsed`; None if they differ in more than the
    mesh and the place of the local tensor."""
    leaf = parsed.leaves.get(values.path)
    if not is_dtensor(leaf):
        return None
    local, spec = attributes(leaf).get("_local_tensor"), attributes(attributes(leaf).get("_spec"))
    cut = (spec.get("placements"), spec.get("shard_order"))
    mesh = spec.get("mesh")
    if not isinstance(local, ReadTensor) or not isinstance(mesh, Opaque):
        return None
    if any(id(value) in parsed.varying for value in cut):
        return None
    value = values[rank]
    if not is_dtensor(value):
        return None
    try:
        return _Kind(read_placed(value, key), mesh, local)
    except SourceError:
        return None


def _coordinates(
    ranks: RankSet, meshes: tuple[Opaque, ...], mesh_ranks: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], ...] | None:
    """Return the mesh coordinate of each rank; None if their meshes are not all of `mesh_ranks` and
    `shape`. The meshes are read once for all DTensors that share them."""
    if meshes not in ranks.meshes:
        try:
            ranks.meshes[meshes] = [
                read_mesh(tree.filled(meshes[kind]), "mesh")
                for tree, kind in zip(ranks.trees, ranks.kind_of, strict=True)
            ]
        except SourceError:
            return None
    read = ranks.meshes[meshes]
    if any(theirs is not mesh_ranks or sizes != shape for theirs, sizes, *_ in read):
        return None
    return tuple([coordinate for _, _, coordinate, _ in read])


@lru_cache(maxsize=64)
def _tiling(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinates: tuple[tuple[int, ...], ...],
    cuts: tuple[Cutting, ...],
    kind_of: tuple[int, ...],
) -> _Tiling | None:
    """Return the boxes of all ranks; None if a rank holds several boxes, or if they do not tile `shape`.

    The result is cached for all tensors of one shape and placement.
    """
    first_rank: dict[Box, int] = {}
    repeated = []
    sizes: dict[int, set[tuple[int, ...]]] = {}
    for rank, (coordinate, kind) in enumerate(zip(coordinates, kind_of, strict=True)):
        geometry = geometry_of(shape, mesh, coordinate, cuts)
        if len(geometry.pieces) != 1 or not geometry.is_as_fsdp_cuts:
            return None
        sizes.setdefault(kind, set()).add(geometry.sizes)
        box = geometry.pieces[0][0]
        if box.numel and first_rank.setdefault(box, rank) != rank:
            repeated.append((rank, box))
    # The boxes of different coordinates are disjoint, so a count of elements proves the tiling.
    if not first_rank or sum(box.numel for box in first_rank) != prod(shape):
        return None
    boxes = tuple([(rank, box) for box, rank in first_rank.items()])
    kinds = tuple([sizes[kind] for kind in sorted(sizes)])
    return _Tiling(boxes, tuple(repeated), kinds, _bounds(list(first_rank), shape))


def _bounds(boxes: Sequence[Box], shape: tuple[int, ...]) -> tuple[int, ...]:
    bounds = [0]
    for box in boxes:
        if not shape or box.offsets[0] != bounds[-1] or box.sizes[1:] != shape[1:]:
            return ()
        bounds.append(bounds[-1] + box.sizes[0])
    return tuple(bounds)


class _PlacedBoxes(NamedTuple):
    """The boxes of a tensor, the rank that holds each, and the local tensors that hold their bytes."""

    ranks: RankSet
    locals: Sequence[ReadTensor]
    parts: Parts

    def place(self, index: int) -> tuple[RankTree, ReadTensor]:
        """Return the tree of the rank that holds box `index`, and the local tensor with the box."""
        rank = self.parts[index][0]
        return self.ranks.trees[rank], self.locals[self.ranks.kind_of[rank]]

    def crc32(self, index: int) -> int | None:
        """Return the CRC-32 of the zip member if it holds exactly the bytes of this box, else None."""
        tree, local = self.place(index)
        name = f"data/{local.key}"
        whole = local.grid.is_contiguous and local.grid.nbytes == tree.records.nbytes(name)
        return tree.records.crc32(name) if whole else None

    def chunks(self) -> list[Chunk]:
        """Return a chunk of the ranks' files for each box."""
        chunks = []
        for index, (_, box) in enumerate(self.parts):
            tree, local = self.place(index)
            info, at = local.info, tree.starts[local.key] + local.start
            region = Region(tree.records.file, at, info.shape, local.grid.steps, info.itemsize)
            chunks.append(Chunk(box, region, self.crc32(index)))
        return chunks


def _rows(info: TensorInfo, placed_boxes: _PlacedBoxes, bounds: tuple[int, ...]) -> RowChunks:
    places = [placed_boxes.place(index) for index in range(len(placed_boxes.parts))]
    return RowChunks(
        info,
        bounds,
        tuple([tree.records.file for tree, _ in places]),
        array("Q", [tree.starts[local.key] + local.start for tree, local in places]),
        placed_boxes.crc32,
    )
