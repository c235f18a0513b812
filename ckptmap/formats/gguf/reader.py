"""Open GGUF files, the format of llama.cpp, as a checkpoint: tensors by name, from headers alone.

A tensor of codes and scales is stored bytes and a record, `{"scheme": "gguf", "type": "Q4_K", ...}`, by which
`quantization.gguf` decodes it. It is an opaque leaf, which a plan refuses, where its type is not decoded here, and where
a scale of the tensor lies beside its blocks (`blk.0.attn_q.scale`, as llama.cpp writes for NVFP4 of other programs): the
values of the blocks are not those of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath

from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.tensor_columns import Extents, PlainTensors
from ckptmap.formats.gguf.config_json import Config, config_of, made_files, unmapped, untold
from ckptmap.formats.gguf.cursor import MAGIC
from ckptmap.formats.gguf.footer import manifest_span
from ckptmap.formats.gguf.header import FACTORS, GgufHeader, GgufTensor, parse
from ckptmap.formats.gguf.metadata import about, listed
from ckptmap.formats.gguf.splits import check_splits, files_of, holds_gguf, is_split_set
from ckptmap.protocols import Index, Place
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.files import Files
from ckptmap.tensors import Leaf, Opaque, Path, TensorInfo

VALUES = "float32"
"""The dtype of decoded values, as ggml computes them."""
SCALE = ".scale"


class GgufFile:
    """Reads one GGUF file, or all files of a split model."""

    name = "gguf"

    def claims(self, place: Place) -> bool:
        """Return True for a file that begins with GGUF, and a directory of the files of one split model."""
        if place.is_dir:
            return is_split_set(place.names)
        return place.head.startswith(MAGIC)

    def index(self, place: Place) -> Index:
        """Return the tensors, the records of those that are encoded, and notes on the metadata.

        Raise SourceError CKM101, CKM104 and CKM119 as `header.parse` does, CKM108 for split files that are
        missing or of different models.
        """
        headers = headers_of(place.path, place.is_dir, place.names, place.mounts)
        span = _manifest(headers, place.mounts)
        with paused_gc():
            entries = [entry for header in headers for entry in header.tensors]
            scaled = _scaled(entries)
            return Index(
                self.name,
                _leaves(headers, scaled),
                tuple(header.file for header in headers),
                records={
                    e.name: _record(e)
                    for e in entries
                    if not e.type.dtype and _is_decoded(e, scaled)
                },
                notes=tuple(untold(whole(headers))),
                about=about(headers[0]),
                metadata=listed(headers[0]),
                naming="gguf",
                unmapped_model=unmapped(headers[0]),
                made_files=partial(made_files, whole(headers)),
                manifest=None
                if span is None
                else partial(_read, headers[0].file, span, place.mounts),
                manifest_spans=None if span is None else lambda: [span],
                made_tensors=frozenset(FACTORS),
            )


def _manifest(headers: Sequence[GgufHeader], mounts: Mounts) -> tuple[int, int] | None:
    """Return the place of the manifest in a file that ckptmap wrote; it writes no split ones."""
    if len(headers) > 1:
        return None
    with closing(Files(mounts=mounts)) as files:
        return manifest_span(files, headers[0])


def _read(file: str, span: tuple[int, int], mounts: Mounts) -> bytes:
    with closing(Files(mounts=mounts)) as files:
        return files.read(file, *span)


def headers_of(path: str, is_dir: bool, names: Sequence[str], mounts: Mounts) -> list[GgufHeader]:
    """Return the headers of the model's files, in order. Raise as `GgufFile.index` does."""
    given = FilePath(path).absolute()
    if is_dir:
        given /= next(name for name in names if name.endswith(".gguf"))
    files = Files(mounts=mounts)
    try:
        headers = [parse(files, file) for file in files_of(given)]
    finally:
        files.close()
    check_splits(headers)
    return headers


def whole(headers: Sequence[GgufHeader]) -> GgufHeader:
    """Return the header of a split model's first file, with the tensors of all."""
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    factors = {name: values for header in headers for name, values in header.factors.items()}
    return replace(headers[0], tensors=tensors, factors=factors)


def config_at(path: FilePath, mounts: Mounts) -> Config | None:
    """Return the config.json made of the GGUF files at a path; None where there are none.

    Raise as `GgufFile.index` does.
    """
    if not holds_gguf(path, mounts):
        return None
    names: list[str] = []
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir() if entry.suffix == ".gguf")
    return config_of(whole(headers_of(str(path), path.is_dir(), names, mounts)))


def _scaled(entries: Sequence[GgufTensor]) -> frozenset[str]:
    """Return the names of tensors in blocks beside which a scale of the whole tensor lies."""
    stems = {e.name.removesuffix(SCALE) for e in entries if e.name.endswith(SCALE)}
    blocks = (e.name for e in entries if stems and not e.type.dtype)
    return frozenset(name for name in blocks if name.removesuffix(".weight") in stems)


def _is_decoded(entry: GgufTensor, scaled: frozenset[str]) -> bool:
    return entry.type.decoded and entry.name not in scaled


def _leaves(
    headers: Sequence[GgufHeader], scaled: frozenset[str]
) -> PlainTensors | dict[Path, Leaf]:
    placed = [(entry, header.file) for header in headers for entry in header.tensors]
    kept = [(e, file) for e, file in placed if e.type.dtype or _is_decoded(e, scaled)]
    infos: dict[TensorInfo, TensorInfo] = {}
    stored = [_stored(entry) for entry, _ in kept]
    tensors = PlainTensors(
        [entry.name for entry, _ in kept],
        [infos.setdefault(info, info) for info in stored],
        Extents([file for _, file in kept], [e.offset for e, _ in kept], [None] * len(kept)),
    )
    if len(kept) == len(placed):
        return tensors
    undecoded: dict[Path, Leaf] = {
        (entry.name,): Opaque(
            "ggml",
            f"{entry.type.name} beside a scale of the tensor"
            if entry.name in scaled
            else entry.type.name,
            info=TensorInfo(entry.shape, VALUES),
        )
        for entry, _ in placed
        if not entry.type.dtype and not _is_decoded(entry, scaled)
    }
    return {**dict(tensors.items()), **undecoded}


def _stored(entry: GgufTensor) -> TensorInfo:
    """Return shape and dtype of the bytes of a tensor as they lie in the file."""
    if entry.type.dtype:
        return TensorInfo(entry.shape, entry.type.dtype)
    *rows, width = entry.shape
    return TensorInfo((*rows, width // entry.type.numel * entry.type.nbytes), "uint8")


def _record(entry: GgufTensor) -> dict[str, object]:
    return {
        "scheme": "gguf",
        "version": 1,
        "type": entry.type.name,
        "shape": list(entry.shape),
        "dtype": VALUES,
    }
