"""Mutate a checkpoint on disk: bytes of any file, and the structure of each container and record.

A mutator changes the file or directory at a path by what `draw` says, and returns what it did. It
keeps intact what lies around the place that it changes (lengths, checksums, frames), so that a
reader gets past those and meets the change itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Mutator = Callable[[random.Random, Path], str]
INTS = (
    0, 1, -1, 2, 7, 64, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**400,
    10**5000,
)  # fmt: skip
TEXTS = (
    "", "a", ".", "..", "/etc/passwd", "../x", "a/b", "x" * 300, "\0", "line\nbreak", "\x1b[2J", "\u202e",
    "\ud800", "float32", "bfloat16", "F32", "BF16", "torch", "nf4", "fp4", "[1, 2]", "None", "1", "ü",
)  # fmt: skip


def some_file(draw: random.Random, path: Path, *suffixes: str) -> Path:
    """Draw a file at or below a path, perhaps among those with a suffix."""
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    chosen = [f for f in files if f.name.endswith(suffixes)] if suffixes else files
    return draw.choice(chosen or files)


# ------------------------------------------------------------------------------- bytes


def bytes_of_a_file(draw: random.Random, path: Path) -> str:
    """Flip, cut, blank, move or add bytes; more often near the ends, where structure is."""
    file = some_file(draw, path)
    data = bytearray(file.read_bytes())
    near = min(len(data), draw.choice((200, 4000, len(data))))
    at = draw.randrange(near or 1)
    at = len(data) - 1 - at if draw.random() < 0.4 and data else at
    length = draw.choice((1, 1, 4, 8, 100))
    kind = draw.choice(
        ("flip", "flip", "cut", "blank", "insert", "drop", "repeat", "number", "empty")
    )
    if kind == "flip" and data:
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "blank":
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == "insert":
        data[at:at] = draw.randbytes(length)
    elif kind == "drop":
        del data[at : at + length]
    elif kind == "repeat":
        data[at:at] = data[at : at + length]
    elif kind == "number":
        data[at : at + 8] = struct.pack("<Q", draw.choice(INTS[:15]) % 2**64)[: len(data) - at]
    elif kind == "empty":
        data.clear()
    file.write_bytes(data)
    return f"{kind} at {at} of {file.name}"


def files_of_a_directory(draw: random.Random, path: Path) -> str:
    """Remove, empty, rename, double or exchange files, or put something strange in their place."""
    one, two = some_file(draw, path), some_file(draw, path)
    kind = draw.choice(("remove", "rename", "copy over", "exchange", "folder", "link", "fifo"))
    if kind == "exchange":
        a, b = one.read_bytes(), two.read_bytes()
        one.write_bytes(b)
        two.write_bytes(a)
    elif kind == "copy over":
        shutil.copyfile(one, two) if one != two else None
    elif kind == "rename":
        one.rename(one.with_name(draw.choice(("x", two.name + "2", two.stem + "_1" + two.suffix))))
    else:
        one.unlink()
        if kind == "folder":
            one.mkdir()
        elif kind == "link":
            one.symlink_to(draw.choice((two.name, "/dev/zero", one.name, "/dev/null")))
        elif kind == "fifo":
            os.mkfifo(one)
    return f"{kind} {one.name} {two.name}"


def planted(draw: random.Random, path: Path) -> str:
    """Put something into the work directory of a run that did not end: a name that loaders take."""
    work = next(path.glob(".*.ckptmap-*"))
    folder = draw.choice((work, work / "out", work / "out"))
    name = draw.choice(
        ("generation_config.json", "pytorch_model.bin", "sub/x", "model.safetensors.tmp", "old")
    )
    kind = draw.choice(("file", "file", "folder", "link", "hard link", "fifo"))
    at = folder / name
    at.parent.mkdir(exist_ok=True)
    outside = path / "theirs"
    outside.write_bytes(b"theirs")
    match kind:
        case "file":
            at.write_bytes(b"{}")
        case "folder":
            at.mkdir()
        case "link":
            at.symlink_to(outside)
        case "hard link":
            at.hardlink_to(outside)
        case "fifo":
            os.mkfifo(at)
    return f"{kind} {at.relative_to(path)}"


# ------------------------------------------------------------------------------- JSON


def mutate_json(draw: random.Random, text: str, below: str = "") -> tuple[str, str]:
    """Return the document with one value changed, and what was changed; `below` names a subtree."""
    document = json.loads(text)
    inside = document.get(below, document) if below else document
    places = list(_places(inside))
    if not places:
        return "[1]", "replaced by a list"
    holder, key = draw.choice(places)
    old = holder[key]
    kind = draw.choice(("type", "near", "near", "sibling", "drop", "rename", "twice", "deep"))
    said = f"{kind} {key!r}"
    if kind == "near" and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = draw.choice((old + 1, old - 1, -old, old * 2, old // 2, float(old)))
    elif kind == "near" and isinstance(old, str) and old:
        at = draw.randrange(len(old))
        holder[key] = draw.choice((old[:at] + old[at + 1 :], old + old[at], old.upper()))
    elif kind == "near" and isinstance(old, list) and old:
        holder[key] = draw.choice((old[1:], old[::-1], [*old, old[-1]], old[:-1]))
    elif kind == "sibling":
        other, name = draw.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    elif kind == "drop":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[draw.choice((*map(str, holder), *TEXTS))] = holder.pop(key)
    elif kind == "twice" and isinstance(key, str):
        return json.dumps(document).replace(
            _pair(key, old), f"{_pair(key, 1)}, {_pair(key, old)}"
        ), said
    elif kind == "deep":
        holder[key] = "@deep@"
        return json.dumps(document).replace('"@deep@"', "[" * 1500 + "]" * 1500), said
    else:
        new = draw.choice((None, True, [], {}, 1.5, float("nan"), [[]], *INTS[:-1], *TEXTS))
        holder[key] = new
        said += f" {new!r:.30}"
    if draw.random() < 0.02:
        return json.dumps(document).replace(
            ": 1", ": 1" + "0" * 5000
        ), f"{said}, thousands of digits"
    return json.dumps(document), said


def _pair(key: str, value: object) -> str:
    return f"{json.dumps(key)}: {json.dumps(value)}"


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def json_of(suffix: str, below: str = "") -> Mutator:
    """Return the mutator of the JSON file with that name's end."""

    def mutator(draw: random.Random, path: Path) -> str:
        file = some_file(draw, path, suffix)
        text, said = mutate_json(draw, file.read_text(), below)
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        return f"{file.name}: {said}"

    return mutator


def journal(draw: random.Random, path: Path) -> str:
    """One line of a journal changed, doubled, cut, or moved."""
    file = some_file(draw, path, "journal.jsonl")
    lines = file.read_text().splitlines()
    at = draw.randrange(len(lines))
    kind = draw.choice(("json", "json", "json", "twice", "drop", "cut", "shuffle"))
    if kind == "json":
        lines[at], kind = mutate_json(draw, lines[at])
    elif kind == "twice":
        lines.insert(at, lines[at])
    elif kind == "drop":
        del lines[at]
    elif kind == "cut":
        lines[at] = lines[at][: len(lines[at]) // 2]
    else:
        draw.shuffle(lines)
    file.write_bytes("\n".join([*lines, ""]).encode("utf-8", "surrogatepass"))
    return f"line {at}: {kind}"


# ------------------------------------------------------------------------------- safetensors


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _joined(header: str, body: bytes) -> bytes:
    text = header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + body


def safetensors_header(draw: random.Random, path: Path) -> str:
    """One value of the header, whose length is made right; or that length itself."""
    file = some_file(draw, path, ".safetensors")
    header, body = _split(file.read_bytes())
    if draw.random() < 0.1:
        length = draw.choice(
            (0, 1, len(json.dumps(header)) + draw.randint(-9, 9), 2**62, 2**64 - 1)
        )
        file.write_bytes(struct.pack("<Q", max(length, 0)) + json.dumps(header).encode() + body)
        return f"{file.name}: header length {length}"
    text, said = mutate_json(draw, json.dumps(header))
    file.write_bytes(_joined(text, body))
    return f"{file.name}: header: {said}"


def safetensors_tensor(draw: random.Random, path: Path) -> str:
    """A tensor whose description stays valid in itself: another dtype, shape, place, or value."""
    file = some_file(draw, path, ".safetensors")
    header, body = _split(file.read_bytes())
    metadata = header.pop("__metadata__", None)
    parts = {k: body[slice(*v.pop("data_offsets"))] for k, v in header.items()}
    key, other = draw.choice(list(header)), draw.choice(list(header))
    kind = draw.choice(("dtype", "shape", "exchange", "value", "value", "drop", "rename", "double"))
    if kind == "dtype":
        header[key]["dtype"] = draw.choice(
            ("U8", "I8", "F8_E4M3", "BF16", "F16", "F32", "I32", "I64")
        )
        width = {"8": 1, "3": 1, "6": 2, "2": 4, "4": 8}[header[key]["dtype"][-1]]
        header[key]["shape"] = [len(parts[key]) // width]
        parts[key] = parts[key][: len(parts[key]) // width * width]
    elif kind == "shape":
        shape = header[key]["shape"]
        header[key]["shape"] = draw.choice((shape[::-1], [*shape, 1], [1, *shape], [_numel(shape)]))
    elif kind == "exchange":
        parts[key], parts[other] = parts[other], parts[key]
        header[key], header[other] = header[other], header[key]
    elif kind == "value":
        key = draw.choice(
            sorted(parts, key=lambda name: len(parts[name]))[: max(1, len(parts) * 2 // 3)]
        )
        parts[key], said = _value(draw, parts[key])
        if header[key]["dtype"] == "U8" and len(header[key]["shape"]) == 1:
            header[key]["shape"] = [len(parts[key])]
        kind = f"value ({said})"
    elif kind == "drop":
        del header[key], parts[key]
    elif kind == "rename":
        name = draw.choice((*TEXTS, f"{key}.x", key.rpartition(".")[0], f"module.{key}"))
        header[name], parts[name] = header.pop(key), parts.pop(key)
    else:
        name = draw.choice((f"module.{key}", f"{key}_2", f"_orig_mod.{key}"))
        header[name], parts[name] = header[key], parts[key]
    file.write_bytes(_safetensors(header, parts, metadata))
    return f"{file.name}: tensor {key}: {kind}"


def _numel(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _value(draw: random.Random, part: bytes) -> tuple[bytes, str]:
    """Return a part with one value changed: of the JSON that it holds, or eight of its bytes."""
    with contextlib.suppress(UnicodeDecodeError):  # values may begin with that byte, too
        if part[:1] == b"{":
            text, said = mutate_json(draw, part.decode())
            return text.encode("utf-8", "surrogatepass"), said
    at = draw.randrange(len(part) // 8 + 1) * 8
    new = draw.choice((b"\0", b"\xff", b"\1\0\0\0\0\0\0\0", b"\x80\x7f\xc0\x7f")) * 8
    changed = part[:at] + new[: min(8, len(part) - at)] + part[at + 8 :]
    return changed, f"bytes at {at}"


def _safetensors(
    header: Mapping[str, Any], parts: Mapping[str, bytes], metadata: Mapping[str, str] | None
) -> bytes:
    at, described, body = 0, {}, b""
    for key, value in header.items():
        part = parts[key]
        described[key] = {**value, "data_offsets": [at, at + len(part)]}
        at, body = at + len(part), body + part
    whole = described if metadata is None else {"__metadata__": metadata, **described}
    return _joined(json.dumps(whole), body)


def safetensors_metadata(draw: random.Random, path: Path) -> str:
    """A value of the JSON that a text of the metadata holds."""
    file = some_file(draw, path, ".safetensors")
    header, body = _split(file.read_bytes())
    metadata = header.get("__metadata__", {})
    records = [key for key, value in metadata.items() if value[:1] in ("{", "[")]
    if not records:
        return safetensors_header(draw, path)
    key = draw.choice(records)
    metadata[key], said = mutate_json(draw, metadata[key])
    file.write_bytes(_joined(json.dumps(header), body))
    return f"{file.name}: metadata {key}: {said}"


def safetensors_index(draw: random.Random, path: Path) -> str:
    """What the index of a sharded model says against what its shards hold."""
    index = next(path.glob("*.index.json"))
    document = json.loads(index.read_text())
    named: dict[str, str] = document["weight_map"]
    shards = sorted(set(named.values()))
    key, shard = draw.choice(sorted(named)), draw.choice(shards)
    kind = draw.choice(("another shard", "moved", "twice", "drop", "drop shard", "size", "more"))
    if kind == "another shard":
        named[key] = shard
    elif kind in ("moved", "twice"):  # the tensor itself: named by the index still where it was
        _put_into(path / named[key], path / shard, key, keep=kind == "twice")
    elif kind == "drop":
        del named[key]
    elif kind == "drop shard":
        document["weight_map"] = {k: file for k, file in named.items() if file != shard}
    elif kind == "size":
        document["metadata"]["total_size"] = draw.choice((0, -1, 2**70, "1"))
    else:
        shutil.copyfile(path / shard, path / "model-00009-of-00009.safetensors")
    index.write_text(json.dumps(document))
    return f"index: {kind} of {key}, {shard}"


def _put_into(source: Path, target: Path, key: str, keep: bool) -> None:
    """Copy a tensor into another file of safetensors; else take it out of its own."""
    header, body = _split(source.read_bytes())
    value = {name: field for name, field in header[key].items() if name != "data_offsets"}
    data = body[slice(*header[key]["data_offsets"])]
    for file in {source, target}:
        header, body = _split(file.read_bytes())
        metadata = header.pop("__metadata__", None)
        parts = {k: body[slice(*v.pop("data_offsets"))] for k, v in header.items()}
        if file == source and not keep:
            del header[key], parts[key]
        if file == target:
            header[key], parts[key] = value, data
        file.write_bytes(_safetensors(header, parts, metadata))
