"""A stored tensor into a live one that stays the object it is: codes and scales are overwritten.

For callers that hold the state dict themselves; `load` replaces quantized tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptmap.errors import LoadError
from ckptmap.live.model.reader import Reader
from ckptmap.live.model.target import Target, held, is_nf4
from ckptmap.live.optimizer.base import codes_of
from ckptmap.live.optimizer.state_loader import code_places, encode
from ckptmap.live.quantized import int8 as int8_live
from ckptmap.live.quantized import nf4 as nf4_live
from ckptmap.live.quantized.nf4_torchao import from_torchao
from ckptmap.optim.lowbit import CODES, SCALE
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import TensorInfo

NF4_INNER = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4")


def fill(reader: Reader, source: LazyTensor, target: Target) -> None:
    """This rank's part of `source`, of any encoding, into the live tensor of `target`.

    Same encoding, same boundaries of blocks: codes as they are; scale blocks of NF4 are regrouped;
    else decoded, and encoded anew where the live tensor is quantized. Raises LoadError CKM502 for
    another shape, CKM504 where blocks do not fit.
    """
    live: Any = target.tensor
    if tuple(live.shape) != source.shape:
        raise LoadError(
            "CKM502",
            f"{target.fqn}: live {list(live.shape)}, checkpoint {list(source.shape)}",
            "build the model of this checkpoint",
        )
    local: Any = target.local
    if is_nf4(local):
        _nf4(reader, source, target)
    elif int8_live.is_live(local):
        _int8(reader, source, target)
    elif codes_of(live) is not None:
        _codes(reader, source, target)
    else:
        read = reader.dense if source.encoding == "dense" else reader.decoded
        for box, view in target.windows(local):
            read(source, box, view)


def _nf4(reader: Reader, source: LazyTensor, target: Target) -> None:
    local: Any = target.local
    _, live, _ = from_torchao(local)
    whole = TensorInfo(source.shape, target.dtype)
    stored: Any = source.encoding_
    same = source.encoding == "nf4" and source.dtype == target.dtype
    found = stored if same else nf4_live.encoding_for(whole, source)
    ((box, _),) = held(target)
    if isinstance(found, str) or found.scaler_block_size % live.scaler_block_size:
        why = found if isinstance(found, str) else f"blocks of {found.scaler_block_size} scalers"
        raise LoadError(
            "CKM504",
            f"{target.fqn}: live NF4 has scaler blocks of {live.scaler_block_size}, the"
            f" checkpoint's cannot be regrouped to that: {why}",
            "load it with ckptmap.load, which builds the live tensor anew",
        )
    parts = replace(found, scaler_block_size=live.scaler_block_size)
    rows = nf4_live.Rows(TensorInfo(box.sizes, whole.dtype), whole, found, parts, box)
    make = nf4_live.read_rows if same else nf4_live.quantize_rows
    made: Any = make(reader, source, rows, local.device)
    for name in NF4_INNER:
        getattr(local, name).copy_(getattr(made, name))


def _int8(reader: Reader, source: LazyTensor, target: Target) -> None:
    local: Any = target.local
    rows = int8_live.rows_of(target, source) if int8_live.is_int8(source) else ""
    if isinstance(rows, str):
        made: Any = int8_live.quantize_rows(reader, source, target, local.device)
    else:
        made = int8_live.read_rows(reader, source, rows, local.device)
    local.qdata.copy_(made.qdata)
    local.scale.copy_(made.scale.view(local.scale.shape))


def _codes(reader: Reader, source: LazyTensor, target: Target) -> None:
    import torch

    codes = codes_of(target.tensor)
    assert codes is not None
    places = code_places(source, codes, held(target))
    if places is not None:
        for part, live in ((CODES, codes.codes), (SCALE, codes.scale)):
            found = reader.part(source, part, places[part], codes.codes.device)
            live.view(-1).copy_(found.view(-1))
        return
    values = torch.zeros(codes.shape, dtype=torch.float32, device=codes.codes.device)
    for box, view in target.windows(values):
        reader.decoded(source, box, view)
    encode(target.tensor, codes, values)
