"""Writes a stored tensor into a live one in place: also its codes and scales, where it is quantized.

The planners of torch.distributed.checkpoint need this, whose caller holds the tensors. `load` replaces
quantized tensors instead.
"""

from __future__ import annotations

from ckptmap.errors import LoadError
from ckptmap.live.model.live_form import form_of
from ckptmap.live.model.live_tensor import LiveTensor, local_boxes
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.optimizer.code_blocks import copy_codes, encode, encode_cut, values_of_span
from ckptmap.live.optimizer.family import codes_of
from ckptmap.live.quantized import dense
from ckptmap.storage.lazy_tensor import LazyTensor


def fill(reader: TensorReader, source: LazyTensor, target: LiveTensor) -> None:
    """Write this rank's boxes of `source`, of any encoding, into the live tensor of `target`.

    Codes are copied where encoding and block boundaries agree, and scale blocks of NF4 regrouped.
    Other values are decoded, and quantized anew where the live tensor is quantized. Raises LoadError
    CKM502 for another shape, CKM504 where blocks do not fit.
    """
    live = target.tensor
    if tuple(live.shape) != source.shape:
        raise LoadError(
            "CKM502",
            f"{target.fqn}: live {list(live.shape)}, checkpoint {list(source.shape)}",
            "build the model of this checkpoint",
        )
    form = form_of(target)
    if form is not None and not form.takes_values:
        form.overwrite(reader, source, target)
    elif codes_of(live) is not None:
        _codes(reader, source, target)
    else:
        dense.overwrite(reader, source, target)


def _codes(reader: TensorReader, source: LazyTensor, target: LiveTensor) -> None:
    import torch

    codes = codes_of(target.tensor)
    assert codes is not None
    boxes = local_boxes(target)
    if copy_codes(reader, source, codes, boxes):
        return
    if codes.span is not None:
        encode(target.tensor, codes, values_of_span(reader, source, codes.span, codes.codes.device))
        return
    values = torch.zeros(codes.shape, dtype=torch.float32, device=codes.codes.device)
    for box, view in target.windows(values):
        reader.decoded(source, box, view)
    if codes.segments is None:
        encode(target.tensor, codes, values)
    else:
        encode_cut(reader, source, codes, values)
