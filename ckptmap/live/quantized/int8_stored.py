"""A live int8 weight as a checkpoint keeps it: codes, scales and a record, by torchao's names.

fc.weight, rows of this rank  ->  fc._weight_qdata i8 [out, in], fc._weight_scale f32 [out, in / g]
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptmap import registry
from ckptmap.core.quantized_codes import CodeGrid, KeepsCodes
from ckptmap.live.model.live_form import StoredForm, StoredPart
from ckptmap.live.model.live_tensor import LiveTensor, is_dtensor, local_boxes
from ckptmap.live.quantized.int8_activations import attributes_of
from ckptmap.protocols import Encoding, Refusal, part_key
from ckptmap.protocols.offers import offers
from ckptmap.tensors import TensorInfo

if TYPE_CHECKING:
    import torch


def stored_int8(
    target: LiveTensor, fqn: str, codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, ...]
) -> StoredForm:
    """Return the stored tensors of a weight, and the box of each that this rank holds.

    codes  i8, this rank's rows
    scale  in the shape of the grid of blocks; a scale of the whole tensor is on every rank
    block  sizes of the part of the weight that shares one scale
    """
    dtype = str(target.tensor.dtype).removeprefix("torch.")
    whole = TensorInfo(tuple(target.tensor.shape), dtype)
    everywhere = scale.shape[0] == 1 and block[0] == codes.shape[0]
    rows = whole.shape[0] if everywhere else block[0]
    encoding = _encoding(fqn, whole, (rows, *block[1:]), scale.dtype, attributes_of(target.local))
    expected = encoding.parts(whole)
    assert not isinstance(expected, Refusal), expected.reason
    ((box, _),) = local_boxes(target)
    parts = []
    for name, values in (("qdata", codes), ("scale", scale)):
        where = encoding.part_box(whole, name, box)
        assert where is not None
        alone = not is_dtensor(target.tensor) or (name == "scale" and everywhere)
        key = part_key(encoding, fqn, name)
        parts.append(StoredPart(key, expected[name], where, values, alone))
    return StoredForm(parts, encoding.record(whole))


def _encoding(
    fqn: str,
    info: TensorInfo,
    block: tuple[int, ...],
    scale: torch.dtype,
    attributes: str | None,
) -> Encoding:
    """Return the encoding that stores torchao's int8 of such blocks, scales and settings."""
    grid = CodeGrid("int8", TensorInfo(info.shape, "int8"), block)
    scheme = next(scheme for scheme in registry.schemes() if scheme.name == "int8")
    made: Any = scheme.keeping(info, grid, exact=True) if offers(scheme, KeepsCodes) else None
    assert made is not None, f"{fqn}: {info} in blocks of {block}"
    changed = {} if attributes is None else {"attributes": attributes}
    encoding: Encoding = replace(made, scale_dtype=str(scale).removeprefix("torch."), **changed)
    return encoding
