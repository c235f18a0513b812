"""Check that every tensor of an output is at the place in its files that the manifest states.

This runs before an output is published, and in `verify`. It compares headers with the manifest, and
reads no tensor data.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.columns import each
from ckptmap.core.state_paths import join
from ckptmap.core.tensor_columns import PlainTensors
from ckptmap.errors import CkptmapError
from ckptmap.execution import manifest as manifests
from ckptmap.storage.manifest_file import chunks_of
from ckptmap.storage.manifest_schema import ManifestDocument
from ckptmap.storage.safe_names import is_file
from ckptmap.tensors import Box, Extent, Region, StoredTensor


def check_structure(ckpt: Checkpoint, document: ManifestDocument) -> list[str]:
    """Return the problems: files of another size, tensors at other places than the manifest states,
    and tensors that it does not list."""
    base = Path(ckpt.path).absolute() if Path(ckpt.path).is_dir() else None
    problems = [
        f"{name}: {size} bytes, expected {entry['nbytes']}"
        for name, entry in document["files"].items()
        if base is not None and (size := nbytes_of(base / name)) != entry["nbytes"]
    ]
    if _all_lie(ckpt, document["tensors"]):
        return problems
    stored = {
        join(path): leaf
        for path, leaf in ckpt.index.leaves.items()
        if isinstance(leaf, StoredTensor)
    }
    planned, root = document["tensors"], None if base is None else f"{base}/"
    for key, entry in planned.items():
        tensor = stored.get(key)
        if tensor is None or not _lies_at(tensor, entry["chunks"], root):
            problems += _place_problems(key, entry, tensor, base)
    made = ckpt.index.made_tensors
    unlisted = [(k, t) for k, t in stored.items() if k not in planned and k not in made]
    if unlisted:
        shares = {tensor.share for key, tensor in stored.items() if key in planned} - {None}
        unlisted = [(k, t) for k, t in unlisted if t.share not in shares and t.info.numel]
    if unlisted:
        listed = {(_name(c.file, base), c.offset, c.nbytes) for _, c in chunks_of(document)}
        carried = document["carried"]  # files that were copied whole, with all of their tensors
        problems += [
            f"{key}: is not in the manifest"
            for key, tensor in unlisted
            if not all(
                _name(chunk.region.file, base) in carried or _is_listed(chunk.region, listed, base)
                for chunk in tensor.chunks
            )
        ]
    return problems


def _all_lie(ckpt: Checkpoint, planned: Mapping[str, object]) -> bool:
    """Return whether every tensor is the one extent that was planned, and there is no other tensor.

    This compares whole columns, which is fast for an output that was just written. If it returns
    False, the caller compares the tensors one by one to find the problems.
    """
    leaves, path = ckpt.index.leaves, Path(ckpt.path).absolute()
    alone = planned.alone() if isinstance(planned, manifests.ManifestTensors) else None
    if alone is None or not isinstance(leaves, PlainTensors):
        return False
    keys, chunks = alone
    try:
        located = leaves.extents()
    except CkptmapError:
        return False
    if located is None or list(leaves.names) != keys:
        return False
    files = each(chunks.files, lambda name: str(path / name if path.is_dir() else path))
    if (list(located.files), list(located.offsets)) != (files, chunks.offsets):
        return False
    columns = zip(leaves.infos, chunks.boxes, chunks.sizes, strict=True)
    kinds = {(id(info), id(box), nbytes): (info, box, nbytes) for info, box, nbytes in columns}
    return all(
        box == Box.whole(info.shape) and nbytes == info.nbytes
        for info, box, nbytes in kinds.values()
    )


def _lies_at(tensor: StoredTensor, chunks: Sequence[Sequence[Any]], root: str | None) -> bool:
    """Return whether the tensor is the one chunk that was planned, as nearly every tensor is.

    If it returns False, `_place_problems` compares the tensor in full and describes the problem.
    """
    try:
        place = tensor.place
    except CkptmapError:
        return False
    if type(place) is not Extent or len(chunks) != 1 or tensor.replicas:
        return False
    name, offset, nbytes, offsets, sizes, _ = chunks[0]
    info = tensor.info
    return (
        place.offset == offset
        and info.shape == tuple(sizes)
        and not any(offsets)
        and info.nbytes == nbytes
        and (root is None or place.file == root + name)
    )


def _is_listed(region: Region, listed: Container[tuple[str, int, int]], base: Path | None) -> bool:
    """Return whether a tensor that the manifest lists has the bytes of this region.

    A tensor without a manifest entry of its own may share them: the parameters of one FSDP1 flat
    parameter share one step count.
    """
    return (_name(region.file, base), region.offset, region.nbytes) in listed


def nbytes_of(file: Path) -> int:
    """Return the size of a file in bytes; -1 if there is no such file."""
    return file.stat().st_size if is_file(file) else -1


def _place_problems(
    key: str, entry: Mapping[str, Any], tensor: StoredTensor | None, base: Path | None
) -> Iterator[str]:
    if tensor is None:
        yield f"{key}: is missing"
        return
    try:
        regions = {
            (_name(chunk.region.file, base), chunk.region.offset, chunk.box.offsets, chunk.box.sizes):
            chunk.region
            for chunk in (*tensor.chunks, *tensor.replicas)
        }  # fmt: skip
    except CkptmapError as error:
        yield str(error)
        return
    for name, offset, nbytes, offsets, sizes, _ in entry["chunks"]:
        region = regions.get((_name(name, base), offset, tuple(offsets), tuple(sizes)))
        if nbytes == 0:
            continue
        if region is None or region.nbytes != nbytes or not region.is_contiguous:
            yield f"{key}: no chunk {offsets}+{sizes} at byte {offset} of {name}"
        elif base is not None and region.file != f"{base}/{name}" != str(Path(region.file)):
            yield f"{key}: lies in {region.file}, expected {name}"
    if len(regions) != len(entry["chunks"]) and tensor.info.numel:
        yield f"{key}: {len(regions)} chunks, expected {len(entry['chunks'])}"


def _name(file: str, base: Path | None) -> str:
    """Return the name of a file without its directory; "" for a one-file checkpoint.

    Such a file may be renamed after the manifest was written into it.
    """
    return "" if base is None else os.path.basename(file)
