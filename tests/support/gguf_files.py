"""GGUF files, written by the `gguf` package of llama.cpp, and headers by hand to damage."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES

from ckptmap.quantization.gguf.decoders import DECODERS

ENCODED = tuple(DECODERS)


def write(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]], **metadata: Any) -> Path:
    """Write tensors by the type of each: values for F32, F16 and integers, else bytes of blocks."""
    writer = GGUFWriter(str(path), metadata.pop("arch", "llama"))
    if "general__alignment" in metadata:
        writer.add_custom_alignment(metadata.pop("general__alignment"))
    for key, value in metadata.items():
        key = key.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, (kind, values) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks(kind: str, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Return random bytes of a tensor of this type and shape: all codes and scales occur."""
    numel, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    *rows, width = shape
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (*rows, width // numel * nbytes), dtype=np.uint8)


def dequantized(kind: str, values: np.ndarray) -> torch.Tensor:
    """Return the values, f32, as the `gguf` package decodes them."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(quants.dequantize(values, GGMLQuantizationType[kind]).copy())


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def made(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 4096,
) -> bytes:
    """Return a file by hand, of which `counts` are the numbers of tensors and keys that it states."""
    stated = (len(tensors), len(keys)) if counts is None else counts
    head = b"GGUF" + struct.pack("<IQQ", version, *stated) + b"".join((*keys, *tensors))
    return head + bytes(-len(head) % 32 + data)
