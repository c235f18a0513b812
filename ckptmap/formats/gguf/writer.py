"""Write a GGUF file: header with metadata and tensors' entries, tensors, and ckptmap's manifest behind them.

    "GGUF" 3, metadata, entries     made of config.json and tokenizer, or those of another GGUF file (`inner_files`)
    rope_freqs.weight and the like  factors that config.json states; llama.cpp wants them as tensors
    tensors                         each from a multiple of general.alignment (32) on, in the order of the source
    manifest                        `footer`

Where a size of files is asked for, and the model is larger, a directory of several, each with a header of its own:
the first has the metadata, all of them `split.no` and the tensors that lie in them (`splits`), and the manifest lies
beside them.

Source: ggml, docs/gguf.md; for several files gguf-py, gguf_writer.py (`split_max_size`).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.printable import advised
from ckptmap.errors import PlanError
from ckptmap.formats.gguf.block_types import BY_NAME, BlockType
from ckptmap.formats.gguf.demands import DTYPES, GgufDemands
from ckptmap.formats.gguf.description import describe
from ckptmap.formats.gguf.footer import end_of
from ckptmap.formats.gguf.header import ALIGNMENT, MAX_DIMS
from ckptmap.formats.gguf.inner_files import GgufInner
from ckptmap.formats.gguf.key_values import KeyValues, head, i32, sized, stated_u32, u16
from ckptmap.formats.gguf.splits import COUNT, NUMBER, TENSORS, runs_of, split_name
from ckptmap.protocols import OutFile, OutState, OutTensor, Setup, Slot
from ckptmap.tensors import Box

MAX_NAME_NBYTES = 63
"""Longest name of a tensor that llama.cpp reads (ggml.h, GGML_MAX_NAME, with a zero at its end)."""
ALIGN = 32
STEM, MAX_FILES = "model", 65535
"""How names of the files of a split model begin; and how many there may be: `split.count` is u16."""

GGUF = Setup(
    "gguf",
    layout="full",
    writer="gguf",
    holds_extra=False,
    names="gguf",
    inner=GgufInner(),
    demands=GgufDemands(),
    live="plain",
    summary="one GGUF file, as llama.cpp runs it: names, metadata and tokenizer are its own",
)


@dataclass(frozen=True)
class FileEntry:
    """One tensor of the file: `slot` is its tensor in the state, None for factors that the header brings along."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    nbytes: int
    slot: OutTensor | None = None
    values: bytes = b""


class GgufWriter:
    """Writes one file that llama.cpp and the `gguf` package read.

    A tensor's key is its path joined with dots. One of `state.records` is in blocks of ggml's; any other has the type
    of its dtype.
    """

    name = "gguf"
    one_file = True
    shares_storage = False

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """Return the one file, or those of a split model.

        Raise PlanError CKM114 if two tensors have one name, CKM202 for a name that llama.cpp cannot read, CKM203 for a
        dtype or encoding that GGUF has no type for.
        """
        assert not state.extra, "a GGUF file has no place for what is not a tensor"
        with paused_gc():
            tensors = [t for t in state.tensors if t.alias_of is None]
            entries = [_entry(tensor, state.records) for tensor in tensors]
            _require_names(entries)
            told = describe(state.inner, entries)
            made = [
                FileEntry(
                    n, (len(v),), BY_NAME["F32"], 4 * len(v), values=struct.pack(f"<{len(v)}f", *v)
                )
                for n, v in told.factors.items()
                if n not in {entry.name for entry in entries}
            ]
            runs = runs_of([entry.nbytes for entry in entries], state.max_shard_nbytes)
            if len(runs) == 1:
                return [_file(name, told.keys, [*made, *entries])]
            return _files(told.keys, made, [entries[run] for run in runs])


def _files(
    keys: KeyValues, made: Sequence[FileEntry], runs: Sequence[Sequence[FileEntry]]
) -> list[OutFile]:
    """Return the files of a split model: the first has the metadata, and the factors that are made of them."""
    count, tensors = len(runs), len(made) + sum(map(len, runs))
    if count > MAX_FILES:
        raise PlanError(
            "CKM203", f"the model would be split into {count} files, of which GGUF counts {MAX_FILES}",
            "allow larger files: --max-shard-size 5GB",
        )  # fmt: skip
    files = []
    for number, run in enumerate(runs):
        split = {NUMBER: u16(number), COUNT: u16(count), TENSORS: i32(tensors)}
        told = {**(keys if number == 0 else {}), **split}
        entries = [*made, *run] if number == 0 else run
        whole = _file(split_name(STEM, number, count), told, entries)
        files.append(replace(whole, holds_manifest=False))
    return files


def _entry(tensor: OutTensor, records: Mapping[str, Mapping[str, object]]) -> FileEntry:
    name, info = ".".join(map(str, tensor.path)), tensor.info
    record = records.get(name)
    if record is not None and record.get("scheme") == GGUF.name:
        shape: tuple[int, ...] = tuple(record["shape"])  # type: ignore[arg-type]
        return FileEntry(name, shape, BY_NAME[str(record["type"])], info.nbytes, tensor)
    if record is not None or info.dtype not in DTYPES:
        what = info.dtype if record is None else f"the encoding {record.get('scheme')}"
        raise PlanError(
            "CKM203",
            f"{name}: GGUF has no type of tensor for {what}, only {', '.join(DTYPES)}, and blocks",
            f"leave it out with {advised(exclude=name)}, or write floating values in another dtype: --to gguf-bf16",
        )
    return FileEntry(name, info.shape, DTYPES[info.dtype], info.nbytes, tensor)


def _require_names(entries: Sequence[FileEntry]) -> None:
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise PlanError(
            "CKM114", f"two tensors would be written as {twice!r}", "drop or rename one of them"
        )
    for entry in entries:
        problem = ""
        if len(entry.name.encode(errors="replace")) > MAX_NAME_NBYTES:
            problem = f"a name of {len(entry.name.encode(errors='replace'))} bytes, of which llama.cpp reads {MAX_NAME_NBYTES}"  # fmt: skip
        elif len(entry.shape) > MAX_DIMS:
            problem = f"{len(entry.shape)} dims, of which GGUF holds {MAX_DIMS}"
        if problem:
            raise PlanError(
                "CKM203",
                f"{entry.name}: found {problem}",
                f"leave it out with {advised(exclude=entry.name)}, or name the scheme of this model: --names-from SCHEME",
            )


def _file(name: str, keys: KeyValues, entries: Sequence[FileEntry]) -> OutFile:
    align = stated_u32(keys.get(ALIGNMENT, b"")) or ALIGN
    offsets, at = [], 0
    for entry in entries:
        offsets.append(at)
        at += -(-entry.nbytes // align) * align
    listed = b"".join(map(_listed, entries, offsets))
    start = head(keys, len(entries)) + listed
    start += bytes(-len(start) % align)
    slots, around = [], [(0, start)]
    for entry, offset in zip(entries, offsets, strict=True):
        begin = len(start) + offset
        if entry.slot is None:
            around.append((begin, entry.values))
        else:
            whole = Box.whole(entry.slot.info.shape)
            slots.append(Slot(entry.slot.path, whole, begin, entry.nbytes))
        if padding := -entry.nbytes % align:
            around.append((begin + entry.nbytes, bytes(padding)))
    nbytes = len(start) + at
    mark = sha256(b"".join(piece for _, piece in around)).hexdigest()
    return OutFile(name, nbytes, slots, _seal(around, nbytes), holds_manifest=True, mark=mark)


def _listed(entry: FileEntry, offset: int) -> bytes:
    """Return the entry of a tensor, its extents from the fastest to the slowest."""
    dims = entry.shape[::-1]
    packed = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, entry.type.number, offset)
    return sized(entry.name) + packed


def _seal(
    around: Sequence[tuple[int, bytes]], end: int
) -> Callable[[Sequence[int], bytes | None], Iterable[tuple[int, bytes]]]:
    return partial(_pieces, around, end)


def _pieces(
    around: Sequence[tuple[int, bytes]], end: int, crcs: Sequence[int], manifest: bytes | None
) -> Iterable[tuple[int, bytes]]:
    yield from around
    if manifest is not None:
        yield end, manifest
        yield end + len(manifest), end_of(manifest)
