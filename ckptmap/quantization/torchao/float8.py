"""torchao's float8: e4m3 codes with one scale a row, block or tensor.

    fc.weight [out, in] T  ->  fc._weight_qdata e4m3 [out, in], fc._weight_scale f32 [out, 1]
    w'[i, j] = qdata[i, j] * scale[i, 0]              scale = absmax / 448

`Float8Tensor` of torchao 0.14 and later; an AffineQuantizedTensor of float8 is read, too, see
`subclass_reader`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ckptmap.protocols import Encoding, Refusal
from ckptmap.quantization.blockwise.rounding_rules import (
    RoundingRule,
    TorchaoFloat8,
    TorchaoFloat8E5m2,
)
from ckptmap.quantization.torchao import config_json as torchao_config
from ckptmap.quantization.torchao.safetensors_flat import part_key
from ckptmap.quantization.torchao.scheme import TorchaoEncoding, TorchaoScheme
from ckptmap.tensors import StoredTensor, TensorInfo


@dataclass(frozen=True)
class Float8(TorchaoEncoding):
    """`fc.weight` [out, in] T -> `fc._weight_qdata` e4m3, `fc._weight_scale` f32 [out, 1]."""

    name: ClassVar[str] = "float8"
    scheme: ClassVar[str] = "float8"
    codes_dtype: ClassVar[str] = "float8_e4m3fn"

    def rule(self, info: TensorInfo) -> RoundingRule:
        return TorchaoFloat8(self.scale_dtype)


class Float8Scheme(TorchaoScheme):
    """The float8 scheme; as a target it is weight-only with a scale a row."""

    name = "float8"
    suffix = "float8"
    live = "float8"
    made = Float8
    kinds = ("Float8Tensor",)
    pickled = ("Float8Tensor", "Float8AQTTensorImpl")
    plain = (
        '{"mm_config": null, "act_quant_kwargs": null, "kernel_preference": '
        '{"_type": "KernelPreference", "_data": "AUTO"}}'
    )
    codes_dtypes = ("float8_e4m3fn",)

    def leaves(self, fqn: str, stored: Mapping[str, StoredTensor]) -> bool:
        codes = stored.get(part_key(fqn, "qdata"))
        return codes is not None and codes.info.dtype == "float8_e5m2"

    def quantization_config(
        self, encoded: Mapping[str, TensorInfo], dense: Collection[str]
    ) -> Mapping[str, object]:
        return torchao_config.float8(dense)


@dataclass(frozen=True)
class Float8E5m2(Float8):
    """The same with codes in e5m2, which `--as` alone writes."""

    name: ClassVar[str] = "float8-e5m2"
    scheme: ClassVar[str] = "float8-e5m2"
    codes_dtype: ClassVar[str] = "float8_e5m2"

    def rule(self, info: TensorInfo) -> RoundingRule:
        return TorchaoFloat8E5m2(self.scale_dtype)


class Float8E5m2Scheme(Float8Scheme):
    """Reads float8 with codes in e5m2."""

    name = "float8-e5m2"
    suffix = ""
    made = Float8E5m2
    codes_dtypes = ("float8_e5m2",)

    def leaves(self, fqn: str, stored: Mapping[str, StoredTensor]) -> bool:
        codes = stored.get(part_key(fqn, "qdata"))
        return codes is None or codes.info.dtype not in self.codes_dtypes

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        return Refusal("it is read only; choose -float8, which is more exact")

    def example(self, info: TensorInfo) -> Encoding:
        """Return an encoding of this form: see `planning.encoding_forms`."""
        return Float8E5m2((1, info.shape[1]))
