"""State dicts to try a format with: awkward names, shapes, strides and dtypes, filled with random bits.

Everything depends on the arguments alone. The bits are random, so NaN payloads are included.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.storage.lazy_tensor import info_of
from ckptmap.storage.tensor_bytes import tensor_bytes
from ckptmap.tensors import ITEMSIZE, Box, TensorInfo

if TYPE_CHECKING:
    import torch

KEYS = (
    "layers.0.weight",
    "layers.10.weight",
    "bias",
    "größe.β.重み",
    "with space.weight",
    "quotes\".'.weight",
    "../../outside.weight",
    "/absolute.weight",
    "a.b.c.d.e.f.g",
)
"""Names that occur in practice, and names that break a format which turns names into files."""
ODD_KEYS = ("line\nbreak", "nul\0.weight", "lone \ud800", "é" * 300, " ", "a..b", "~", "1")
"""Names that a format may refuse, if it does so when the conversion is planned."""
SHAPES = ((), (0,), (3, 0), (1,), (7,), (5, 3), (2, 3, 4), (101, 3), (1, 1, 1, 2))


def bits(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Return a contiguous tensor of random bits; a bool tensor holds 0 and 1."""
    import torch

    maker = torch.Generator().manual_seed(seed)
    nbytes = TensorInfo(shape, dtype).nbytes
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (nbytes,), generator=maker)
    return raw.to(torch.uint8).view(getattr(torch, dtype)).reshape(shape)


def strided(seed: int) -> dict[str, torch.Tensor]:
    """Return views that are not contiguous: transposed, sliced, stepped, expanded, sharing storage."""
    import torch

    base = bits((6, 8), "float32", seed)
    return {
        "views.transposed": bits((4, 6), "bfloat16", seed + 1).t(),
        "views.permuted": bits((2, 3, 4), "int16", seed + 2).permute(2, 0, 1),
        "views.columns": base[:, 2:5],
        "views.stepped": base[::2, ::3],
        "views.expanded": torch.arange(3.0).expand(4, 3),
        "views.tied": base,
        "views.tied_again": base,
    }


def state(seed: int = 0, dtypes: tuple[str, ...] = ("float32",)) -> dict[str, torch.Tensor]:
    """Return a state dict of every awkward key and shape, each dtype in turn, and the views."""
    draw = random.Random(seed)
    keys = [*KEYS, *(f"blocks.{i}.weight" for i in range(max(0, len(dtypes) - len(KEYS))))]
    shapes = [*SHAPES, *(draw.choice(SHAPES) for _ in range(len(keys) - len(SHAPES)))]
    draw.shuffle(shapes)
    tensors = {
        key: bits(shape, dtypes[i % len(dtypes)], seed + i)
        for i, (key, shape) in enumerate(zip(keys, shapes, strict=True))
    }
    return tensors | strided(seed)


def of_dtype(dtype: str) -> dict[str, torch.Tensor]:
    """Return a matrix and a scalar of one dtype."""
    return {"w": bits((3, 4), dtype, 0), "scalar": bits((), dtype, 1)}


def dtypes() -> tuple[str, ...]:
    """Return the dtypes that the installed torch has."""
    import torch

    return tuple(name for name in ITEMSIZE if hasattr(torch, name))


def save(path: Path, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, object]) -> Path:
    """Write a checkpoint with torch.save: bare tensors, or `model` beside the `extra` values."""
    import torch

    torch.save({"model": dict(tensors), **extra} if extra else dict(tensors), path)
    return path


# ------------------------------------------------------------------------------- comparing


def raw(tensor: torch.Tensor) -> bytes:
    """Return the row-major bytes of a tensor."""
    contiguous = tensor.detach().contiguous()  # outlives the view of its memory
    return bytes(tensor_bytes(contiguous))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal in shape, dtype and every bit."""
    return info_of(a) == info_of(b) and raw(a) == raw(b)


def random_box(shape: tuple[int, ...], draw: random.Random) -> Box:
    """Return a random box inside the shape; it may be empty."""
    offsets = [draw.randint(0, n) for n in shape]
    sizes = [draw.randint(0, n - o) for n, o in zip(shape, offsets, strict=True)]
    return Box(tuple(offsets), tuple(sizes))
