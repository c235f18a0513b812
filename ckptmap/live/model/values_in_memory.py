"""Whether the values of a live tensor lie in its memory as plain bytes, which is all that a checkpoint can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.errors import LoadError

if TYPE_CHECKING:
    import torch


def odd_layout(tensor: torch.Tensor) -> str:
    """Return how a tensor keeps its values, where that is not as plain bytes; empty: it is."""
    import torch

    if tensor.is_nested:
        return "torch.nested"
    if tensor.is_quantized:
        return str(tensor.dtype)
    return "" if tensor.layout == torch.strided else str(tensor.layout)


def require_dense(code: str, what: str, tensor: torch.Tensor) -> None:
    """Raise LoadError of this code for a tensor that is sparse, nested, or quantized by torch itself."""
    if layout := odd_layout(tensor):
        raise LoadError(
            code,
            f"{what} is a tensor of {layout}, expected dense values",
            "keep it dense, by to_dense() or dequantize(), or as plain tensors that it is made of: indices and"
            " values, codes and scale; a buffer that is computed anew may be registered with persistent=False",
        )


def require_memory(code: str, what: str, tensor: torch.Tensor) -> None:
    """Raise LoadError of this code for a tensor whose memory was freed: to read it would end the process."""
    import torch

    if type(tensor) is not torch.Tensor or tensor.device.type not in ("cpu", "cuda"):
        return  # it may have no address at any time
    if tensor.numel() and not tensor.data_ptr():
        raise LoadError(
            code,
            f"{what} has no memory: its storage was freed",
            "save when the library that frees it has brought it back",
        )
