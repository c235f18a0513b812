"""One torch.save file: read from its zip directory and pickle, and written without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any

from ckptmap.errors import PlanError
from ckptmap.files import Files
from ckptmap.protocols import OutFile, OutState, OutTensor, Place, Setup, Slot
from ckptmap.tensors import Box, Index, Path, TensorInfo, contiguous_strides
from ckptmap.wire.gc_pause import paused_gc
from ckptmap.wire.pickle_write import StorageTensor, dump, way_out
from ckptmap.wire.torch_zip_read import Records, load
from ckptmap.wire.torch_zip_write import ZipLayout, layout_zip
from ckptmap.wire.tree import flatten, nest
from ckptmap.wire.zip_read import bad, stem

RECORDS = "ckptmap.records.json"
MANIFEST = "ckptmap.manifest.json"

FULL = Setup(
    "full", layout="full", writer="torch-zip", summary="one torch.save file of plain tensors"
)
DDP = Setup(
    "ddp",
    layout="full",
    writer="torch-zip",
    wrap=("module",),
    summary="one torch.save file, names as DistributedDataParallel has them",
)
COMPILED = Setup(
    "compiled",
    layout="full",
    writer="torch-zip",
    wrap=("_orig_mod",),
    summary="one torch.save file, names as torch.compile has them",
)


class TorchZip:
    """Reads one torch.save file of any name and nesting; nothing is unpickled or called."""

    name = "torch-zip"

    def claims(self, place: Place) -> bool:
        """A zip by its first bytes; whether torch.save wrote it is for `index` to find out."""
        return not place.is_dir and place.head.startswith(b"PK\3\4")

    def index(self, place: Place) -> Index:
        """Raises SourceError CKM104, CKM105 or CKM106 where the file is malformed."""
        file = str(FilePath(place.path).absolute())
        with paused_gc():
            loaded = load(Files(), file)
            leaves = flatten(loaded.tree, file, loaded.pickle_nbytes)
        found = loaded.records
        manifest = None
        if MANIFEST in found:
            found.check(MANIFEST)
            manifest = partial(found.read, MANIFEST, check=True)
        return Index(self.name, leaves, (file,), _read_records(found), manifest=manifest)


def _read_records(records: Records) -> Mapping[str, Mapping[str, Any]]:
    """ckptmap's own encoding records, from the zip; none in a file that others wrote."""
    if RECORDS not in records:
        return {}
    try:
        found = json.loads(records.read(RECORDS, check=True))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(r, dict) for r in found.values()):
        raise bad(records.file, f"{RECORDS}: expected a JSON object of objects")
    return found


class TorchZipWriter:
    """Writes one file that torch.load(weights_only=True, mmap=True) reads: nested plain dicts."""

    name = "torch-zip"
    one_file = True
    shares_storage = True

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """The one file. Ties share a storage. Raises PlanError CKM202 for a value that only a
        foreign class could hold, CKM114 where keys collide."""
        with paused_gc():
            return [self._file(state, name)]

    def _file(self, state: OutState, name: str) -> OutFile:
        tree, placed = _tree(state)
        try:
            pickle = dump(tree)
        except TypeError as error:
            raise PlanError("CKM202", str(error), way_out(error)) from error
        sizes = [(str(key), tensor.info.nbytes) for key, tensor in enumerate(placed)]
        layout = layout_zip(stem(name), pickle, sizes)
        slots = [
            Slot(tensor.path, tensor.chunks[0][1], offset, nbytes)
            for tensor, offset, (_, nbytes) in zip(placed, layout.offsets, sizes, strict=True)
        ]
        records = {}
        if state.records:
            records[RECORDS] = json.dumps(state.records, sort_keys=True).encode()
        nbytes = layout.nbytes_with({key: len(data) for key, data in records.items()})
        seal = _Seal(layout, records)
        return OutFile(
            name, nbytes, slots, seal, needs_crc=True, holds_manifest=True, between=layout.between
        )


@dataclass(frozen=True)
class _Seal:
    layout: ZipLayout
    records: Mapping[str, bytes]

    def __call__(self, crcs: Sequence[int], manifest: bytes | None) -> Iterable[tuple[int, bytes]]:
        extra = dict(self.records)
        if manifest is not None:
            extra[MANIFEST] = manifest
        return self.layout.ends(crcs, extra)


def _tree(state: OutState) -> tuple[Any, list[OutTensor]]:
    """The nested state dict, tensors as views of numbered storages, and who owns each storage."""
    placed: list[OutTensor] = []
    keys: dict[Path, int] = {}
    leaves: list[tuple[Path, Any]] = []
    forms: dict[int, tuple[Any, ...]] = {}
    for tensor in state.tensors:
        path, info, _, alias_of, _, _ = tensor
        form = forms.get(id(info)) or forms.setdefault(id(info), _form(info))
        if alias_of is None:
            _check_whole(tensor)
            key = keys[path] = len(placed)
            placed.append(tensor)
        else:
            key = keys[path] = keys[alias_of]
        leaves.append((path, StorageTensor(str(key), *form)))
    leaves += state.extra.items()
    return nest(leaves), placed


def _check_whole(tensor: OutTensor) -> None:
    chunks, whole = tensor.chunks, Box.whole(tensor.info.shape)
    if len(chunks) != 1 or (chunks[0][1] is not whole and chunks[0][1] != whole):
        boxes = [box for _, box in chunks]
        raise ValueError(f"{tensor.path}: one file holds whole tensors, got {boxes}")


def _form(info: TensorInfo) -> tuple[str, int, int, tuple[int, ...], tuple[int, ...]]:
    """A whole tensor's StorageTensor but for its key."""
    stride = contiguous_strides([max(n, 1) for n in info.shape], 1)
    return info.dtype, info.numel, 0, info.shape, stride
