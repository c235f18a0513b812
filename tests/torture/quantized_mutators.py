"""Mutate what quantized releases and GGUF files say: headers by entry, configs by field, codes and scales by value.

Each changes one thing and leaves all else valid in itself: offsets, lengths and shapes are made right again.
"""

from __future__ import annotations

import json
import math
import random
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.torture.mutators import INTS, TEXTS, some_file

# ------------------------------------------------------------------------------- GGUF

VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
COUNTS = (
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    255,
    2**16,
    2**31,
    2**32 - 1,
    2**32,
    2**53 + 1,
    2**62,
    2**63,
    2**64 - 1,
)
TYPES = (*range(42), 77, 2**31, 2**32 - 1)
FLOATS = (0.0, -0.0, -1.0, 1e-45, 3.4e38, math.inf, -math.inf, math.nan)


@dataclass(frozen=True)
class Entry:
    """A tensor of a GGUF file: extents are as they are stored, the fastest first."""

    name: bytes
    extents: tuple[int, ...]
    kind: int
    offset: int

    def packed(self) -> bytes:
        dims = len(self.extents)
        return _sized(self.name) + struct.pack(
            f"<I{dims}QIQ", dims, *self.extents, self.kind, self.offset
        )


@dataclass
class Header:
    """A GGUF file in its parts; `values` are (key, type, bytes)."""

    values: list[tuple[bytes, int, bytes]] = field(default_factory=list)
    tensors: list[Entry] = field(default_factory=list)
    data: bytes = b""
    version: int = 3
    counts: tuple[int, int] | None = None

    def packed(self) -> bytes:
        counts = self.counts or (len(self.tensors), len(self.values))
        head = b"GGUF" + struct.pack("<IQQ", self.version, *counts)
        head += b"".join(_sized(key) + struct.pack("<I", k) + v for key, k, v in self.values)
        head += b"".join(entry.packed() for entry in self.tensors)
        return head + bytes(-len(head) % 32) + self.data


def parsed(data: bytes) -> Header:
    """Take a file apart that the `gguf` package wrote, of alignment 32."""
    tensors, keys = struct.unpack_from("<QQ", data, 8)
    header, at = Header(version=struct.unpack_from("<I", data, 4)[0]), 24
    for _ in range(keys):
        key, at = _text_at(data, at)
        kind = struct.unpack_from("<I", data, at)[0]
        end = _value_end(data, at + 4, kind)
        header.values.append((key, kind, data[at + 4 : end]))
        at = end
    for _ in range(tensors):
        name, at = _text_at(data, at)
        dims = struct.unpack_from("<I", data, at)[0]
        *extents, kind, offset = struct.unpack_from(f"<{dims}QIQ", data, at + 4)
        at += 4 + 8 * dims + 12
        header.tensors.append(Entry(name, tuple(extents), kind, offset))
    header.data = data[-(-at // 32) * 32 :]
    return header


def _sized(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _text_at(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 8 + struct.unpack_from("<Q", data, at)[0]
    return data[at + 8 : end], end


def _value_end(data: bytes, at: int, kind: int) -> int:
    if kind == TEXT:
        return _text_at(data, at)[1]
    if kind != ARRAY:
        return at + struct.calcsize(VALUES[kind])
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    for _ in range(count):
        at = _value_end(data, at, inner)
    return at


def gguf_header(draw: random.Random, path: Path) -> str:
    """One entry of the header: a value, a name, a shape, a type, an offset, a count."""
    file = some_file(draw, path, ".gguf")
    header = parsed(file.read_bytes())
    of = draw.choice(("value", "value", "value", "tensor", "tensor", "tensor", "file"))
    if of == "value" and header.values:
        said = _change_key(draw, header)
    elif of == "tensor" and header.tensors:
        said = _change_entry(draw, header)
    else:
        said = _change_file(draw, header)
    file.write_bytes(header.packed())
    return f"GGUF {of}: {said}"


def _change_key(draw: random.Random, header: Header) -> str:
    at = draw.randrange(len(header.values))
    key, kind, value = header.values[at]
    how = draw.choice(
        ("number", "number", "number", "type", "array", "text", "drop", "rename", "twice")
    )
    said = f"{how} of {key.decode()!r:.60}"
    if how == "number" and kind in VALUES:
        code = VALUES[kind]
        new: Any = draw.choice(FLOATS if code in "fd" else COUNTS)
        if draw.random() < 0.5:
            (old,) = struct.unpack(f"<{code}", value)
            new = draw.choice((old + 1, old - 1, old * 2, -old))
        if code not in "fd":
            size = struct.calcsize(code) * 8
            new = new % 2**size - (
                2**size if code.islower() and new % 2**size >= 2 ** (size - 1) else 0
            )
        header.values[at] = (
            key,
            kind,
            struct.pack(f"<{code}", min(new, 3.4e38) if code == "f" else new),
        )
        said += f" to {new!r:.30}"
    elif how == "type":
        header.values[at] = key, draw.choice((*VALUES, TEXT, ARRAY, 13, 2**31)), value
    elif how == "array":
        count = draw.choice((0, 1, 2, 2**62, 2**64 - 1))
        inner = draw.choice((4, 6, TEXT, ARRAY, 77))
        body = struct.pack("<IQ", inner, count) + b"".join(value[:8] for _ in range(min(count, 2)))
        header.values[at] = key, ARRAY, body
        said += f" of {count} of type {inner}"
    elif how == "text":
        text = draw.choice(TEXTS).encode("utf-8", "surrogatepass")
        length = draw.choice((len(text), len(text), 2**63, 2**64 - 1))
        header.values[at] = key, TEXT, struct.pack("<Q", length) + text
    elif how == "drop":
        del header.values[at]
    elif how == "rename":
        other = draw.choice(
            [k for k, _, _ in header.values] + [t.encode("utf-8", "replace") for t in TEXTS]
        )
        header.values[at] = other, kind, value
    else:
        header.values.insert(at, header.values[at])
    return said


def _change_entry(draw: random.Random, header: Header) -> str:
    at, other = (draw.randrange(len(header.tensors)) for _ in range(2))
    old, theirs = header.tensors[at], header.tensors[other]
    how = draw.choice(("name", "extent", "extents", "kind", "offset", "drop", "twice", "exchange"))
    said = f"{how} of {old.name.decode()!r:.60}"
    if how == "name":
        texts = [t.encode("utf-8", "surrogatepass") for t in TEXTS]
        new = replace(old, name=draw.choice((theirs.name, old.name + b".x", *texts)))
    elif how == "extent":
        size = draw.choice((*COUNTS, old.extents[0] + 1, old.extents[-1] - 1, old.extents[0] // 2))
        dims = list(old.extents)
        dims[draw.randrange(len(dims))] = size % 2**64
        new = replace(old, extents=tuple(dims))
    elif how == "extents":
        total = math.prod(old.extents)
        choices = (old.extents[::-1], (total,), (*old.extents, 1), (1, *old.extents), (), (1,) * 5)
        new = replace(old, extents=draw.choice(choices))
    elif how == "kind":
        new = replace(old, kind=draw.choice(TYPES))
    elif how == "offset":
        near = (old.offset + 32, old.offset - 32, old.offset + 1, theirs.offset)
        new = replace(old, offset=draw.choice((*COUNTS, *near)) % 2**64)
    elif how == "exchange":
        header.tensors[other] = replace(theirs, offset=old.offset)
        new = replace(old, offset=theirs.offset)
    else:
        new = old
        header.tensors[at : at + 1] = [] if how == "drop" else [old, old]
        return said
    header.tensors[at] = new
    return f"{said} to {new}"


def _change_file(draw: random.Random, header: Header) -> str:
    how = draw.choice(("version", "tensors", "keys", "cut", "cut", "longer", "order"))
    tensors, keys = len(header.tensors), len(header.values)
    if how == "version":
        header.version = draw.choice((0, 1, 2, 4, 255, 3 << 24, 2**32 - 1))
    elif how == "tensors":
        header.counts = draw.choice((*COUNTS, tensors - 1, tensors + 1)), keys
    elif how == "keys":
        header.counts = tensors, draw.choice((*COUNTS, keys - 1, keys + 1))
    elif how == "cut":
        header.data = header.data[: len(header.data) - draw.choice((1, 17, 31, 32, 33, 64, 1000))]
    elif how == "longer":
        header.data += bytes(draw.choice((1, 32, 4096)))
    else:
        draw.shuffle(header.tensors)
    return how


def gguf_data(draw: random.Random, path: Path) -> str:
    """Eight bytes of a tensor: its scales become NaN, infinite, negative or 0."""
    file = some_file(draw, path, ".gguf")
    header = parsed(file.read_bytes())
    entry = draw.choice(header.tensors)
    new = draw.choice((b"\0", b"\xff", b"\x00\x7c", b"\x00\xfc", b"\x01\x00", b"\x00\x80")) * 8
    data = bytearray(header.data)
    data[entry.offset : entry.offset + 8] = new[:8]
    header.data = bytes(data)
    file.write_bytes(header.packed())
    return f"bytes of {entry.name.decode()!r:.60} to {new[:2].hex()}"


# ------------------------------------------------------------------------------- configs

HOSTILE: dict[str, tuple[Any, ...]] = {
    "bits": (2, 3, 5, 7, 8, 0, -4, 4.0, True, "4", None),
    "w_bit": (4, 3, 8),
    "group_size": (0, -1, -2, 1, 16, 31, 64, 96, 2**31, 2**63, True, 32.0, "32", None, [32]),
    "q_group_size": (32, 64, -1),
    "sym": (True, False, 1, 0, None, "true"),
    "zero_point": (True, False, 1, 0, None),
    "desc_act": (True, False, 1, 0, None),
    "checkpoint_format": ("gptq", "gptq_v2", "marlin", "", None, 2),
    "version": ("gemm", "GEMM", "gemv", "exllama", None, 4),
    "quant_method": (
        "gptq",
        "awq",
        "gguf",
        "hqq",
        "quanto",
        "mxfp4",
        "auto-round",
        "none",
        None,
        4,
    ),
    "packing_format": ("auto_round:auto_gptq", "auto_round:auto_awq"),
    "dynamic": ({"+:.*": {"bits": 8}}, {"-:.*mlp.*": {}}, {"(a+)+$": {}}, {"[": {}}, [], {}),
    "extra_config": ({"model.layers.0.mlp.up_proj": {"bits": 8}}, {"no.such": {"bits": 2}}, []),
    "modules_to_not_convert": (["lm_head"], ["up_proj"], ["no.such"], ["["], [4], "up_proj", None),
    "modules_in_block_to_quantize": ([["self_attn.q_proj"]], [["mlp"]], "mlp", [[4]]),
    "ignore": (["re:.*mlp.*"], ["re:("], ["lm_head", "no.such"], [None]),
    "activation_scheme": ("static", "dynamic"),
}
NUMBERS = ("1e400", "-1e400", "NaN", "1" + "0" * 400, "1.0", "4e0", "-0")
"""Numbers as JSON spells them, that Python's writer does not."""


def hostile_config(draw: random.Random, path: Path) -> str:
    """A field of the quantization_config, there or not, by a value that its readers might believe."""
    file = some_file(draw, path, "config.json")
    document = json.loads(file.read_text())
    said = document.get("quantization_config", document)
    there = [key for key in HOSTILE if key in said]
    key = draw.choice(there if there and draw.random() < 0.6 else list(HOSTILE))
    number = draw.choice(NUMBERS) if draw.random() < 0.15 else ""
    said[key] = "@number@" if number else draw.choice(HOSTILE[key])
    file.write_text(json.dumps(document).replace('"@number@"', number))
    return f"config: {key} = {number or said[key]!r:.60}"


def model_config(draw: random.Random, path: Path) -> str:
    """A number of the model itself: what shapes, names and metadata follow from."""
    file = some_file(draw, path, "config.json")
    document = json.loads(file.read_text())
    keys = [k for k, v in document.items() if isinstance(v, (int, float, str)) or v is None]
    key = draw.choice(keys)
    old = document[key]
    near = (old + 1, old - 1, old * 2, -old) if type(old) in (int, float) else ()
    document[key] = draw.choice((*near, *near, None, True, [], {}, 1.5, *INTS[:-1], *TEXTS[:4]))
    if draw.random() < 0.1:
        number = draw.choice(NUMBERS)
        document[key] = "@number@"
        file.write_text(json.dumps(document).replace('"@number@"', number))
        return f"config: {key} = {number:.40}"
    file.write_text(json.dumps(document))
    return f"config: {key} {old!r:.30} = {document[key]!r:.40}"


def quantization_map(draw: random.Random, path: Path) -> str:
    """quanto's map of modules: one that there is not, another kind, or one left out."""
    file = path / "quanto_qmap.json"
    document = json.loads(file.read_text())
    key = draw.choice(sorted(document))
    how = draw.choice(("more", "kind", "drop", "rename"))
    if how == "more":
        document["model.layers.9.mlp.up_proj"] = document[key]
    elif how == "kind":
        document[key] = {**document[key], "weights": draw.choice(("qint2", "qint8", "none", 4))}
    elif how == "drop":
        del document[key]
    else:
        document[f"{key}.x"] = document.pop(key)
    file.write_text(json.dumps(document))
    return f"map: {how} {key}"


# ------------------------------------------------------------------------------- codes and scales


def parts(draw: random.Random, path: Path) -> str:
    """One part of a weight: values that no writer makes, another number of rows, another dtype."""
    file = some_file(draw, path, ".safetensors")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    state = load_file(file)
    coded = [key for key in state if not key.endswith(("norm.weight", "embed_tokens.weight"))]
    key = draw.choice(coded)
    how, state[key] = _changed(draw, state[key])
    save_file(state, file, metadata)
    return f"part {key}: {how}"


def _changed(draw: random.Random, old: Tensor) -> tuple[str, Tensor]:
    """Return a part with one change, and what it is."""
    kind = draw.choice(("one", "one", "one", "all", "shorter", "longer", "shape", "dtype", "order"))
    if kind in ("one", "all") and old.numel():
        value = _value(draw, old)
        new = old.clone()
        flat = new.view(-1)
        if kind == "all":
            flat[:] = value
        else:
            flat[draw.randrange(len(flat))] = value
        return f"{kind} {float(value):g}", new
    dim = draw.randrange(old.ndim) if old.ndim else 0
    if kind == "shorter" and old.ndim and old.shape[dim]:
        return f"shorter in {dim}", old.narrow(dim, 0, old.shape[dim] - 1).clone()
    if kind == "longer" and old.ndim and old.shape[dim]:
        return f"longer in {dim}", torch.cat([old, old.narrow(dim, 0, 1)], dim)
    if kind == "shape":
        return "reshaped", draw.choice(
            (old.reshape(-1), old[None], old.t() if old.ndim == 2 else old)
        ).clone().contiguous()
    if kind == "dtype":
        dtype = draw.choice(
            (torch.int32, torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float32)
        )
        return f"as {dtype}", old.to(dtype)
    if kind == "order" and old.ndim:
        return f"turned around in {dim}", old.flip(dim)
    return "nothing", old


def _value(draw: random.Random, old: Tensor) -> Tensor:
    if old.dtype.is_floating_point:
        most = torch.finfo(old.dtype).max if old.dtype.itemsize > 1 else 2.0
        number: float = draw.choice((*FLOATS[:3], 6e-8, most, 1.0, math.inf, -math.inf, math.nan))
        return torch.tensor(number).to(old.dtype)
    if old.dtype == torch.bool:
        return torch.tensor(draw.random() < 0.5)
    info = torch.iinfo(old.dtype)
    near = (0, 1, 2, 3, 7, 15, 31, 64, 127, 255, -1, 2**31 - 1, info.max, info.min)
    return torch.tensor(min(max(draw.choice(near), info.min), info.max), dtype=old.dtype)
