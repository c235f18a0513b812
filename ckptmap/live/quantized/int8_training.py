"""torchao's Int8QuantizedTrainingLinearWeight in a live model: weights that train in int8.

    codes i8 [rows, in], scale T [rows]     value = code * scale; scale = absmax / 127

Codes of the checkpoint are kept where they have one scale a row that dtype T holds exactly. Other
values are quantized by torchao's `from_float`, to the nearest code. `copy_` rounds stochastically: two
loads would give two models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, TypeGuard

from ckptmap.core.quantized_codes import Coded
from ckptmap.errors import LoadError, RunError
from ckptmap.live.model import fsdp2_params
from ckptmap.live.model.live_form import LiveForm, LoadContext, LoadStep, StoredForm
from ckptmap.live.model.live_tensor import LiveTensor, local_boxes
from ckptmap.live.model.load_report import Encoded
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.quantized.int8_stored import stored_int8
from ckptmap.protocols.offers import offers
from ckptmap.quantization.torchao.subclass_reader import TRAINED
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch


class TrainedInt8Weight(Protocol):
    """torchao's Int8QuantizedTrainingLinearWeight."""

    int_data: torch.Tensor
    scale: torch.Tensor


class TrainedInt8Form(LiveForm):
    """torchao's Int8QuantizedTrainingLinearWeight."""

    classes = frozenset({TRAINED})
    takes_values = True
    kept_by_state_dict = False
    has_values_on_meta = False

    def step(self, target: LiveTensor, source: LazyTensor, context: LoadContext) -> LoadStep | None:
        if not self.is_live(target):
            return None
        scales = kept_scales(target, source)

        def run(reader: TensorReader) -> None:
            fill(reader, source, target, scales)
            if target.fsdp_param is not None:
                fsdp2_params.unshard_alone(target.fsdp_param)

        if scales is None:
            return LoadStep(run, quantizes=True)
        return LoadStep(run, encoded=Encoded(target.fqn, "int8", 0, 0, target.local.numel()))

    def stored(self, target: LiveTensor, fqn: str) -> StoredForm | None:
        # A tensor of a state dict has no module, and passes as a dense one.
        if not target.places or not self.is_live(target):
            return None
        live = target.local
        block = (1, live.shape[1])
        assert _is_trained_int8(live)
        return stored_int8(target, fqn, live.int_data, live.scale.unsqueeze(1), block)


def _is_trained_int8(tensor: torch.Tensor) -> TypeGuard[TrainedInt8Weight]:
    return type(tensor).__name__ == TRAINED


def kept_scales(target: LiveTensor, source: LazyTensor) -> torch.Tensor | None:
    """Return the scales of the checkpoint's codes, one a row, in the live dtype; None: the codes cannot
    be kept."""
    import torch

    coded = source.encoding_
    grid = coded.grid(source.info) if offers(coded, Coded) else None
    if grid is None or grid.name != "int8" or grid.block != (1, source.shape[-1]):
        return None
    try:
        scales = source.read_scales().view(-1)
    except RunError:  # zero points that are not zero
        return None
    narrow = scales.to(target.tensor.dtype)
    return narrow if torch.equal(narrow.to(scales.dtype), scales) else None


def fill(
    reader: TensorReader, source: LazyTensor, target: LiveTensor, scales: torch.Tensor | None
) -> None:
    """Fill this rank's rows: with the checkpoint's codes where `scales` are given, else quantized."""
    live = target.local
    assert _is_trained_int8(live)
    for box, place in local_boxes(target):
        first, count = place.offsets[0], place.sizes[0]
        rows = live.int_data.narrow(0, first, count)
        if scales is None:
            codes, scale = _quantized(reader, source, box, live)
            rows.copy_(codes)
        else:
            reader.codes(source, box, rows)
            scale = scales.narrow(0, box.offsets[0], count)
        live.scale.narrow(0, first, count).copy_(scale)


def _quantized(
    reader: TensorReader, source: LazyTensor, box: Box, live: TrainedInt8Weight
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a box by the rule of the module that defines the live weight's class."""
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
