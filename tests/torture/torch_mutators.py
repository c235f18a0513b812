"""Mutate what torch wrote: pickles by opcode, archives of torch.save by record, DCP by its metadata."""

from __future__ import annotations

import dataclasses
import io
import pickle
import pickletools
import random
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.torture.mutators import INTS, TEXTS, mutate_json, some_file

# ------------------------------------------------------------------------------- pickle


def mutate_pickle(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Return a pickle with one opcode changed, and what was changed. Frames are left out."""
    ops = []
    spans = list(pickletools.genops(data))
    ends = [pos for _, _, pos in spans[1:]] + [spans[-1][2] + 1]  # type: ignore[misc]
    for (op, arg, pos), end in zip(spans, ends, strict=True):
        if op.name != "FRAME":
            ops.append((op.name, arg, data[pos:end]))
    kind = draw.choice(
        ("int", "int", "text", "text", "text", "drop", "double", "exchange", "opcode")
    )
    if kind in ("int", "text"):
        wanted = ("INT", "LONG") if kind == "int" else ("UNICODE", "STRING", "GLOBAL")
        at = draw.choice([i for i, op in enumerate(ops) if any(w in op[0] for w in wanted)] or [0])
    else:
        at = draw.randrange(len(ops))
    name, arg, raw = ops[at]
    other = draw.choice(ops)[2]
    if kind == "int" and isinstance(arg, int):
        raw = _pickled_int(draw.choice((arg + 1, arg - 1, arg * 2, -arg, *INTS)))
    elif kind == "text" and name == "GLOBAL":
        others = [op[2] for op in ops if op[0] == "GLOBAL"]
        raw = draw.choice(
            (*others, b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nIntStorage\n")
        )
    elif kind == "text":
        strings = [op[2] for op in ops if "UNICODE" in op[0]]
        text = draw.choice(TEXTS).encode("utf-8", "surrogatepass")
        raw = draw.choice(
            (draw.choice(strings or [raw]), b"X" + struct.pack("<I", len(text)) + text)
        )
    elif kind == "drop":
        raw = b""
    elif kind == "double":
        raw *= 2
    elif kind == "exchange":
        raw = other
    else:
        raw = bytes([draw.choice(sorted(map(ord, pickletools.code2op)))]) + raw[1:]
    ops[at] = (name, arg, raw)
    return b"".join(op[2] for op in ops), f"pickle: {kind} at {at}, {name} {arg!r:.40}"


def _pickled_int(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


# ------------------------------------------------------------------------------- torch.save


def mutate_archive(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Return a torch.save archive, written again by torch, with one record or its place changed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {
            info.filename.partition("/")[2]: _record(archive, info) for info in archive.infolist()
        }
    records = {k: v for k, v in records.items() if k not in ("version", ".data/serialization_id")}
    kind = draw.choice(("pickle",) * 6 + ("drop", "rename", "cut", "grow", "order", "packed"))
    name = draw.choice([name for name in records if name != "data.pkl"] or ["data.pkl"])
    said = f"{kind} {name}"
    if kind == "pickle":
        records["data.pkl"], said = mutate_pickle(draw, records["data.pkl"])
    elif kind == "drop":
        del records[name]
    elif kind == "rename":
        records[draw.choice(("data/99", "extra", "data/x", "constants.pkl"))] = records.pop(name)
    elif kind == "cut":
        records[name] = records[name][: draw.randrange(len(records[name]) + 1)]
    elif kind == "grow":
        records[name] += bytes(draw.choice((1, 4, 64)))
    elif kind == "order":
        records = dict(draw.sample(list(records.items()), len(records)))
    else:
        return _packed(records, draw), "compressed by zipfile"
    return _archive(records), said


def _archive(records: Mapping[str, bytes]) -> bytes:
    """Return the records as an archive of torch's own writer."""
    stream = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    for record, value in records.items():
        writer.write_record(record, value, len(value))
    writer.write_end_of_file()
    return stream.getvalue()


def _record(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return a record, whatever its CRC-32, which torch may have left 0."""
    with archive.open(info) as stream:
        stream._expected_crc = None  # type: ignore[attr-defined]
        return stream.read()


def _packed(records: Mapping[str, bytes], draw: random.Random) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(
        stream, "w", draw.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED))
    ) as new:
        for name, value in {**records, "version": b"3\n"}.items():
            new.writestr(f"archive/{name}", value)
    return stream.getvalue()


def archive(draw: random.Random, path: Path) -> str:
    """One record of a torch.save file, of one rank perhaps."""
    file = some_file(draw, path, ".pt", ".bin", ".ckpt")
    data, said = mutate_archive(draw, file.read_bytes())
    file.write_bytes(data)
    return f"{file.name}: {said}"


def manifest_inside(draw: random.Random, path: Path) -> str:
    """The manifest that a one-file output of ours holds, with the CRC-32 of what is written."""
    with zipfile.ZipFile(path) as old:
        records = [(info, _record(old, info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w") as new:
        for info, data in records:
            if info.filename.endswith("manifest.json"):
                text, said = mutate_json(draw, data.decode())
                data = text.encode("utf-8", "surrogatepass")
            new.writestr(info.filename, data)
    return f"manifest inside: {said}"


# ------------------------------------------------------------------------------- DCP


def dcp_pickle(draw: random.Random, path: Path) -> str:
    file = path / ".metadata"
    data, said = mutate_pickle(draw, file.read_bytes())
    file.write_bytes(data)
    return f".metadata: {said}"


def dcp_metadata(draw: random.Random, path: Path) -> str:
    """A value of .metadata that stays valid in itself."""
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)  # of the corpus: torch wrote it
    places = metadata.storage_data
    one, two = draw.choice(list(places)), draw.choice(list(places))
    kind = draw.choice(
        ("place", "place", "exchange", "drop", "index", "chunk", "chunk", "size", "dtype")
    )
    if kind == "place":
        name = draw.choice(("offset", "length", "relative_path"))
        values = ("../x", "x", "__9_9.distcp") if name == "relative_path" else (*INTS[:12], 100)
        places[one] = dataclasses.replace(places[one], **{name: draw.choice(values)})
    elif kind == "exchange":
        places[one], places[two] = places[two], places[one]
    elif kind == "drop":
        del places[one]
    elif kind == "index":
        places[dataclasses.replace(one, index=draw.choice((None, 0, 1, 9)))] = places.pop(one)
    else:
        stored = [k for k, v in metadata.state_dict_metadata.items() if hasattr(v, "chunks")]
        key = draw.choice(stored)
        tensor = metadata.state_dict_metadata[key]
        if kind == "chunk":
            at = draw.randrange(len(tensor.chunks))
            name = draw.choice(("offsets", "sizes"))
            sizes = list(getattr(tensor.chunks[at], name)) or [1]
            sizes[draw.randrange(len(sizes))] += draw.choice((1, -1, 3, 2**40))
            tensor.chunks[at] = dataclasses.replace(tensor.chunks[at], **{name: torch.Size(sizes)})
        elif kind == "size":
            tensor.size = torch.Size([*tensor.size, draw.choice((1, 2))][draw.randrange(2) :])
        else:
            tensor.properties.dtype = draw.choice(
                (torch.float16, torch.bfloat16, torch.int8, torch.int32)
            )
        one = key
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return f".metadata: {kind} of {one}"


def dcp_item(draw: random.Random, path: Path) -> str:
    """The archive of one item, put at the end of its file; .metadata says where."""
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    index = draw.choice(list(metadata.storage_data))
    place = metadata.storage_data[index]
    whole = (path / place.relative_path).read_bytes()
    item = whole[place.offset : place.offset + place.length]
    if item[:2] != b"PK":
        return dcp_metadata(draw, path)
    new, said = mutate_archive(draw, item)
    (path / place.relative_path).write_bytes(whole + new)
    metadata.storage_data[index] = dataclasses.replace(place, offset=len(whole), length=len(new))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return f"item {index.fqn}: {said}"
