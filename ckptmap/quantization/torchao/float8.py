"""torchao's float8: e4m3 codes with one scale a row, block or tensor (`Float8Tensor`, torchao 0.14
and later; AffineQuantizedTensor of float8 is read, see `blocks.pickled`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ckptmap.quantization.blockwise.rounding_rules import RoundingRule, TorchaoFloat8
from ckptmap.quantization.torchao import config_json as torchao_config
from ckptmap.quantization.torchao.scheme import TorchaoEncoding, TorchaoScheme
from ckptmap.tensors import TensorInfo


@dataclass(frozen=True)
class Float8(TorchaoEncoding):
    """`fc.weight` [out, in] T -> `fc._weight_qdata` e4m3, `fc._weight_scale` f32 [out, 1]."""

    name: ClassVar[str] = "float8"
    scheme: ClassVar[str] = "float8"
    codes_dtype: ClassVar[str] = "float8_e4m3fn"

    def rule(self, info: TensorInfo) -> RoundingRule:
        return TorchaoFloat8(self.scale_dtype)


class Float8Scheme(TorchaoScheme):
    """float8 weight-only by rows as a target."""

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

    def quantization_config(
        self, encoded: Mapping[str, TensorInfo], dense: Collection[str]
    ) -> Mapping[str, object]:
        return torchao_config.float8(dense)
