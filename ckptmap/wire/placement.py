"""What a pickled DTensor says: its mesh, its placements, and the box that its local part fills.

Reads the state of torch 2.13 (`DeviceMesh._layout`, `_flatten_rank_map`) and of older releases
(`mesh`, `_flatten_mesh_list`); see torch/distributed/device_mesh.py and
torch/distributed/tensor/_utils.py (`compute_local_shape_and_global_offset`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptmap.errors import SourceError
from ckptmap.tensors import Box, Leaf, Opaque, StoredTensor, TensorInfo


def chunk_of(numel: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part `index` by torch.chunk: parts of ceil(numel / parts), the last less."""
    length = -(-numel // parts)
    start = min(index * length, numel)
    return start, min(length, numel - start)


def cut_rows(info: TensorInfo, world_size: int) -> list[tuple[int, Box]]:
    """(rank, box) along dim 0 of each rank that holds rows; a scalar or empty tensor is rank 0's.

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


@dataclass(frozen=True)
class Placed:
    """One rank's part of a DTensor.

    ranks   every rank that takes part in the save, as the mesh knows
    shape   sizes of the mesh dims; coordinate: where this rank is in it
    cuts    (tensor dim, mesh dim) of each Shard, in the order that they are applied
    local   what the rank holds: a StoredTensor, or an Opaque of a tensor subclass
    """

    info: TensorInfo
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]
    local: Leaf

    @property
    def box(self) -> Box:
        """The part of the whole tensor that this rank holds; a size may be 0."""
        offsets, sizes = [0] * len(self.info.shape), list(self.info.shape)
        for dim, axis in self.cuts:
            start, sizes[dim] = chunk_of(sizes[dim], self.shape[axis], self.coordinate[axis])
            offsets[dim] += start
        return Box(tuple(offsets), tuple(sizes))


def is_dtensor(leaf: Leaf) -> bool:
    """torch.distributed.tensor.DTensor, or `torch.distributed._tensor.api.DTensor` of older."""
    return (
        isinstance(leaf, Opaque)
        and leaf.name == "DTensor"
        and leaf.module.startswith(("torch.distributed.tensor", "torch.distributed._tensor"))
    )


def read_placed(leaf: Opaque, key: str) -> Placed:
    """Raises SourceError CKM112 where the DTensor is malformed, or placed in a way that is not
    known (Partial, strided shards)."""
    state = leaf.state if isinstance(leaf.state, Mapping) else {}
    spec = _attributes(state.get("_spec"))
    mesh = _attributes(spec.get("mesh"))
    local = state.get("_local_tensor")
    placements = spec.get("placements")
    if leaf.info is None or not isinstance(local, StoredTensor | Opaque) or not mesh:
        raise _malformed(key, "a DTensor without its local tensor, shape or mesh")
    ranks, shape, coordinate = _read_mesh(mesh, key)
    if not isinstance(placements, list | tuple) or len(placements) != len(shape):
        raise _malformed(key, f"a DTensor without a placement for each of {len(shape)} mesh dims")
    cuts = _cuts(placements, spec.get("shard_order"), len(leaf.info.shape), key)
    return Placed(leaf.info, ranks, shape, coordinate, cuts, local)


def mesh_ranks(leaves: Iterable[Leaf]) -> tuple[int, ...]:
    """The ranks of the first DTensor among the leaves; empty: there is none."""
    for leaf in leaves:
        if is_dtensor(leaf):
            return read_placed(leaf, "mesh").ranks
    return ()


def _attributes(value: Any) -> Mapping[Any, Any]:
    return value.state if isinstance(value, Opaque) and isinstance(value.state, Mapping) else {}


def _malformed(key: str, what: str) -> SourceError:
    return SourceError("CKM112", f"{key}: {what}", "the file is damaged or of an unknown release")


def _ints(values: Any) -> tuple[int, ...] | None:
    if isinstance(values, list | tuple) and all(type(value) is int for value in values):
        return tuple(values)
    return None


def _read_mesh(
    mesh: Mapping[Any, Any], key: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(ranks of the whole mesh, sizes of the dims, this rank's coordinate)."""
    whole = _attributes(mesh.get("_root_mesh")) or mesh
    ranks = _ints(whole.get("_flatten_rank_map", whole.get("_flatten_mesh_list")))
    coordinate = _ints(mesh.get("_coordinate_on_dim"))
    shape: tuple[int, ...] | None
    if "_layout" in mesh:
        shape = _layout_shape(_attributes(mesh["_layout"]))
    else:
        old = mesh.get("mesh")
        shape = old.info.shape if isinstance(old, StoredTensor) else None
    if not ranks or shape is None or coordinate is None or len(shape) != len(coordinate):
        raise _malformed(key, "a DTensor whose mesh cannot be read")
    if not all(0 <= at < n for at, n in zip(coordinate, shape, strict=True)):
        raise _malformed(key, f"mesh coordinate {list(coordinate)} outside {list(shape)}")
    return ranks, shape, coordinate


def _layout_shape(layout: Mapping[Any, Any]) -> tuple[int, ...] | None:
    """Sizes of the mesh dims: an axis of several is a flattened one, of none has size 1."""
    sizes = []
    axes = layout.get("axes")
    for axis in axes if isinstance(axes, list | tuple) else ():
        found = _ints(_attributes(axis).get("shape"))
        if found is None:
            return None
        size = 1
        for factor in found:
            size *= factor
        sizes.append(size)
    return tuple(sizes) or None


def _cuts(
    placements: Sequence[Any], order: Any, ndim: int, key: str
) -> tuple[tuple[int, int], ...]:
    """(tensor dim, mesh dim) of the shards, mesh dims left to right unless the spec says other."""
    cuts = []
    for axis, placement in enumerate(placements):
        kind = placement.name if isinstance(placement, Opaque) else type(placement).__name__
        if kind == "Replicate":
            continue
        dim = _attributes(placement).get("dim") if kind == "Shard" else None
        if kind != "Shard":
            raise SourceError(
                "CKM112",
                f"{key}: placement {kind} on mesh dim {axis}, expected Shard or Replicate",
                "save it as a full state dict, or with DCP",
            )
        if type(dim) is not int or not -ndim <= dim < ndim:
            raise _malformed(key, f"Shard({dim!r:.20}) of a tensor of {ndim} dims")
        cuts.append((dim % ndim, axis))
    return tuple(_ordered(cuts, order))


def _ordered(cuts: list[tuple[int, int]], order: Any) -> list[tuple[int, int]]:
    """By `shard_order` of newer specs: ((tensor dim, mesh dims in order), ...)."""
    given: list[tuple[int, int]] = []
    for entry in order if isinstance(order, list | tuple) else ():
        args = entry.args if isinstance(entry, Opaque) else entry
        if isinstance(args, tuple) and len(args) == 2 and type(args[0]) is int:
            given += [(args[0], axis) for axis in _ints(args[1]) or ()]
    return given if sorted(given) == sorted(cuts) else cuts
