"""What the dense tensors around a quantized one tell of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckptmap.tensors import StoredTensor

FLOATS = ("bfloat16", "float16", "float32")


def model_dtype(
    stored: Mapping[str, StoredTensor], scales: Collection[str], default: str = "bfloat16"
) -> str:
    """The dtype that most elements of the plain floating tensors have: what a file that does not
    say it is decoded to. `scales` are keys that do not count."""
    counts = dict.fromkeys(FLOATS, 0)
    for key, tensor in stored.items():
        if tensor.info.dtype in counts and key not in scales:
            counts[tensor.info.dtype] += tensor.info.numel
    most = max(counts, key=lambda name: counts[name])
    return most if counts[most] else default
