"""The bytes of a tensor in memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the writable bytes of a contiguous CPU tensor, without numpy.

    The memoryview keeps the tensor alive.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    held = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    held.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(held).cast("B")
