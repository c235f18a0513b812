"""The manifest of an output: where each tensor lies, the digest of its bytes, and how it was made.

A directory has it as the file `ckptmap.manifest.json`, a one-file output as a record of its zip. Its
member `tensors` lists the stored tensors by dotted key, `logical` the tensors that they make by FQN.
`ckptmap verify` compares an output with its manifest.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple, Protocol

from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.slot_columns import Slots
from ckptmap.core.state_paths import join, logical_key
from ckptmap.errors import SourceError
from ckptmap.execution.manifest_schema import malformed
from ckptmap.planning.conversion import Conversion, Steps
from ckptmap.planning.file_plan import FilePlan
from ckptmap.planning.plan import Plan
from ckptmap.protocols import CarriedFile, Slot
from ckptmap.version import __version__

SCHEMA = 1
NAME = "ckptmap.manifest.json"
BATCH = 1000
"""Entries that are encoded as JSON at once."""


class Digests(Protocol):
    """The digests of what was written: `digests[file][slot]`, xxh3 as 16 hex digits."""

    @property
    def digests(self) -> Sequence[Sequence[str]]: ...


def build(plan: Plan, done: Digests, sha256: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the manifest of a plan that was carried out.

    It names no absolute path of this machine, but it does name a source on the Hub. Entries of
    tensors are made when they are asked for; their offsets and sizes are the plan's own tuples,
    where `parse` returns lists."""
    return {
        "schema": SCHEMA,
        "ckptmap": __version__,
        "plan": plan.digest,
        "setup": plan.aim.text,
        "container": plan.aim.setup.writer,
        "world_size": plan.world_size,
        "source": {"container": plan.ckpt.index.container, "setup": plan.ckpt.setup}
        | ({"origin": plan.ckpt.origin} if plan.ckpt.origin else {}),
        **({} if plan.ckpt.translated is None else {"names": dict(plan.ckpt.translated)}),
        **({} if plan.ckpt.merged is None else {"merged": dict(plan.ckpt.merged)}),
        "files": _files(plan, sha256 or {}),
        "carried": {name: _digest(sibling) for name, sibling in sorted(plan.carried.items())},
        "tensors": Tensors(plan, done),
        "logical": Logical(plan.steps),
        "records": dict(plan.records),
        "dropped": dict(plan.dropped),
        "tied": dict(plan.tied),
    }  # fmt: skip


def emit(document: Mapping[str, object]) -> bytes:
    """Return the manifest as JSON, UTF-8."""
    out, mark = BytesIO(), "{"
    with paused_gc():  # entries hold no cycles; the collector took a fifth of the time
        for key, value in document.items():
            out.write(f"{mark}{_json(key)}:".encode())
            for piece in _pieces(value):
                out.write(piece.encode())
            mark = ","
    out.write(b"}")
    return out.getvalue()


def _pieces(value: object) -> Iterator[str]:
    """Yield the JSON of one member; a large member in batches.

    The encoder keeps every token of what it is given until it is done, which takes many times the
    size of the text."""
    if not isinstance(value, Mapping):
        yield _json(value)
        return
    entries = value.entries() if isinstance(value, Tensors) else iter(value.items())
    mark = ""
    yield "{"
    while batch := dict(islice(entries, BATCH)):
        yield mark + _json(batch)[1:-1]
        mark = ","
    yield "}"


_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False).encode


def _files(plan: Plan, sha256: Mapping[str, str]) -> dict[str, Any]:
    """Return sizes and digests of the files; a file that holds the manifest cannot state its own size."""
    return {
        file.out.name: {"nbytes": file.out.nbytes} | ({"sha256": sha256[file.out.name]} if file.out.name in sha256 else {})
        for file in plan.files
        if not file.out.holds_manifest
    }  # fmt: skip


class ChunkRow(NamedTuple):
    """One chunk of a stored tensor, as the manifest lists it: `nbytes` bytes from byte `offset` of
    `file` on hold the box at `offsets` of `sizes` elements; `digest` is the xxh3 of these bytes."""

    file: str
    offset: int
    nbytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    digest: str


class Tensors(Mapping[str, dict[str, Any]]):
    """Stored key -> the tensor's FQN and its chunks.

    An entry is made when it is asked for: 100,000 entries as dicts would take 100 MB.
    """

    def __init__(self, plan: Plan, done: Digests) -> None:
        self._fqns = plan.keys
        self._files, self._digests = plan.files, done.digests
        self._starts = list(accumulate([len(file.slots) for file in plan.files], initial=0))
        keys = chain.from_iterable(self._keys(file) for file in plan.files)
        self._slots = _by_key(list(keys))
        """Key -> the slots of its chunks, counted over all files."""

    def _keys(self, file: FilePlan) -> list[str]:
        return [join(path) for path in file.slots.paths]

    def alone(self) -> Iterator[tuple[str, list[str], Slots]] | None:
        """Return each file's name, the keys of the tensors in it and their slots; None if some
        tensor has more than one chunk."""
        if len(self._slots) < self._starts[-1]:
            return None
        return ((file.out.name, self._keys(file), file.slots) for file in self._files)

    def places(self) -> Iterator[tuple[str, list[tuple[str, Slot]]]]:
        """Yield each key with the file and slot of every chunk."""
        for key, numbers in self._slots.items():
            located = [self._locate(number) for number in numbers]
            yield key, [(file.out.name, file.slots[slot]) for file, slot, _ in located]

    def entries(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each key with its entry."""
        if len(self._slots) < self._starts[-1]:
            yield from self.items()
            return
        keys = iter(self._slots)
        for file, digests in zip(self._files, self._digests, strict=True):
            fqns = map(self._fqns.__getitem__, file.slots.paths)
            for fqn, row, key in zip(fqns, _rows(file, digests), keys, strict=False):
                yield key, {"fqn": fqn, "chunks": [row]}

    def __getitem__(self, key: str) -> dict[str, Any]:
        rows = []
        for number in self._slots[key]:
            file, slot, digests = self._locate(number)
            path, box, offset, nbytes = file.slots[slot]
            rows.append(ChunkRow(file.out.name, offset, nbytes, *box, digests[slot]))
        return {"fqn": self._fqns[path], "chunks": rows}

    def _locate(self, number: int) -> tuple[FilePlan, int, Sequence[str]]:
        """Return the file of a slot, its number in the file, and the digests of the file."""
        file = bisect_right(self._starts, number) - 1
        return self._files[file], number - self._starts[file], self._digests[file]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


def _rows(file: FilePlan, digests: Sequence[str]) -> Iterator[ChunkRow]:
    """Yield the rows of a file in the order of its slots."""
    slots, name = file.slots, file.out.name
    for offset, nbytes, box, digest in zip(
        slots.offsets, slots.sizes, slots.boxes, digests, strict=True
    ):
        yield ChunkRow(name, offset, nbytes, *box, digest)


def _by_key(keys: Sequence[str]) -> Mapping[str, Sequence[int]]:
    """Return where in `keys` each key stands."""
    found: dict[str, Sequence[int]] = dict(
        zip(keys, zip(range(len(keys)), strict=False), strict=True)
    )
    if len(found) == len(keys):  # every tensor is one chunk, as in most outputs
        return found
    several: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        several.setdefault(key, []).append(number)
    return several


class Logical(Mapping[str, dict[str, Any]]):
    """Role and FQN, as `logical_key` writes them -> how the tensor came to be."""

    def __init__(self, steps: Steps) -> None:
        keys = [
            fqn if kind.role == "model" and ":" not in fqn else logical_key(kind.role, fqn)
            for fqn, kind in zip(steps.fqns, steps.conversions, strict=True)
        ]
        self._kinds: dict[str, Conversion] = dict(zip(keys, steps.conversions, strict=True))

    def __getitem__(self, key: str) -> dict[str, Any]:
        kind = self._kinds[key]
        return {
            "shape": kind.shape,
            "source": kind.source,
            "target": kind.target,
            "fidelity": kind.fidelity,
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


def _digest(file: CarriedFile) -> dict[str, Any]:
    import xxhash

    digest = xxhash.xxh3_64()
    for piece in file.pieces():
        digest.update(piece)
    return {"nbytes": file.nbytes, "xxh3": digest.hexdigest()}


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Return the manifest in `data`. Raises SourceError CKM403 if it is none, or of another version."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            "CKM403", f"{where}: its manifest is not valid JSON: {error}", "convert again"
        ) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        schema = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise SourceError(
            "CKM403",
            f"{where}: manifest schema {schema}, expected {SCHEMA}",
            "use the ckptmap that wrote it",
        )
    place = malformed(document)
    if place:
        raise SourceError(
            "CKM403",
            f"{where}: its manifest is damaged at {place}, expected what ckptmap writes",
            "convert again",
        )
    return document
