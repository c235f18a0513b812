"""Check a manifest when it is read: types, ranges and names of every entry.

A manifest is a file like any other, and may have been cut, edited or made by somebody else; nothing
in it is used before this check has passed.

    {"tensors": {key: {"fqn": str, "chunks": [[file, offset, nbytes, offsets, sizes, digest], ...]}},
     "logical": {key: {"shape": [int, ...], "source": str, "target": str, "fidelity": str}},
     "files": {name: {"nbytes": int, "around": digest}}, "self": digest, ...}

The digests `around` and `self` are in all manifests or in none: early releases wrote none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, NotRequired, TypedDict, TypeGuard


class ListedFile(TypedDict):
    """A file with tensors: its size, and digests of the bytes around them and of all bytes."""

    nbytes: int
    around: NotRequired[str]
    sha256: NotRequired[str]


class ListedSibling(TypedDict):
    """A file beside the weights."""

    nbytes: int
    xxh3: str


class ListedTensor(TypedDict):
    """A stored tensor: the tensor that it is a part of, and its chunks, as `manifest_file.ChunkRow` names their values."""

    fqn: str
    chunks: Sequence[Sequence[Any]]


class ListedConversion(TypedDict):
    """A logical tensor, and how it was converted."""

    shape: Sequence[int]
    source: str
    target: str
    fidelity: str


class ListedMerge(TypedDict):
    """The adapter that was merged into the weights: what of it was left, the heads that it untied, and whether square
    matrices of experts were taken as [in, out]."""

    leave: NotRequired[Sequence[str]]
    untied: NotRequired[Mapping[str, str]]
    in_out: NotRequired[bool]


class ManifestDocument(TypedDict):
    """A manifest. What `malformed` does not look at is an `object`."""

    schema: int
    ckptmap: object
    plan: object
    setup: str
    container: object
    world_size: object
    source: Mapping[str, str]
    renamed: NotRequired[object]
    names: NotRequired[Mapping[str, Any] | None]
    merged: NotRequired[ListedMerge | None]
    files: Mapping[str, ListedFile]
    carried: Mapping[str, ListedSibling]
    tensors: Mapping[str, ListedTensor]
    logical: Mapping[str, ListedConversion]
    records: Mapping[str, Mapping[str, object]]
    dropped: Mapping[str, str]
    tied: Mapping[str, str]
    around: NotRequired[str]
    self: NotRequired[str]


FIDELITIES = frozenset({"bytes", "exact", "codes", "cast", "quantize", "requantize"})
LIMIT = 1 << 63
"""Counts of bytes and elements are below this."""


def malformed(document: Mapping[str, object]) -> str:
    """Return the first place where the manifest is not as ckptmap writes it; "" if there is none."""
    for member, sound in MEMBERS.items():
        held = document.get(member)
        if not isinstance(held, dict):
            return member
        for key, value in held.items():
            if not sound(value) or (member in NAMED_BY_FILE and not _is_inside(key)):
                return f"{member}: {key}"
    if not isinstance(document.get("setup"), str):
        return "setup"
    for name, sound in OPTIONAL.items():
        if not sound(document.get(name)):
            return name
    return _unstated(document)


def _unstated(document: Mapping[str, object]) -> str:
    """Return the place of a digest that is missing although the manifest has others of its kind."""
    files = document["files"]
    assert _is_dict(files)
    stated = {
        f"files: {name}": _is_dict(entry) and "around" in entry for name, entry in files.items()
    }
    if not files:
        stated["around"] = "around" in document
    stated["self"] = "self" in document
    if not any(stated.values()):
        return ""
    return next((place for place, is_stated in stated.items() if not is_stated), "")


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def _is_text_or_absent(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_dict(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and type(value) is int and 0 <= value < LIMIT


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_inside(name: object) -> bool:
    """Return whether `name` is a path below the directory of the manifest."""
    return isinstance(name, str) and _leads_inside(name)


@lru_cache(maxsize=4096)
def _leads_inside(name: str) -> bool:
    if not name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _is_file(value: object) -> TypeGuard[dict[str, object]]:
    return (
        _is_dict(value)
        and _is_count(value.get("nbytes"))
        and _is_text(value.get("sha256", ""))
        and _is_text(value.get("around", ""))
    )


def _is_carried(value: object) -> bool:
    return _is_file(value) and _is_text(value.get("xxh3"))


def _is_tensor(value: object) -> bool:
    if not _is_dict(value) or not _is_text(value.get("fqn")):
        return False
    chunks = value.get("chunks")
    return isinstance(chunks, list) and all(map(_is_chunk, chunks))


def _is_chunk(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 6:
        return False
    name, offset, nbytes, offsets, sizes, digest = value
    return (
        _is_inside(name)
        and _is_count(offset)
        and _is_count(nbytes)
        and _are_counts(offsets)
        and _are_counts(sizes)
        and len(offsets) == len(sizes)
        and _is_text(digest)
    )


def _is_conversion(value: object) -> bool:
    return (
        _is_dict(value)
        and _are_counts(value.get("shape"))
        and _is_text(value.get("source"))
        and _is_text(value.get("target"))
        and _is_text(fidelity := value.get("fidelity"))
        and fidelity in FIDELITIES
    )


def _are_names(value: object) -> bool:
    """Return whether the value is absent, or a record of translated names with its mapping files."""
    if value is None:
        return True
    return (
        _is_dict(value)
        and {"from", "to", "config", "left"} <= set(value)
        and all(value[side] is None or _is_mapping_file(value[side]) for side in ("from", "to"))
        and (value["config"] is None or _is_dict(value["config"]))
        and _is_dict(value["left"])
    )


def _is_mapping_file(value: object) -> bool:
    return _is_dict(value) and _is_text(value.get("title")) and _is_text(value.get("text"))


def _is_merged(value: object) -> bool:
    if value is None:
        return True
    if not _is_dict(value):
        return False
    leave, untied = value.get("leave", []), value.get("untied", {})
    if not isinstance(leave, list) or not _is_dict(untied):
        return False
    if not isinstance(value.get("in_out", False), bool):
        return False
    return all(map(_is_text, (*leave, *untied.values())))


MEMBERS: Mapping[str, Callable[[object], bool]] = {
    "source": _is_text, "files": _is_file, "carried": _is_carried, "tensors": _is_tensor,
    "logical": _is_conversion, "records": _is_dict, "dropped": _is_text, "tied": _is_text,
}  # fmt: skip
"""Members that are dicts, with the check of each value."""
NAMED_BY_FILE = ("files", "carried")
"""Members whose keys are paths of files."""
OPTIONAL: Mapping[str, Callable[[object], bool]] = {
    "names": _are_names, "merged": _is_merged, "around": _is_text_or_absent,
    "self": _is_text_or_absent,
}  # fmt: skip
"""Members that may be absent."""
