"""Read a pickled DTensor without torch: its mesh, its placements, the boxes of its local tensor.

`pickled_mesh` reads the mesh. Source: torch/distributed/tensor/_utils.py
(`compute_local_shape_and_global_offset`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias, TypeGuard

from ckptmap.errors import SourceError
from ckptmap.sharding.pickled_mesh import PickledMesh, attributes, ints, malformed, read_mesh
from ckptmap.tensors import Box, Chunk, Leaf, Opaque, StoredTensor, TensorInfo

MAX_SPLIT = 1 << 16
"""The largest split factor of a _StridedShard: the number of ranks in the mesh dims inside it."""


def chunk_of(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Return (start, length) of part `index` by the rule of torch.chunk: each part has
    ceil(numel / parts) elements; the last ones may have fewer, or none."""
    length = -(-numel // parts)
    start = min(index * length, numel)
    return start, min(length, numel - start)


def cut_rows(info: TensorInfo, world_size: int) -> list[tuple[int, Box]]:
    """Return (rank, box) of each rank that holds rows; rank 0 holds a scalar or an empty tensor.

    `[rows, ...] -> N x [ceil(rows / N), ...]`: the last ranks may hold fewer rows, or none.
    """
    if not info.shape or not info.numel:
        return [(0, Box.whole(info.shape))]
    boxes = []
    for rank in range(world_size):
        start, rows = chunk_of(info.shape[0], world_size, rank)
        if not rows:
            break
        offsets = (start, *(0 for _ in info.shape[1:]))
        boxes.append((rank, Box(offsets, (rows, *info.shape[1:]))))
    return boxes


def chunks_in_whole(box: Box, tensor: StoredTensor, within: Box | None = None) -> list[Chunk]:
    """Return the chunks of a rank's local tensor in the coordinates of the whole tensor.

    The part `within` of the local tensor (default: all of it) is `box` of the whole tensor."""
    local_chunks = tensor.chunks
    if (
        len(local_chunks) == 1
        and local_chunks[0].box.sizes == box.sizes
        and within in (None, local_chunks[0].box)
    ):
        return [
            Chunk(box, local_chunks[0].region, local_chunks[0].crc32)
        ]  # the common case, without a loop over chunks
    chunks = []
    for chunk in local_chunks:
        part = chunk.box if within is None else chunk.box.intersect(within)
        if part is None:
            continue
        start = part.offsets if within is None else part.relative_to(within.offsets).offsets
        whole = part is chunk.box or part == chunk.box
        chunks.append(
            Chunk(
                Box(tuple(o + c for o, c in zip(box.offsets, start, strict=True)), part.sizes),
                chunk.region if whole else chunk.region.crop(part.relative_to(chunk.box.offsets)),
                chunk.crc32 if whole else None,
            )
        )
    return chunks


class Cutting(NamedTuple):
    """One Shard placement: tensor dim `dim` is cut over mesh dim `axis`.

    With `split` above 1 it is a _StridedShard with this split factor.
    """

    dim: int
    axis: int
    split: int = 1


Runs: TypeAlias = tuple[tuple[int, int], ...]
"""(start, length) of each run of rows, in the order in which the rank holds them."""


class HeldBox(NamedTuple):
    """A box of the whole tensor, and the box of the rank's local tensor with its elements."""

    whole: Box
    local: Box


class Geometry(NamedTuple):
    """The part of a tensor that one rank holds.

    runs    the runs of rows along each tensor dim
    sizes   the shape that the local tensor must have; a size may be 0
    pieces  the boxes that the rank holds, mostly a single one
    is_as_fsdp_cuts  whether the rows of strided shards are those that FSDP2 really holds. It cuts
            the part that TP leaves, mesh dims from right to left, by torch.chunk; the placements
            describe the same rows only where the sizes divide evenly (pytorch#161368)
    """

    runs: tuple[Runs, ...]
    sizes: tuple[int, ...]
    pieces: tuple[HeldBox, ...]
    is_as_fsdp_cuts: bool


class Placed(NamedTuple):
    """One rank's part of a DTensor; a tuple, because there is one for each tensor and rank.

    info        shape and dtype of the whole tensor
    ranks       every rank of the whole mesh
    shape       the sizes of the mesh dims
    coordinate  the place of this rank in the mesh
    cuts        the Shard placements, in the order in which they are applied
    local       the local tensor: a StoredTensor, or an Opaque of a tensor subclass
    geometry    the part of the whole tensor that the rank holds
    """

    info: TensorInfo
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    cuts: tuple[Cutting, ...]
    local: StoredTensor | Opaque
    geometry: Geometry


@lru_cache(maxsize=1 << 14)
def geometry_of(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    cuts: tuple[Cutting, ...],
) -> Geometry:
    """Return the part that a rank holds; cached, because many tensors have one shape and cut.

    shape   of the whole tensor
    mesh    sizes of the mesh dims
    """

    def runs_of(dim: int, cuts: Sequence[Cutting]) -> Runs:
        runs: Runs = ((0, shape[dim]),)
        for cut in cuts:
            runs = cut_runs(runs, mesh[cut.axis], coordinate[cut.axis], cut.split)
        return runs

    runs, is_as_fsdp_cuts = [], True
    for dim in range(len(shape)):
        dim_cuts = [cut for cut in cuts if cut.dim == dim]
        runs.append(runs_of(dim, dim_cuts))
        strided = sorted((c for c in dim_cuts if c.split > 1), key=lambda c: -c.axis)
        plain = [cut for cut in dim_cuts if cut.split == 1]
        fsdp_cuts = [Cutting(dim, cut.axis) for cut in (*plain, *strided)]
        is_as_fsdp_cuts = is_as_fsdp_cuts and (
            not strided or _without_empty(runs_of(dim, fsdp_cuts)) == _without_empty(runs[-1])
        )
    sizes = tuple(sum(length for _, length in of_rank) for of_rank in runs)
    return Geometry(tuple(runs), sizes, _pieces(runs), is_as_fsdp_cuts)


def _pieces(dims: Sequence[Runs]) -> tuple[HeldBox, ...]:
    placed = []
    for runs in dims:
        at, spans = 0, []
        for start, length in runs:
            spans.append((start, at, length))
            at += length
        placed.append(spans)
    return tuple(
        HeldBox(
            Box(tuple(s[0] for s in spans), tuple(s[2] for s in spans)),
            Box(tuple(s[1] for s in spans), tuple(s[2] for s in spans)),
        )
        for spans in product(*placed)
    )


def cut_runs(runs: Runs, parts: int, index: int, split: int = 1) -> Runs:
    """Return part `index` of `parts` of the rows; with `split`, of each of `split` pieces of them.

    Example: of 8 rows over 2 parts with split 2, part 0 holds rows 0-1 and 4-5. The rule is that of
    torch's `_StridedShard`.
    """
    total = sum(length for _, length in runs)
    merged: list[tuple[int, int]] = []
    for piece in range(split):
        offset, numel = chunk_of(total, split, piece)
        start, length = chunk_of(numel, parts, index)
        for run in _slice(runs, offset + start, length):
            if merged and sum(merged[-1]) == run[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + run[1])
            else:
                merged.append(run)
    return tuple(merged) or ((min(chunk_of(total, parts, index)[0], total), 0),)


def _without_empty(runs: Runs) -> Runs:
    """Return the runs that are not empty."""
    return tuple(run for run in runs if run[1])


def _slice(runs: Runs, start: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield rows `start` to `start + length` of those that the runs hold, without empty runs."""
    at = 0
    for first, numel in runs:
        low, high = max(start, at), min(start + length, at + numel)
        if low < high:
            yield first + low - at, high - low
        at += numel


def is_dtensor(leaf: Leaf) -> TypeGuard[Opaque]:
    """Return whether the leaf is a DTensor.

    Older releases of torch pickle it as `torch.distributed._tensor.api.DTensor`.
    """
    return (
        isinstance(leaf, Opaque)
        and leaf.name == "DTensor"
        and leaf.module.startswith(("torch.distributed.tensor", "torch.distributed._tensor"))
    )


def read_placed(leaf: Opaque, key: str) -> Placed:
    """Return the placed part that a pickled DTensor describes.

    Raises SourceError CKM112 if it is malformed, or has a placement other than Shard, _StridedShard
    and Replicate, such as Partial.
    """
    state = leaf.state if isinstance(leaf.state, Mapping) else {}
    spec = attributes(state.get("_spec"))
    mesh = spec.get("mesh")
    local = state.get("_local_tensor")
    placements = spec.get("placements")
    if (
        leaf.info is None
        or not isinstance(local, StoredTensor | Opaque)
        or not isinstance(mesh, Opaque)
        or not attributes(mesh)
    ):
        raise malformed(key, "a DTensor without its local tensor, shape or mesh")
    ranks, shape, coordinate, _ = read_mesh(mesh, key)
    if not isinstance(placements, list | tuple) or len(placements) != len(shape):
        raise malformed(key, f"a DTensor without a placement for each of {len(shape)} mesh dims")
    cuts = _cuts(placements, spec.get("shard_order"), len(leaf.info.shape), key)
    geometry = geometry_of(leaf.info.shape, shape, coordinate, cuts)
    return Placed(leaf.info, ranks, shape, coordinate, cuts, local, geometry)


def first_mesh(leaves: Iterable[Leaf]) -> PickledMesh | None:
    """Return the mesh of the first DTensor among the leaves; None if there is none."""
    for leaf in leaves:
        if is_dtensor(leaf):
            read_placed(leaf, "mesh")  # raises if it is malformed
            mesh = attributes(attributes(leaf).get("_spec")).get("mesh")
            assert isinstance(mesh, Opaque)
            return read_mesh(mesh, "mesh")
    return None


def shares_no_rank(ranks: tuple[int, ...], others: Iterable[Collection[int]]) -> bool:
    """Return whether a mesh shares no rank with the others, as the stages of a pipeline do not."""
    return not any(rank in other for other in others for rank in ranks)


def _cuts(placements: Sequence[object], order: object, ndim: int, key: str) -> tuple[Cutting, ...]:
    """Return the Shard placements, by mesh dim from left to right or in the spec's own order.

    Raises SourceError CKM112 for another placement than Shard, _StridedShard or Replicate.
    """
    cuts = []
    for axis, placement in enumerate(placements):
        kind = placement.name if isinstance(placement, Opaque) else type(placement).__name__
        if kind == "Replicate":
            continue
        fields = attributes(placement)
        split = fields.get("split_factor") if kind == "_StridedShard" else 1
        if kind not in ("Shard", "_StridedShard") or type(split) is not int or split < 1:
            raise SourceError(
                "CKM112",
                f"{key}: placement {kind} on mesh dim {axis}, expected Shard or Replicate",
                "save it as a full state dict, or with DCP",
            )
        dim = fields.get("dim")
        if type(dim) is not int or not -ndim <= dim < ndim or split > MAX_SPLIT:
            raise malformed(key, f"{kind}({dim!r:.20}) of a tensor of {ndim} dims")
        cuts.append(Cutting(dim % ndim, axis, split))
    return tuple(_ordered(cuts, order) if len(cuts) > 1 else cuts)


def _ordered(cuts: list[Cutting], order: object) -> list[Cutting]:
    """Return the cuts in the order of the `shard_order` of newer specs, if it lists exactly these.

    `shard_order` is ((tensor dim, mesh dims in order), ...).
    """
    order_pairs: list[tuple[int, int]] = []
    for entry in order if isinstance(order, list | tuple) else ():
        args = entry.args if isinstance(entry, Opaque) else entry
        if isinstance(args, tuple) and len(args) == 2 and type(args[0]) is int:
            order_pairs += [(args[0], axis) for axis in ints(args[1]) or ()]
    cut_of = {(cut.dim, cut.axis): cut for cut in cuts}
    return [cut_of[at] for at in order_pairs] if sorted(order_pairs) == sorted(cut_of) else cuts
