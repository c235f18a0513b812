"""The manifest: what lies where in an output, with digests, and how each tensor came to be.

A directory carries it as `ckptmap.manifest.json`, a one-file output inside its zip. `tensors` are
stored tensors by their dotted key, `logical` the tensors that they make by plain FQN.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import islice
from typing import Any, Protocol

from ckptmap.core.slot_columns import Slots
from ckptmap.core.state_paths import logical_key
from ckptmap.errors import SourceError
from ckptmap.execution.manifest_schema import malformed
from ckptmap.planning.conversion import Conversion, Steps
from ckptmap.planning.plan import Plan
from ckptmap.protocols import CarriedFile, Slot
from ckptmap.tensors import Box, Path
from ckptmap.version import __version__

SCHEMA = 1
NAME = "ckptmap.manifest.json"
BATCH = 1000
"""Entries that are turned into JSON at once."""


class Digests(Protocol):
    """What was written: `digests[file][slot]`."""

    @property
    def digests(self) -> Sequence[Sequence[str]]: ...


def build(plan: Plan, done: Digests, sha256: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The manifest; no absolute path of this machine gets into it, a place on the Hub does. Entries
    of tensors are made when asked for, and share offsets and sizes with the plan: as tuples, where
    `parse` gives lists."""
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
        "logical": _Logical(plan.steps),
        "records": dict(plan.records),
        "dropped": dict(plan.dropped),
        "tied": dict(plan.tied),
    }  # fmt: skip


def emit(document: Mapping[str, Any]) -> bytes:
    """Its JSON."""
    out, mark = BytesIO(), "{"
    for key, value in document.items():
        out.write(f"{mark}{_json(key)}:".encode())
        for piece in _pieces(value):
            out.write(piece.encode())
        mark = ","
    out.write(b"}")
    return out.getvalue()


def _pieces(value: Any) -> Iterator[str]:
    """The JSON of a member, a large one in batches: the encoder keeps every token of what it is
    given, many times the size of the text."""
    if not (isinstance(value, Mapping) and len(value) > BATCH):
        yield _json(dict(value) if isinstance(value, _Entries) else value)
        return
    texts = value.texts() if isinstance(value, _Entries) else _texts(value)
    mark = "{"
    while some := list(islice(texts, BATCH)):
        yield mark + ",".join(some)
        mark = ","
    yield "}"


def _texts(value: Mapping[str, Any]) -> Iterator[str]:
    return (_json({key: item})[1:-1] for key, item in value.items())


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _files(plan: Plan, sha256: Mapping[str, str]) -> dict[str, Any]:
    """A file that holds the manifest cannot state its own size."""
    return {
        file.out.name: {"nbytes": file.out.nbytes} | ({"sha256": sha256[file.out.name]} if file.out.name in sha256 else {})
        for file in plan.files
        if not file.out.holds_manifest
    }  # fmt: skip


class _Entries(Mapping[str, dict[str, Any]]):
    """A member of the manifest that has an entry for every tensor: 100,000 of them as dicts would
    take 100 MB, so each is made when it is asked for."""

    _found: Mapping[str, Any]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def texts(self) -> Iterator[str]:
        """The entries with their keys, as JSON."""
        raise NotImplementedError


class Tensors(_Entries):
    """Key -> fqn, and (file, offset, nbytes, offsets, sizes, digest) of each chunk."""

    def __init__(self, plan: Plan, done: Digests) -> None:
        self._fqns = plan.keys
        self._outs = [
            (file.out.name, file.slots, digests)
            for file, digests in zip(plan.files, done.digests, strict=True)
        ]
        self._keys = [_keys(slots.paths) for _, slots, _ in self._outs]
        self._found: dict[str, int | tuple[int, ...]] = {}  # key -> file << 32 | slot, of each
        found, count = self._found, 0
        for number, keys in enumerate(self._keys):
            found.update(zip(keys, range(number << 32, (number << 32) + len(keys)), strict=True))
            count += len(keys)
        self._single = len(found) == count
        """Is every tensor one chunk? Nearly all are, in most outputs."""
        if not self._single:
            self._gather()

    def _gather(self) -> None:
        """All chunks of every key."""
        found = self._found
        found.clear()
        for number, keys in enumerate(self._keys):
            for place, key in enumerate(keys, number << 32):
                known = found.setdefault(key, place)
                if known != place:
                    found[key] = (*known, place) if isinstance(known, tuple) else (known, place)

    def alone(self) -> Iterator[tuple[str, list[str], Slots]] | None:
        """Each file, the keys of the tensors in it, and where these were planned; None where a
        tensor is more than one chunk."""
        if not self._single:
            return None
        outs = zip(self._outs, self._keys, strict=True)
        return ((name, keys, slots) for (name, slots, _), keys in outs)

    def places(self) -> Iterator[tuple[str, list[tuple[str, Slot]]]]:
        """Key, and where each chunk was planned: file and slot."""
        for key in self._found:
            yield key, [(name, slot) for name, slot, _ in self._chunks(key)]

    def _chunks(self, key: str) -> list[tuple[str, Slot, str]]:
        """File, slot and digest of each."""
        found = self._found[key]
        chunks = []
        for place in found if isinstance(found, tuple) else (found,):
            name, slots, digests = self._outs[place >> 32]
            index = place & 0xFFFFFFFF
            chunks.append((name, slots[index], digests[index]))
        return chunks

    def __getitem__(self, key: str) -> dict[str, Any]:
        found = self._chunks(key)
        chunks = [(name, at, n, *box, digest) for name, (_, box, at, n), digest in found]
        return {"fqn": self._fqns[found[0][1].path], "chunks": chunks}

    def texts(self) -> Iterator[str]:
        return self._texts_alone() if self._single else map(self._text, self._found)

    def _texts_alone(self) -> Iterator[str]:
        """The same side by side."""
        for (name, slots, digests), keys in zip(self._outs, self._keys, strict=True):
            form = f'%s:{{"fqn":%s,"chunks":[[{_quoted(name).replace("%", "%%")},%d,%d,%s,"%s"]]}}'
            fqns = list(map(self._fqns.__getitem__, slots.paths))
            quoted = list(map(_quoted, keys))
            names = quoted if fqns == keys else map(_quoted, fqns)
            boxes = map(_box, slots.boxes)
            columns = zip(quoted, names, slots.offsets, slots.sizes, boxes, digests, strict=True)
            yield from map(form.__mod__, columns)

    def _text(self, key: str) -> str:
        found = self._chunks(key)
        chunks = [
            f'[{_quoted(name)},{at},{n},{_box(box)},"{digest}"]'
            for name, (_, box, at, n), digest in found
        ]
        fqn = self._fqns[found[0][1].path]
        return f'{_quoted(key)}:{{"fqn":{_quoted(fqn)},"chunks":[{",".join(chunks)}]}}'


class _Logical(_Entries):
    """Role and FQN, as `logical_key` writes them -> how the tensor came to be."""

    def __init__(self, steps: Steps) -> None:
        keys = [
            fqn if kind.role == "model" and ":" not in fqn else logical_key(kind.role, fqn)
            for fqn, kind in zip(steps.fqns, steps.conversions, strict=True)
        ]
        self._found: dict[str, Conversion] = dict(zip(keys, steps.conversions, strict=True))

    def __getitem__(self, key: str) -> dict[str, Any]:
        shape, source, target, fidelity = self._found[key][1:5]
        return {"shape": shape, "source": source, "target": target, "fidelity": fidelity}

    def texts(self) -> Iterator[str]:
        entries = {id(kind): _logical(kind[1:5]) for kind in self._found.values()}
        texts = map(entries.__getitem__, map(id, self._found.values()))
        return map("%s:%s".__mod__, zip(map(_quoted, self._found), texts, strict=True))


_quoted = json.encoder.encode_basestring


@lru_cache(maxsize=4096)
def _logical(words: tuple[Any, ...]) -> str:
    return _json(dict(zip(("shape", "source", "target", "fidelity"), words, strict=True)))


@lru_cache(maxsize=4096)
def _box(box: Box) -> str:
    return f"{_json(box.offsets)},{_json(box.sizes)}"


def _keys(paths: Sequence[Path]) -> list[str]:
    try:
        return list(map(".".join, paths))  # type: ignore[arg-type]
    except TypeError:  # an integer among the segments
        return [".".join(map(str, path)) for path in paths]


def _digest(file: CarriedFile) -> dict[str, Any]:
    import xxhash

    digest = xxhash.xxh3_64()
    for piece in file.pieces():
        digest.update(piece)
    return {"nbytes": file.nbytes, "xxh3": digest.hexdigest()}


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Raises SourceError CKM403 where it is no manifest of a version that this release reads."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            "CKM403", f"{where}: its manifest is no JSON: {error}", "convert again"
        ) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise SourceError(
            "CKM403",
            f"{where}: manifest schema {found}, expected {SCHEMA}",
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
