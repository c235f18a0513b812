"""Infer the dtype of a quantized weight from the dense tensors of its model, where the file does not record it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from ckptmap.core.stored_parts import StoredParts

FLOATS = ("bfloat16", "float16", "float32")


def model_dtype(parts: StoredParts, scales: Collection[int], default: str = "bfloat16") -> str:
    """Return the dtype that most elements of the dense floating tensors have; the tensors of the numbers
    `scales` do not count.

    Weights whose file does not record a dtype are decoded to it.
    """
    many = parts.many()
    many.subtract(Counter(parts.kinds(scales)))
    counts = dict.fromkeys(FLOATS, 0)
    for kind, info in enumerate(parts.of_kind):
        if info.dtype in counts:
            counts[info.dtype] += info.numel * many[kind]
    most = max(counts, key=lambda name: counts[name])
    return most if counts[most] else default
