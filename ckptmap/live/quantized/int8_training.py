"""Weights that train in int8: torchao's Int8QuantizedTrainingLinearWeight, filled in place.

    codes i8 [rows, in], scale T [rows]     value = code * scale; scale = absmax / 127

Codes of the checkpoint are kept where they have a scale a row that T holds exactly; other values
are quantized as torchao does when it makes such a weight (`from_float`: to the nearest code), never
by `copy_`, which rounds stochastically: two loads would give two models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ckptmap.core.code_grids import Coded
from ckptmap.errors import LoadError, RunError
from ckptmap.live.model.reader import Reader
from ckptmap.live.model.target import TRAINED_INT8, Target, held
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch


def is_trained(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == TRAINED_INT8


def kept_scales(target: Target, source: LazyTensor) -> torch.Tensor | None:
    """The scales of the checkpoint's codes, one a row, in T; None: the codes cannot be kept."""
    import torch

    coded = source.encoding_
    grid = coded.grid(source.info) if isinstance(coded, Coded) else None
    if grid is None or grid.name != "int8" or grid.block != (1, source.shape[-1]):
        return None
    try:
        scales = source.read_scales().view(-1)
    except RunError:  # zero points that are not zero
        return None
    narrow = scales.to(target.tensor.dtype)
    return narrow if torch.equal(narrow.to(scales.dtype), scales) else None


def fill(reader: Reader, source: LazyTensor, target: Target, scales: torch.Tensor | None) -> None:
    """This rank's rows, from the checkpoint's codes where their `scales` are given."""
    live: Any = target.local
    for box, place in held(target):
        first, count = place.offsets[0], place.sizes[0]
        if scales is None:
            codes, scale = _quantized(reader, source, box, live)
        else:
            codes = live.int_data.new_empty(box.sizes, device="cpu")
            source.read_codes(box, codes)
            scale = scales.narrow(0, box.offsets[0], count)
        live.int_data.narrow(0, first, count).copy_(codes)
        live.scale.narrow(0, first, count).copy_(scale)


def _quantized(
    reader: Reader, source: LazyTensor, box: Box, live: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the rule of the torchao that is installed, which is where the weight's class is from."""
    import torch

    values = torch.empty(box.sizes, dtype=live.scale.dtype, device=live.int_data.device)
    with reader.meter.hold(values.nbytes, values.device):
        reader.decoded(source, box, values)
    if not bool(values.isfinite().all()):
        raise LoadError(
            "CKM115", f"{source.fqn}: expected finite values, found NaN or infinity",
            "repair it, or load before this weight is quantized for training",
        )  # fmt: skip
    rule = importlib.import_module(type(live).__module__).quantize_int8_rowwise
    codes, scale = rule(values)
    return codes, scale
