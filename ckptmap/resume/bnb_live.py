"""An NF4 weight of a checkpoint in a live bitsandbytes model: Params4bit with its quant state.

    codes u8 [n/2] (the same nibbles, torchao's order is bitsandbytes')   -> data u8 [n/2, 1]
    scales decoded, in float32 [n/64]                                      -> quant_state.absmax
    torchao's table of 16 values                                           -> quant_state.code

No code changes and nothing is quantized anew. The values are torchao's up to the rounding of one
product: bitsandbytes multiplies in float32, torchao in the weight's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptmap.encodings import nf4_codes
from ckptmap.encodings.nf4_encoding import DATA, FACTOR, MEAN, SCALERS, TABLE
from ckptmap.errors import LoadError
from ckptmap.lazy import LazyTensor
from ckptmap.resume.reader import Reader
from ckptmap.resume.target import Target, is_dtensor
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

LIVE_CLASS = "Params4bit"


def is_live(target: Target) -> bool:
    """Is it, or is it to be, a bitsandbytes 4-bit weight?"""
    return type(target.tensor).__name__ == LIVE_CLASS


def can_hold(target: Target) -> str:
    """Why bitsandbytes cannot hold the weight here; empty: it can."""
    if is_dtensor(target.tensor) or target.is_flat:
        return "it is cut over ranks, and Params4bit is loaded whole"
    for module, _ in target.places:
        if not any(cls.__name__ == "Linear4bit" for cls in type(module).__mro__):
            return f"{type(module).__name__} is no bitsandbytes Linear4bit"
    return ""


def refuse(target: Target, reason: str) -> LoadError:
    return LoadError(
        "CKM512",
        f"model: {target.fqn} cannot be a bitsandbytes NF4 weight: {reason}",
        "replace its linear layer by bitsandbytes.nn.Linear4bit before loading",
    )


def put(reader: Reader, source: LazyTensor, target: Target, device: torch.device) -> None:
    """Read all five parts, and set the weight of every module that shares it."""
    import bitsandbytes
    from bitsandbytes.functional import QuantState

    encoding: Any = source.encoding_
    parts = {
        name: reader.part(source, name, Box.whole(part.info.shape), device)
        for name, part in source.parts.items()
    }
    scales = nf4_codes.scales(
        parts[SCALERS], parts[FACTOR], parts[MEAN], encoding.scaler_block_size, 0
    )
    for module, name in target.places:
        state = QuantState(
            absmax=scales.float(), shape=_size(source), code=parts[TABLE].float(),
            blocksize=encoding.block_size, quant_type="nf4", dtype=source.torch_dtype,
        )  # fmt: skip
        weight = bitsandbytes.nn.Params4bit(
            parts[DATA].view(-1, 1), requires_grad=False, quant_state=state,
            blocksize=encoding.block_size, compress_statistics=False, quant_type="nf4",
            module=module, bnb_quantized=True,
        )  # fmt: skip
        setattr(module, name, weight)
        module.quant_state = state


def _size(source: LazyTensor) -> torch.Size:
    import torch

    return torch.Size(source.shape)
