"""Infer the dtype of a quantized weight from the dense tensors of its model, where the file does not record it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from ckptmap.core.columns import distinct
from ckptmap.core.stored_parts import StoredParts
from ckptmap.tensors import StoredTensor

FLOATS = ("bfloat16", "float16", "float32")


def model_dtype(
    stored: Mapping[str, StoredTensor], scales: Collection[str], default: str = "bfloat16"
) -> str:
    """Return the dtype that most elements of the dense floating tensors have; `scales` do not count.

    Weights whose file does not record a dtype are decoded to it.
    """
    parts = StoredParts.of(stored)
    infos = parts.infos_left()
    many = Counter(map(id, infos))
    many.subtract(Counter(map(id, map(parts.info, scales))))
    counts = dict.fromkeys(FLOATS, 0)
    for key, info in distinct(infos).items():
        if info.dtype in counts:
            counts[info.dtype] += info.numel * many[key]
    most = max(counts, key=lambda name: counts[name])
    return most if counts[most] else default
