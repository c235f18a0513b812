"""torchao's int8: one scale a row, group or tensor.

    fc.weight [out, in] T  ->  fc._weight_qdata i8 [out, in], fc._weight_scale f32 [out, 1]
    w'[i, j] = qdata[i, j] * scale[i, 0]              scale = absmax / 127.5

`Int8Tensor` of torchao 0.15 and later; older classes and `IntxUnpackedToInt8Tensor` are read, too, see
`subclass_reader`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from ckptmap.core.json_text import parse_json
from ckptmap.protocols import Refusal
from ckptmap.quantization.blockwise.rounding_rules import RoundingRule, TorchaoInt8
from ckptmap.quantization.blockwise.scaled_encoder import Constants
from ckptmap.quantization.torchao import config_json as torchao_config
from ckptmap.quantization.torchao.scheme import TorchaoEncoding, TorchaoScheme
from ckptmap.quantization.torchao.subclass_reader import TRAINED
from ckptmap.tensors import TensorInfo

KINDS = ("Int8Tensor", "IntxUnpackedToInt8Tensor")


@dataclass(frozen=True)
class Int8(TorchaoEncoding):
    """`fc.weight` [out, in] T -> `fc._weight_qdata` i8, `fc._weight_scale` f32 [out, 1]."""

    name: ClassVar[str] = "int8"
    scheme: ClassVar[str] = "int8"

    @property
    def is_symmetric(self) -> bool:
        """True for Int8Tensor, which stores zero points although they are always 0."""
        return self.kind == "Int8Tensor"

    def rule(self, info: TensorInfo) -> RoundingRule:
        narrow = parse_json(self.attributes).get("reduce_range") is True
        return TorchaoInt8(self.scale_dtype, reduce_range=narrow)

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        """Return why values cannot be encoded so. Zero points follow from torchao's `mapping_type` (0, or of each
        range), which a tensor of `IntxUnpackedToInt8Tensor` does not hold."""
        if self.zero_dtype and not self.is_symmetric:
            return Refusal(
                f"its zero points are read, and none are made anew: {self.kind} does not state the mapping_type"
                " by which torchao chose them"
            )
        return super().cannot_encode(info)

    def constants(self, info: TensorInfo) -> Constants:
        if not (self.zero_dtype and self.is_symmetric):
            return super().constants(info)
        zeros = [0] * prod(self.scale_shape(info))
        return {**super().constants(info), self.zero_part: (self.zero_dtype, zeros)}


class Int8Scheme(TorchaoScheme):
    """The int8 scheme; as a target it is weight-only with a scale a row."""

    name = "int8"
    suffix = "int8"
    live = "int8"
    made = Int8
    kinds = KINDS
    pickled = (*KINDS, "PlainAQTTensorImpl", "QDQTensorImpl", TRAINED)
    plain = '{"act_quant_kwargs": null, "reduce_range": false}'
    codes_dtypes = ("int8",)

    def quantization_config(
        self, encoded: Mapping[str, TensorInfo], dense: Collection[str]
    ) -> Mapping[str, object]:
        return torchao_config.int8(dense)
