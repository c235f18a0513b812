"""Checkpoints of many tensors that take no room on disk: a header, and a hole where values would be."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def shapes(layers: int, experts: int, width: int = 256) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of a model of experts: `layers` x (2 + 3 x `experts`) tensors, and two more."""
    yield "model.embed_tokens.weight", [1000, width]
    for layer in range(layers):
        head = f"model.layers.{layer}"
        yield f"{head}.input_layernorm.weight", [width]
        yield f"{head}.mlp.gate.weight", [experts, width]
        for expert in range(experts):
            for name in PROJECTIONS:
                yield f"{head}.mlp.experts.{expert}.{name}.weight", [width, width]
    yield "model.norm.weight", [width]


def write_sparse(file: Path, layers: int, experts: int) -> Path:
    """Write a safetensors file of zeros, bfloat16; return its path."""
    header, end = {}, 0
    for name, shape in shapes(layers, experts):
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)
    return file
