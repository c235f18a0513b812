"""Open and write one torch.save file, without torch and without unpickling any class.

The file is a zip of a pickle and one uncompressed member per storage. Reading takes the zip's central
directory and the pickle; the tensors' bytes stay in the file. `reader` has the layout and its source.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path as FilePath

from ckptmap.core.columns import distinct, each
from ckptmap.core.formatting import counted
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.json_text import JsonError, parse_json
from ckptmap.core.slot_columns import Form, OutTensors, Slots
from ckptmap.core.state_tree import flatten, nest
from ckptmap.core.tensor_columns import nbytes_of
from ckptmap.errors import PlanError
from ckptmap.formats.pickle.writer import Numbered, StorageTensor, Unwritable, dump
from ckptmap.formats.torch_save.flat_state_dict import plain_tensors
from ckptmap.formats.torch_save.reader import open_zip, parse
from ckptmap.formats.torch_save.writer import ZipLayout, layout_zip
from ckptmap.formats.zip.directory import bad
from ckptmap.formats.zip.reader import Records, stem
from ckptmap.protocols import Index, OutFile, OutState, Place, Setup, in_saved_order
from ckptmap.storage.files import Files
from ckptmap.tensors import Box, Leaf, Path, TensorInfo, contiguous_strides

RECORDS = "ckptmap.records.json"
MANIFEST = "ckptmap.manifest.json"

FULL = Setup(
    "full",
    layout="full",
    writer="torch-zip",
    live="plain",
    summary="one torch.save file of plain tensors",
)
DDP = Setup(
    "ddp",
    layout="full",
    writer="torch-zip",
    wrap=("module",),
    live="DDP",
    summary="one torch.save file, names as DistributedDataParallel has them",
)
COMPILED = Setup(
    "compiled",
    layout="full",
    writer="torch-zip",
    wrap=("_orig_mod",),
    live="compiled",
    summary="one torch.save file, names as torch.compile has them",
)


class TorchZip:
    """Reads one torch.save file of any name and nesting; nothing is unpickled or called."""

    name = "torch-zip"

    def claims(self, place: Place) -> bool:
        """Return True for a zip, by its first bytes. `index` raises if torch.save did not write it."""
        return not place.is_dir and place.head.startswith(b"PK\3\4")

    def index(self, place: Place) -> Index:
        """Return every leaf of the saved value by its path, and ckptmap's encoding records.

        Raise SourceError CKM101 for big-endian tensors, CKM104 for a truncated file, CKM105 for a
        malformed zip, CKM106 for a malformed or unsafe pickle, CKM117 for a file older than torch 1.6.
        """
        file = str(FilePath(place.path).absolute())
        members, data = open_zip(Files(mounts=place.mounts), file)
        leaves: Mapping[Path, Leaf] | None = plain_tensors(members, data, partial(_part, members))
        if leaves is None:
            leaves = flatten(parse(members, data), file, len(data))
        manifest = manifest_spans = None
        if MANIFEST in members:
            members.check(MANIFEST)
            manifest = partial(members.read, MANIFEST, check=True)
            manifest_spans = partial(members.spans, MANIFEST)
        return Index(
            self.name, leaves, (file,), _read_records(members), manifest=manifest,
            manifest_spans=manifest_spans, keeps_order=in_saved_order, notes=_notes(members),
            module_order=partial(_module_order, members),
        )  # fmt: skip


def _notes(records: Records) -> tuple[str, ...]:
    if not records.unwaited:
        return ()
    return (
        f"{counted(records.unwaited, 'part')} of gathered tensors saved before torch had waited for "
        "all bytes: some may be incomplete; compare with another save, or save with ckptmap.save",
    )


def _part(records: Records, data: bytes, of_nbytes: int) -> object:
    return parse(records, data, of_nbytes=of_nbytes)


def _module_order(records: Records) -> Mapping[Path, Sequence[str]]:
    from ckptmap.formats.torch_save.module_metadata import module_order  # few ask for it

    return module_order(parse(records, records.read("data.pkl", check=True)))


def _read_records(records: Records) -> Mapping[str, Mapping[str, object]]:
    """Return ckptmap's encoding records from their member of the zip; empty if there is none. Raise
    SourceError CKM105 for malformed ones."""
    if RECORDS not in records:
        return {}
    try:
        encodings = parse_json(records.read(RECORDS, check=True))
    except JsonError as error:
        raise bad(records.file, f"{RECORDS}: is not JSON: {error}") from error
    if not isinstance(encodings, dict) or not all(isinstance(r, dict) for r in encodings.values()):
        raise bad(records.file, f"{RECORDS}: expected a JSON object of objects")
    return encodings


class TorchZipWriter:
    """Writes one file of nested plain dicts, which `torch.load(weights_only=True, mmap=True)` reads."""

    name = "torch-zip"
    one_file = True
    shares_storage = True

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """Return the one file. Tied tensors share a storage in it.

        Raise PlanError CKM202 for a value that only a foreign class could hold, CKM114 if keys collide.
        """
        with paused_gc():
            return [self._file(state, name)]

    def _file(self, state: OutState, name: str) -> OutFile:
        tree, placed = _tree(state)
        try:
            pickle = dump(tree)
        except Unwritable as error:
            raise PlanError("CKM202", str(error), error.hint) from error
        sizes = nbytes_of([form.info for form in placed.forms])
        layout = layout_zip(stem(name), pickle, list(zip(map(str, count()), sizes, strict=False)))
        boxes = [form.chunks[0][1] for form in placed.forms]
        slots = Slots(placed.paths, boxes, layout.offsets, sizes)
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


def _tree(state: OutState) -> tuple[object, OutTensors]:
    """Return the nested state dict, in which each tensor is a view of a numbered storage, and the tensors
    that own the storages, in the order of their numbers."""
    tensors = OutTensors.of(state.tensors)
    owners = tensors
    if any(form.alias_of is not None for form in tensors.forms):
        owners = OutTensors.of([t for t in tensors if t.alias_of is None])
    for form in distinct(owners.forms).values():
        _check_whole(form)
    keys: Iterable[str] = map(str, range(len(owners)))
    if owners is not tensors:
        number = dict(zip(owners.paths, keys, strict=True))
        keys = [
            number[form.alias_of or path]
            for path, form in zip(tensors.paths, tensors.forms, strict=True)
        ]
    likes = each([form.info for form in tensors.forms], _form)
    leaves: Iterable[tuple[Path, object]] = zip(
        tensors.paths, map(Numbered, keys, likes), strict=True
    )
    return nest(chain(leaves, state.extra.items())), owners


def _check_whole(form: Form) -> None:
    chunks, whole = form.chunks, Box.whole(form.info.shape)
    if len(chunks) != 1 or chunks[0][1] != whole:
        boxes = [box for _, box in chunks]
        raise ValueError(f"{form.info}: one file holds whole tensors, got {boxes}")


def _form(info: TensorInfo) -> StorageTensor:
    """Return the row-major view of a whole storage, for tensors of this shape and dtype."""
    stride = contiguous_strides([max(n, 1) for n in info.shape], 1)
    return StorageTensor("", info.dtype, info.numel, 0, info.shape, stride)
