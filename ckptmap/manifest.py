"""The manifest: what lies where in an output, with digests, and how each tensor came to be.

A directory carries it as `ckptmap.manifest.json`, a one-file output inside its zip. `tensors` are
stored tensors by their dotted key, `logical` the tensors that they make by plain FQN.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from ckptmap.errors import SourceError
from ckptmap.plans import Plan
from ckptmap.tensors import Path
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
    """The manifest; no absolute path of this machine gets into it. It shares offsets and sizes
    with the plan: as tuples, where `parse` gives lists."""
    return {
        "schema": SCHEMA,
        "ckptmap": __version__,
        "plan": plan.digest,
        "setup": plan.aim.text,
        "container": plan.aim.setup.writer,
        "world_size": plan.world_size,
        "source": {"container": plan.ckpt.index.container, "setup": plan.ckpt.setup},
        "files": _files(plan, sha256 or {}),
        "carried": {name: _digest(content) for name, content in sorted(plan.carried.items())},
        "tensors": _tensors(plan, done),
        "logical": {
            f"{step.role}:{step.fqn}" if step.role != "model" else step.fqn: {
                "shape": step.shape, "source": step.source, "target": step.target,
                "fidelity": step.fidelity,
            }
            for step in plan.steps
        },
        "records": dict(plan.records),
        "dropped": dict(plan.dropped),
        "tied": dict(plan.tied),
    }  # fmt: skip


def emit(document: Mapping[str, Any]) -> bytes:
    """Its JSON."""
    return "".join(["{", ",".join(_members(document)), "}"]).encode()


def _members(document: Mapping[str, Any]) -> Iterator[str]:
    """Members of a JSON object, large ones in batches: the encoder keeps every token of what it is
    given, many times the size of the text."""
    for key, value in document.items():
        if not (isinstance(value, dict) and len(value) > BATCH):
            yield f"{_json(key)}:{_json(value)}"
            continue
        keys = list(value)
        batches = ({k: value[k] for k in keys[i : i + BATCH]} for i in range(0, len(keys), BATCH))
        yield f"{_json(key)}:{{{','.join(_json(batch)[1:-1] for batch in batches)}}}"


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _files(plan: Plan, sha256: Mapping[str, str]) -> dict[str, Any]:
    """A file that holds the manifest cannot state its own size."""
    return {
        file.out.name: {"nbytes": file.out.nbytes} | ({"sha256": sha256[file.out.name]} if file.out.name in sha256 else {})
        for file in plan.files
        if not file.out.holds_manifest
    }  # fmt: skip


def _tensors(plan: Plan, done: Digests) -> dict[str, Any]:
    infos: dict[Path, dict[str, Any]] = {}
    for file, digests in zip(plan.files, done.digests, strict=True):
        name = file.out.name
        for slot, digest in zip(file.out.slots, digests, strict=True):
            entry = infos.get(slot.path)
            if entry is None:
                entry = infos[slot.path] = {"fqn": plan.keys[slot.path], "chunks": []}
            box = slot.box
            chunk = (name, slot.offset, slot.nbytes, box.offsets, box.sizes, digest)
            entry["chunks"].append(chunk)
    return {".".join(map(str, path)): entry for path, entry in infos.items()}


def _digest(content: bytes) -> dict[str, Any]:
    import xxhash

    return {"nbytes": len(content), "xxh3": xxhash.xxh3_64_hexdigest(content)}


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Raises SourceError CKM403 where it is no manifest of a version that this release reads."""
    try:
        document = json.loads(data)
    except ValueError as error:
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
    return document
