"""Whether the values of a live tensor lie in its memory as plain bytes, which is all that a checkpoint can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.errors import LoadError
from ckptmap.tensors import ITEMSIZE

if TYPE_CHECKING:
    import torch

WAITING = frozenset({"AsyncCollectiveTensor"})
"""Classes of torch's that wait for their values when they are read."""


def odd_layout(tensor: torch.Tensor) -> str:
    """Return how a tensor keeps its values, where that is not as plain bytes of a dtype that files know;
    empty: it is."""
    import torch

    if tensor.is_nested:
        return "torch.nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    is_known = str(tensor.dtype).removeprefix("torch.") in ITEMSIZE
    return "" if is_known and not tensor.is_quantized else str(tensor.dtype)


def unknown_class(tensor: torch.Tensor) -> str:
    """Return the class of a tensor that computes in a way of its own, so that only it knows what its bytes mean;
    empty: those of any other class are its values. What a collective returns is a tensor once it is read."""
    import torch

    kind = type(tensor)
    if kind.__torch_dispatch__ == torch.Tensor.__torch_dispatch__ or kind.__name__ in WAITING:
        return ""
    return kind.__name__


def without_values(tensor: torch.Tensor) -> str:
    """Return why a tensor that is no weight of a model has no values to save; empty: it has."""
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return "without a shape yet"
    if kind := unknown_class(tensor):
        return f"of class {kind}"
    if tensor.is_meta:
        return "on meta"
    return f"of {layout}" if (layout := odd_layout(tensor)) else ""


def expanded(local: torch.Tensor) -> bool:
    """Return whether several elements of the tensor may share memory, as after `expand` and `as_strided`. The
    checkpoint has a value for each of them."""
    past = 1  # positions that the dims before take
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1 and stride < past:
            return True
        past += (size - 1) * stride
    return False


def require_dense(code: str, what: str, tensor: torch.Tensor) -> None:
    """Raise LoadError of this code for a tensor that is sparse, nested, of a dtype that no file knows, or quantized by
    torch itself."""
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
