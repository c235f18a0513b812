"""Read the `metadata.pkl` of a torch_checkpointing save: the tensors of its items, and the items' files.

    {"version": "2.0", "world_size": 2, "metadata": {"model": {
        "nested_path_to_metadata": {'["w"]': [{"ranks": (0, 1), "sharding_metadata": {"type":
            "DTensorShardingMetadata", "data": {"global_shape": [8, 4], "dtype": "torch.float32",
            "placements": [{"type": "Shard", "dim": 0}], "mesh_spec": {"mesh_shape": (2,), ...}}}}]},
        "rank_to_layout_info": {0: None, 1: {"file_path": "a.pt", "serialization_format": {...}}}}}}

It is a pickle of plain dicts and lists. Rank 0 writes it, for items with a resharder that hold tensors.
Version 1.0 lists all paths in one dict. Source: torch_checkpointing 0.1.1, distributed_metadata.py and
dtensor_metadata.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path as FilePath
from typing import Any, NoReturn

from ckptmap.core.json_text import parse_json
from ckptmap.errors import SourceError
from ckptmap.formats.pickle.reader import load
from ckptmap.formats.torch_save.grid import MAX_NUMEL
from ckptmap.protocols.file_systems import Mounts
from ckptmap.sharding.dtensor_spec import MAX_SPLIT, Cutting
from ckptmap.tensors import ITEMSIZE, Path, TensorInfo

METADATA = "metadata.pkl"
VERSIONS = ("1.0", "2.0")
TORCH, SAFETENSORS = "TorchSerialization", "SafetensorsSerialization"
MARKS = (b"nested_path_to_metadata", b"sharding_metadata", b"world_size")
"""Keys of the dict, one of which stands near its start."""
MARKS_NBYTES = 4096
MAX_DIMS, MAX_RANKS = 64, 1 << 24


@dataclass(frozen=True, eq=False)
class StatedMesh:
    """The mesh of DTensors, one object for all tensors on it: the sizes of its dims, and rank -> place in it."""

    shape: tuple[int, ...]
    places: Mapping[int, tuple[int, ...]]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks in row-major order."""
        return tuple(self.places)


@dataclass(frozen=True)
class Sharding:
    """How a tensor is cut over a mesh: `cuts` are the Shard placements; empty: every rank holds all of it."""

    info: TensorInfo
    mesh: StatedMesh
    cuts: tuple[Cutting, ...]


@dataclass(frozen=True)
class StatedItem:
    """What the metadata says of an item.

    tensors   path in the item -> how ranks hold the tensor: one Sharding, or several on other ranks
    layouts   rank -> (file path, format); a rank that is not listed has the default file, or none
    """

    tensors: Mapping[Path, Sequence[Sharding]]
    layouts: Mapping[int, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class StatedItems:
    """What `metadata.pkl` says of a save: its items that hold tensors, and how many ranks wrote it."""

    items: Mapping[str, StatedItem]
    world: int


def looks_like_metadata(head: bytes) -> bool:
    """Return whether a file that begins so is a `metadata.pkl` of torch_checkpointing."""
    return head.startswith(b"\x80") and any(mark in head for mark in MARKS)


def is_one_of_several(file: FilePath, mounts: Mounts) -> bool:
    """Return whether a safetensors file lies beside those of other ranks and a `metadata.pkl`."""
    metadata, second = file.with_name(METADATA), re.sub(r"_\d+(\.\w+)$", r"_1\1", file.name)
    if not metadata.is_file() or not file.with_name(second).is_file():
        return False
    return looks_like_metadata(mounts.read_head(metadata, MARKS_NBYTES))


def parse_metadata(data: bytes, where: str) -> StatedItems:
    """Return what the pickle says. Raise SourceError CKM106 if it is malformed, CKM109 if it is a pickle of
    something else, or of a version that is not known."""
    tree = load(data, where)
    if not isinstance(tree, dict):
        _malformed(where, f"holds one {type(tree).__name__}, expected a dict")
    version = tree.get("version", VERSIONS[0])
    if version not in VERSIONS:
        _malformed(where, f"version {version!r:.20}, expected {' or '.join(VERSIONS)}")
    world, saved = tree.get("world_size"), tree.get("metadata")
    if type(world) is not int or not 0 < world <= MAX_RANKS or not isinstance(saved, dict):
        _malformed(where, f"world_size {world!r:.20} beside a {type(saved).__name__} of items")
    reader = _Reader(where)
    if version == VERSIONS[0]:
        return StatedItems(
            reader.flat_items(saved, tree.get("rank_to_layout_info_mappings")), world
        )
    items = {}
    for key, entry in saved.items():
        fields: dict[str, object] = entry if isinstance(entry, dict) else {}
        tensors, layouts = fields.get("nested_path_to_metadata"), fields.get("rank_to_layout_info")
        if type(key) is not str or not isinstance(tensors, dict) or not isinstance(layouts, dict):
            _malformed(where, f"the entry of item {key!r:.40}")
        items[key] = reader.item(key, tensors, layouts)
    return StatedItems(items, world)


def _malformed(where: str, problem: str) -> NoReturn:
    raise SourceError(
        "CKM109",
        f"{where}: malformed metadata of torch_checkpointing: {problem}",
        "copy the directory again, or use an earlier checkpoint",
    )


class _Reader:
    """Builds the values of one file. Tensors share the dicts of meshes, so each mesh is read once."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._meshes: dict[object, StatedMesh] = {}
        self._shardings: dict[Sharding, Sharding] = {}

    def item(self, key: str, tensors: Mapping[Any, Any], layouts: Mapping[Any, Any]) -> StatedItem:
        read = {
            self._path(key, text): self._groups(key, groups) for text, groups in tensors.items()
        }
        return StatedItem(read, self._layouts(key, layouts))

    def flat_items(self, paths: Mapping[Any, Any], layouts: Any) -> dict[str, StatedItem]:
        """Return the items of version 1.0: its paths begin with the key of the item."""
        items: dict[str, dict[Path, Sequence[Sharding]]] = {}
        for text, groups in paths.items():
            key, *path = self._path("paths", text)
            items.setdefault(str(key), {})[tuple(path)] = self._groups(str(key), groups)
        by_rank = layouts if isinstance(layouts, dict) else {}
        return {
            key: StatedItem(tensors, self._layouts(key, {
                rank: of_rank.get(key) for rank, of_rank in by_rank.items() if isinstance(of_rank, dict)
            }))
            for key, tensors in items.items()
        }  # fmt: skip

    def _path(self, key: str, text: object) -> Path:
        try:
            path = parse_json(text) if isinstance(text, str) else None
        except ValueError:
            path = None
        if not isinstance(path, list) or not all(isinstance(part, str | int) for part in path):
            self._fail(key, f"the path {text!r:.60}")
        return tuple(path)

    def _layouts(self, key: str, layouts: Mapping[Any, Any]) -> dict[int, tuple[str, str]]:
        read = {}
        for number, layout in layouts.items():
            rank = int(number) if isinstance(number, str) and number.isdecimal() else number
            if type(rank) is not int or rank < 0:
                self._fail(key, f"the layout of rank {number!r:.20}")
            if layout is None:
                continue
            form = layout.get("serialization_format") if isinstance(layout, dict) else None
            name = layout.get("file_path") if isinstance(layout, dict) else None
            kind = form.get("type") if isinstance(form, dict) else None
            if not isinstance(name, str) or not isinstance(kind, str):
                self._fail(key, f"the layout of rank {rank}")
            read[rank] = (name, kind)
        return read

    def _groups(self, key: str, groups: object) -> list[Sharding]:
        if not isinstance(groups, list | tuple) or not groups:
            self._fail(key, "a tensor without metadata")
        return [self._sharding(key, group) for group in groups]

    def _sharding(self, key: str, group: object) -> Sharding:
        packed = group.get("sharding_metadata") if isinstance(group, dict) else None
        kind = packed.get("type") if isinstance(packed, dict) else None
        data = packed.get("data") if isinstance(packed, dict) else None
        if kind != "DTensorShardingMetadata" or not isinstance(data, dict):
            self._fail(key, f"sharding of type {kind!r:.60}, expected DTensorShardingMetadata")
        shape, dtype = _ints(data.get("global_shape")), data.get("dtype")
        name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
        if (
            shape is None
            or name not in ITEMSIZE
            or len(shape) > MAX_DIMS
            or prod(shape) > MAX_NUMEL
        ):
            self._fail(key, f"a tensor {dtype!r:.40} of shape {data.get('global_shape')!r:.60}")
        mesh = self._mesh(key, data.get("mesh_spec"))
        placements = data.get("placements")
        if not isinstance(placements, list | tuple) or len(placements) != len(mesh.shape):
            self._fail(key, f"placements that are not one for each of {len(mesh.shape)} mesh dims")
        cuts = [self._cut(key, p, axis, len(shape)) for axis, p in enumerate(placements)]
        made = Sharding(TensorInfo(shape, name), mesh, tuple([c for c in cuts if c is not None]))
        return self._shardings.setdefault(made, made)

    def _mesh(self, key: str, spec: object) -> StatedMesh:
        known = self._meshes.get(id(spec))
        if known is not None:
            return known
        shape = _ints(spec.get("mesh_shape")) if isinstance(spec, dict) else None
        ranks = _ints(spec.get("mesh_data")) if isinstance(spec, dict) else None
        if not shape or not ranks or prod(shape) != len(ranks) or len({*ranks}) < len(ranks):
            self._fail(key, "a mesh whose ranks do not fill its shape")
        mesh = self._meshes.get((shape, ranks))
        if mesh is None:
            places = product(*map(range, shape))
            mesh = StatedMesh(shape, dict(zip(ranks, places, strict=True)))
        self._meshes[id(spec)] = self._meshes[shape, ranks] = mesh
        return mesh

    def _cut(self, key: str, placement: object, axis: int, ndim: int) -> Cutting | None:
        entry: Mapping[Any, Any] = placement if isinstance(placement, dict) else {}
        kind, dim, split = entry.get("type"), entry.get("dim"), entry.get("split_factor", 1)
        if kind == "Replicate":
            return None
        if kind not in ("Shard", "StridedShard") or type(dim) is not int or not -ndim <= dim < ndim:
            self._fail(key, f"placement {kind!r:.20} of dim {dim!r:.20} of {ndim}")
        if type(split) is not int or not 0 < split <= MAX_SPLIT:
            self._fail(key, f"split factor {split!r:.20}")
        return Cutting(dim % ndim, axis, split)

    def _fail(self, key: str, problem: str) -> NoReturn:
        _malformed(self.where, f"item {key!r:.60}: {problem}")


def _ints(values: object) -> tuple[int, ...] | None:
    """Return a list of integers that are not negative as a tuple; None for any other value."""
    if isinstance(values, list | tuple) and all(
        type(value) is int and value >= 0 for value in values
    ):
        return tuple(values)
    return None
