"""The manifest of an output: where each tensor lies, the digest of its bytes, and how it was made.

A directory has it as the file `ckptmap.manifest.json`, a one-file output as a record of its zip. Its
member `tensors` lists the stored tensors by dotted key, `logical` the tensors that they make by FQN.
`ckptmap verify` compares an output with its manifest.

Three members state digests (xxh3, 64 bits, 16 hex digits) of what is no chunk of a tensor:

    files[NAME].around   the bytes of the file that belong to no chunk
    around               the same for a one-file output, less the manifest itself and its CRC-32s
    self                 the last member: the bytes of the manifest before `,"self":`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import accumulate, chain, islice
from operator import sub
from typing import Protocol, cast

from ckptmap.core.columns import Columns, each
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.state_paths import join, logical_key
from ckptmap.planning.conversion import Conversion, Steps
from ckptmap.planning.plan import Plan
from ckptmap.protocols import CarriedFile
from ckptmap.storage.manifest_file import (
    AROUND,
    NOT_TAKEN,
    SCHEMA,
    SELF,
    SELF_END_NBYTES,
    ChunkRow,
    self_end,
)
from ckptmap.storage.manifest_schema import ListedConversion, ListedTensor, ManifestDocument
from ckptmap.storage.own_files import MANIFEST
from ckptmap.tensors import Box, Path
from ckptmap.version import __version__

NAME = MANIFEST
_AROUND_TEXT = f',"{AROUND}":"%s"'
END_NBYTES = len(_AROUND_TEXT % NOT_TAKEN) + SELF_END_NBYTES
"""The last bytes of the manifest of a one-file output: `around`, `self` and the brace."""
BATCH = 1000
"""Entries whose texts are joined at once."""


class Digests(Protocol):
    """The digests of what was written: `digests[file][slot]`, xxh3 as 16 hex digits."""

    @property
    def digests(self) -> Sequence[Sequence[str]]: ...


def build(
    plan: Plan,
    done: Digests,
    sha256: Mapping[str, str] | None = None,
    around: Mapping[str, str] | None = None,
) -> ManifestDocument:
    """Return the manifest of a plan that was carried out.

    `sha256` and `around` are digests by file: of all bytes, and of those that belong to no tensor.
    The manifest of a one-file output is made before these can be digested, see `with_around`.

    It names no absolute path of this machine, but it does name a source on the Hub. Entries of
    tensors are made when they are asked for; their offsets and sizes are the plan's own tuples,
    where `parse` returns lists."""
    document = {
        "schema": SCHEMA,
        "ckptmap": __version__,
        "plan": plan.digest,
        "setup": plan.aim.text,
        "container": plan.aim.setup.writer,
        "world_size": plan.world_size,
        "source": {"container": plan.ckpt.index.container, "setup": plan.ckpt.setup}
        | ({"origin": plan.ckpt.origin} if plan.ckpt.origin else {}),
        **({"renamed": renamings} if (renamings := [one.record() for one in plan.ckpt.renamings]) else {}),
        **({} if plan.ckpt.translated is None else {"names": dict(plan.ckpt.translated)}),
        **({} if plan.ckpt.merged is None else {"merged": dict(plan.ckpt.merged)}),
        "files": _files(plan, sha256 or {}, around or {}),
        "carried": {name: _digest(sibling) for name, sibling in sorted(plan.carried.items())},
        "tensors": ManifestTensors(plan, done),
        "logical": Logical(plan.steps),
        "records": dict(plan.records),
        "dropped": dict(plan.dropped),
        "tied": dict(plan.tied),
        **({AROUND: NOT_TAKEN} if plan.one_file else {}),
    }  # fmt: skip
    return cast(ManifestDocument, document)


def emit(document: Mapping[str, object]) -> bytes:
    """Return the manifest as JSON, UTF-8, with the digest of itself as its last member."""
    out, mark = BytesIO(), "{"
    with paused_gc():  # entries hold no cycles; the collector took a fifth of the time
        for key, value in document.items():
            if key == SELF:
                continue
            out.write(f"{mark}{_json(key)}:".encode())
            for piece in _pieces(value):
                out.write(piece.encode())
            mark = ","
    with out.getbuffer() as body:
        end = self_end(body)
    out.write(end)
    return out.getvalue()


def with_around(data: bytes, around: str) -> bytes:
    """Return the manifest of a one-file output, of the same length, with this digest in `around`.

    `data` is the manifest as it was written, whose last members are `around` and `self`. The digest
    is of bytes that stand around the manifest, so it comes to be only after `data` was written.
    """
    body = data[:-END_NBYTES] + (_AROUND_TEXT % around).encode()
    return body + self_end(body)


def _pieces(value: object) -> Iterator[str]:
    """Yield the JSON of one member; a large member in batches, so that few strings exist at once."""
    if not isinstance(value, Mapping):
        yield _json(value)
        return
    entries = value.texts() if isinstance(value, ManifestTensors | Logical) else _texts(value)
    mark = ""
    yield "{"
    while batch := list(islice(entries, BATCH)):
        yield mark + ",".join(batch)
        mark = ","
    yield "}"


def _texts(entries: Mapping[str, object]) -> Iterator[str]:
    """Yield each key with its value, as JSON: `"key":value`."""
    return (f"{_quoted(key)}:{_json(value)}" for key, value in entries.items())


_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False).encode
_quoted = json.encoder.encode_basestring


def _files(
    plan: Plan, sha256: Mapping[str, str], around: Mapping[str, str]
) -> dict[str, dict[str, object]]:
    """Return sizes and digests of the files; a file that holds the manifest cannot state its own size."""
    files: dict[str, dict[str, object]] = {}
    for file in plan.files:
        name = file.out.name
        if file.out.holds_manifest:
            continue
        entry = files[name] = {"nbytes": file.out.nbytes, AROUND: around.get(name, NOT_TAKEN)}
        if name in sha256:
            entry["sha256"] = sha256[name]
    return files


@dataclass(frozen=True, slots=True, eq=False)
class ManifestChunks(Columns[ChunkRow]):
    """The chunks of a manifest as columns."""

    files: Sequence[str]
    offsets: Sequence[int]
    sizes: Sequence[int]
    boxes: Sequence[Box]
    digests: Sequence[str]

    @staticmethod
    def row(file: str, offset: int, nbytes: int, box: Box, digest: str) -> ChunkRow:
        return ChunkRow(file, offset, nbytes, *box, digest)

    @classmethod
    def planned(cls, plan: Plan, done: Digests) -> ManifestChunks:
        """Return the chunks of all slots of a plan, in order."""
        chunks = cls([], [], [], [], [])
        for file, digests in zip(plan.files, done.digests, strict=True):
            slots = file.slots
            names = [file.out.name] * len(slots)
            chunks.extend(names, slots.offsets, slots.sizes, slots.boxes, digests)
        return chunks

    def texts(self) -> Iterator[str]:
        """Yield each row as JSON."""
        files = each(self.files, _quoted)
        boxes = each(self.boxes, lambda box: _json(box)[1:-1])
        columns = zip(files, self.offsets, self.sizes, boxes, self.digests, strict=True)
        return map('[%s,%d,%d,%s,"%s"]'.__mod__, columns)


class ManifestTensors(Mapping[str, ListedTensor]):
    """Stored key -> the tensor's FQN and its chunks.

    An entry is made when it is asked for: 100,000 entries as dicts would take 100 MB.
    """

    def __init__(self, plan: Plan, done: Digests) -> None:
        paths = [path for file in plan.files for path in file.slots.paths]
        self.chunks = ManifestChunks.planned(plan, done)
        """The chunks of all tensors, those of one tensor together."""
        self._starts: Sequence[int] = range(len(paths) + 1)
        """The chunks of tensor i are those from number `_starts[i]` to `_starts[i + 1]`."""
        if len(set(paths)) < len(paths):  # some tensor has several chunks, which may be in any file
            numbers: dict[Path, list[int]] = {}
            for number, path in enumerate(paths):
                numbers.setdefault(path, []).append(number)
            self.chunks = self.chunks.take(list(chain.from_iterable(numbers.values())))
            self._starts = list(accumulate(map(len, numbers.values()), initial=0))
            paths = list(numbers)
        self._keys = list(map(join, paths))
        self._fqns = list(map(plan.keys.__getitem__, paths))

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return dict(zip(self._keys, range(len(self._keys)), strict=True))

    def alone(self) -> tuple[Sequence[str], ManifestChunks] | None:
        """Return the keys and the chunk of each; None if some tensor has more than one."""
        return (self._keys, self.chunks) if len(self._keys) == len(self.chunks) else None

    def texts(self) -> Iterator[str]:
        """Yield each entry with its key, as JSON."""
        chunks = self.chunks.texts()
        counts = map(sub, self._starts[1:], self._starts)
        for key, fqn, count in zip(
            map(_quoted, self._keys), map(_quoted, self._fqns), counts, strict=True
        ):
            yield f'{key}:{{"fqn":{fqn},"chunks":[{",".join(islice(chunks, count))}]}}'

    def __getitem__(self, key: str) -> ListedTensor:
        number = self._numbers[key]
        first, stop = self._starts[number : number + 2]
        return {"fqn": self._fqns[number], "chunks": list(self.chunks[first:stop])}

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class Logical(Mapping[str, ListedConversion]):
    """Role and FQN, as `logical_key` writes them -> how the tensor came to be."""

    def __init__(self, steps: Steps) -> None:
        keys = [
            fqn if kind.role == "model" and ":" not in fqn else logical_key(kind.role, fqn)
            for fqn, kind in zip(steps.fqns, steps.conversions, strict=True)
        ]
        self._kinds: dict[str, Conversion] = dict(zip(keys, steps.conversions, strict=True))

    def texts(self) -> Iterator[str]:
        """Yield each entry with its key, as JSON."""
        kinds = each(self._kinds.values(), lambda kind: _json(_entry(kind)))
        return map("%s:%s".__mod__, zip(map(_quoted, self._kinds), kinds, strict=True))

    def __getitem__(self, key: str) -> ListedConversion:
        return _entry(self._kinds[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


def _entry(kind: Conversion) -> ListedConversion:
    return {
        "shape": kind.shape,
        "source": kind.source,
        "target": kind.target,
        "fidelity": kind.fidelity,
    }


def _digest(file: CarriedFile) -> dict[str, object]:
    import xxhash

    digest = xxhash.xxh3_64()
    for piece in file.pieces():
        digest.update(piece)
    return {"nbytes": file.nbytes, "xxh3": digest.hexdigest()}
