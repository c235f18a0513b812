"""The manifest: what lies where in an output, with digests, and how each tensor came to be.

A directory carries it as `ckptmap.manifest.json`, a one-file output inside its zip. `tensors` are
stored tensors by their dotted key, `logical` the tensors that they make by plain FQN.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ckptmap.errors import SourceError
from ckptmap.plans import Plan
from ckptmap.tensors import Path
from ckptmap.version import __version__

SCHEMA = 1
NAME = "ckptmap.manifest.json"


class Digests(Protocol):
    """What was written: `digests[file][slot]`."""

    @property
    def digests(self) -> Sequence[Sequence[str]]: ...


def build(plan: Plan, done: Digests, sha256: Mapping[str, str] | None = None) -> bytes:
    """The manifest's JSON; no absolute path of this machine gets into it."""
    document = {
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
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _files(plan: Plan, sha256: Mapping[str, str]) -> dict[str, Any]:
    """A file that holds the manifest cannot state its own size."""
    return {
        file.out.name: {"nbytes": file.out.nbytes} | ({"sha256": sha256[file.out.name]} if file.out.name in sha256 else {})
        for file in plan.files
        if not file.out.holds_manifest
    }  # fmt: skip


def _tensors(plan: Plan, done: Digests) -> dict[str, Any]:
    infos: dict[Path, dict[str, Any]] = {}
    for number, file in enumerate(plan.files):
        for index, slot in enumerate(file.out.slots):
            entry = infos.setdefault(slot.path, {"fqn": plan.keys[slot.path], "chunks": []})
            entry["chunks"].append(
                [
                    file.out.name, slot.offset, slot.nbytes, slot.box.offsets, slot.box.sizes,
                    done.digests[number][index],
                ]
            )  # fmt: skip
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
