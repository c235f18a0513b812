"""Read an item that each rank saved as safetensors: bare parts of tensors, placed by `metadata.pkl`.

    {"state": {"w": {"exp_avg": t}}}    is stored as    state.w.exp_avg    under the path of its keys

A file holds the local tensor of each DTensor and nothing of its mesh, so that only `metadata.pkl` tells
where it belongs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptmap.errors import SourceError
from ckptmap.formats.rank_files.dtensor_layout import join_placed
from ckptmap.formats.safetensors.file import refuse_text
from ckptmap.formats.safetensors.header import parse
from ckptmap.formats.torch_checkpointing.item_files import ItemFiles
from ckptmap.formats.torch_checkpointing.metadata import METADATA, Sharding
from ckptmap.sharding.dtensor_spec import Placed, geometry_of
from ckptmap.storage.files import Files
from ckptmap.tensors import Extent, Leaf, Path, StoredTensor, TensorInfo


def safetensors_leaves(files: Files, item: ItemFiles) -> dict[Path, Leaf]:
    """Return path -> whole tensor; the paths begin with the key of the item.

    Raise SourceError CKM109 if a header and `metadata.pkl` list different tensors, CKM104 or CKM107 for a
    damaged file, and the errors of `rank_files.dtensor_layout.join_placed`.
    """
    assert item.stated is not None
    held = {rank: _tensors(files, file) for rank, file in item.files.items()}
    leaves: dict[Path, Leaf] = {}
    keys: set[str] = set()
    for path, ways in item.stated.tensors.items():
        key = ".".join(map(str, path))
        parts = [
            (rank, _placed(item, key, way, rank, held[rank][key]))
            for way in ways
            for rank in way.mesh.places
            if key in held.get(rank, {})
        ]
        if not parts:
            raise _other_save(
                item, f"tensor {key!r}, which {METADATA} lists, is in none of the files"
            )
        keys.add(key)
        leaves[item.key, *path] = join_placed(
            sorted(parts, key=lambda part: part[0]), f"{item.key}.{key}"
        )
    for rank, tensors in held.items():
        unknown = next((key for key in tensors if key not in keys), None)
        if unknown is not None:
            raise _other_save(
                item, f"tensor {unknown!r} of rank {rank}, which {METADATA} does not list"
            )
    return leaves


def _tensors(files: Files, file: str) -> Mapping[str, StoredTensor]:
    refuse_text(files, file)
    header = parse(files, file)
    return {
        key: StoredTensor(info, Extent(file, begin))
        for key, (info, begin, _) in header.tensors.items()
    }


def _placed(item: ItemFiles, key: str, way: Sharding, rank: int, local: StoredTensor) -> Placed:
    """Return where the local tensor of a rank belongs. Raise SourceError CKM109 if it has another shape or
    dtype than the place that `metadata.pkl` has for it."""
    coordinate = way.mesh.places[rank]
    dims = [cut.dim for cut in way.cuts if way.mesh.shape[cut.axis] > 1]
    if len({*dims}) < len(dims) and all(cut.split == 1 for cut in way.cuts):
        raise SourceError(
            "CKM112",
            f"{item.files[rank]}: tensor {key!r}: dims {dims} are cut over several mesh dims, and {METADATA} does not"
            " tell in which order: torch_checkpointing 0.1.0 leaves out split factors",
            "save the item in torch.save form, or with torch_checkpointing 0.1.1",
        )
    geometry = geometry_of(way.info.shape, way.mesh.shape, coordinate, way.cuts)
    expected = TensorInfo(geometry.sizes, way.info.dtype)
    is_empty = not expected.numel and not local.info.numel
    if local.info != expected and not (is_empty and local.info.dtype == expected.dtype):
        raise _other_save(
            item, f"tensor {key!r}: {METADATA} puts {expected} on rank {rank}, found {local.info}"
        )
    return Placed(way.info, way.mesh.ranks, way.mesh.shape, coordinate, way.cuts, local, geometry)


def _other_save(item: ItemFiles, problem: str) -> SourceError:
    names: Sequence[str] = list(item.files.values())
    return SourceError(
        "CKM109",
        f"{names[0]}: {METADATA} and the files are of different saves: {problem}",
        f"copy {METADATA} and the files of one save into a directory of their own",
    )
