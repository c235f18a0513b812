"""Read a pickled DeviceMesh without torch: its ranks, the sizes of its dims, the place of a rank in it.

Both the state that torch 2.13 pickles (`_layout`, `_flatten_rank_map`) and that of older releases
(`mesh`, `_flatten_mesh_list`) are read. Source: torch/distributed/device_mesh.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ckptmap.errors import SourceError
from ckptmap.tensors import Opaque, StoredTensor


class PickledMesh(NamedTuple):
    """The ranks of the whole mesh, the sizes of its dims, the coordinate of this rank, and which of
    the ranks it is (None: the mesh does not say)."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    rank: int | None


_meshes: WeakKeyDictionary[Opaque, PickledMesh] = WeakKeyDictionary()
"""The meshes by their pickled object, which all DTensors of a file share. Each is read only once,
because it lists every rank of the job."""


def read_mesh(mesh: Opaque, key: str) -> PickledMesh:
    """Return the contents of a pickled DeviceMesh. Raises SourceError CKM112 if it is malformed."""
    pickled_mesh = _meshes.get(mesh)
    if pickled_mesh is None:
        pickled_mesh = _meshes.setdefault(mesh, _read_mesh(attributes(mesh), key))
    return pickled_mesh


def _read_mesh(mesh: Mapping[object, object], key: str) -> PickledMesh:
    root = attributes(mesh.get("_root_mesh")) or mesh
    ranks = ints(root.get("_flatten_rank_map", root.get("_flatten_mesh_list")))
    coordinate, shape = ints(mesh.get("_coordinate_on_dim")), _mesh_shape(mesh)
    if not ranks or shape is None or coordinate is None or len(shape) != len(coordinate):
        raise malformed(key, "a DTensor whose mesh cannot be read")
    if not all(0 <= at < n for at, n in zip(coordinate, shape, strict=True)):
        raise malformed(key, f"mesh coordinate {list(coordinate)} outside {list(shape)}")
    rank = root.get("_rank")
    rank = rank if type(rank) is int else None
    if root is mesh and prod(shape) == len(
        ranks
    ):  # else the coordinate is one of a part of the mesh
        at = 0
        for index, size in zip(coordinate, shape, strict=True):
            at = at * size + index
        if rank not in (None, ranks[at]):
            raise malformed(key, f"a mesh of rank {rank} with the coordinate of rank {ranks[at]}")
        rank = ranks[at]
    return PickledMesh(_interned(ranks), shape, coordinate, rank)


def _mesh_shape(mesh: Mapping[object, object]) -> tuple[int, ...] | None:
    if "_layout" in mesh:
        return _layout_shape(attributes(mesh["_layout"]))
    old = mesh.get("mesh")
    return old.info.shape if isinstance(old, StoredTensor) else None


@lru_cache(maxsize=16)
def _interned(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first tuple seen that equals `ranks`: every file of a job lists the same ranks."""
    return ranks


def _layout_shape(layout: Mapping[object, object]) -> tuple[int, ...] | None:
    """Return the sizes of the mesh dims; None if they cannot be read.

    A flattened dim lists several factors; a dim without factors has size 1.
    """
    sizes = []
    axes = layout.get("axes")
    for axis in axes if isinstance(axes, list | tuple) else ():
        factors = ints(attributes(axis).get("shape"))
        if factors is None:
            return None
        size = 1
        for factor in factors:
            size *= factor
        sizes.append(size)
    return tuple(sizes) or None


# --------------------------------------------------------------------------- pickled objects


def attributes(value: object) -> Mapping[object, object]:
    """Return the attributes of an inert object; none of any other value."""
    return value.state if isinstance(value, Opaque) and isinstance(value.state, Mapping) else {}


def malformed(key: str, problem: str) -> SourceError:
    """Return the error for a DTensor or ShardedTensor that is not as torch pickles it."""
    return SourceError(
        "CKM112",
        f"{key}: {problem}",
        "the file is damaged, or of a torch release that ckptmap does not know",
    )


def ints(values: object) -> tuple[int, ...] | None:
    """Return a list or tuple of integers as a tuple; None for any other value."""
    if isinstance(values, list | tuple) and all(type(value) is int for value in values):
        return tuple(values)
    return None
