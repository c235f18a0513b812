"""Infer the dtype of a quantized weight from the dense tensors of its model, where the file does not record it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckptmap.tensors import StoredTensor

FLOATS = ("bfloat16", "float16", "float32")


def model_dtype(
    stored: Mapping[str, StoredTensor], scales: Collection[str], default: str = "bfloat16"
) -> str:
    """Return the dtype that most elements of the dense floating tensors have; `scales` do not count.

    Weights whose file does not record a dtype are decoded to it.
    """
    counts = dict.fromkeys(FLOATS, 0)
    for key, tensor in stored.items():
        if tensor.info.dtype in counts and key not in scales:
            counts[tensor.info.dtype] += tensor.info.numel
    most = max(counts, key=lambda name: counts[name])
    return most if counts[most] else default
