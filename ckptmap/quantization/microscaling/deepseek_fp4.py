"""Packed 4-bit codes under the weight's own name, and exponents for blocks of 32. They are read only.

    DeepSeek-V4's experts   experts.0.w1.weight i8 [out, in / 2], experts.0.w1.scale  e8m0 [out, in / 32]
    Quark's and ModelOpt's  fc.weight           u8 [out, in / 2], fc.weight_scale     u8   [out, in / 32]

    w'[i, j] = T(code[i, j] * scale[i, j // 32])        in fp32

Source: transformers 5, integrations/finegrained_fp8.py (`Fp8Dequantize`, `expert_dtype` "fp4"), which names
DeepSeek's scale `weight_scale_inv`; what Quark 0.13 (`OCP_MXFP4Spec`) and ModelOpt 0.47 (`MXFP4_DEFAULT_CFG`) export.
The even element is in the low nibble. The file does not record the dtype of the weights: it is that of the dense tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ckptmap.core.encoding_records import records_of
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.protocols import Encoding
from ckptmap.protocols.encodings import Records, beside
from ckptmap.quantization.blockwise.exponents import DTYPES as EXPONENTS
from ckptmap.quantization.blockwise.group_checks import (
    group_by_names,
)
from ckptmap.quantization.blockwise.model_dtype import model_dtype
from ckptmap.quantization.blockwise.scaled_record import ScaledRecord, read_record
from ckptmap.quantization.extra_parts import parts_beside
from ckptmap.quantization.microscaling.packed_fp4 import PackedFp4
from ckptmap.quantization.read_only import ReadOnlyScheme
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.tensors import StoredTensor, TensorInfo

_NAMES = ("scale", "weight_scale_inv")


@dataclass(frozen=True)
class DeepseekFp4(PackedFp4):
    """`scale_name` is the last segment of the scale's key."""

    name: ClassVar[str] = "fp8-fp4"
    scheme: ClassVar[str] = "fp8-fp4"
    native: ClassVar[str] = "transformers"

    scale_dtype: str = "float8_e8m0fnu"
    packed_dtype: str = "int8"
    scale_name: str = "scale"

    def part_key(self, key: str, part: str) -> str:
        if part == "packed":
            return key
        return beside(key, self.scale_name if part == "scale" else part)

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        return {"scale_name": self.scale_name}


@dataclass(frozen=True)
class QuarkMxfp4(DeepseekFp4):
    name: ClassVar[str] = "quark-mxfp4"
    scheme: ClassVar[str] = "quark-mxfp4"
    native: ClassVar[str] = "quark"
    activations: ClassVar[tuple[str, ...]] = ("input_scale",)
    rounding: ClassVar[str] = "even"

    scale_dtype: str = "uint8"
    packed_dtype: str = "uint8"
    scale_name: str = "weight_scale"


class DeepseekFp4Scheme(ReadOnlyScheme):
    """Recognizes packed codes by exponents beside them."""

    name = "fp8-fp4"
    live = "microscaled"
    unmade = "it is read only; choose -ct-mxfp4"
    made: type[DeepseekFp4] = DeepseekFp4

    def example(self, info: TensorInfo) -> Encoding:
        """Return an encoding of this form: see `planning.encoding_forms`."""
        return self.made()

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups of codes and exponents. Raises SourceError CKM115 where they do not fit."""
        mine = records_of(records, (self.name,))
        found = {fqn: name for fqn, name in self.found(stored) if fqn not in mine}
        if not mine and not found:
            return Groups([], [])
        forms = WeightForms(stored)
        groups = forms.recorded(
            mine,
            lambda fqn, record, near: self._recorded(read_record(fqn, record, self.name), near),
        )
        dtype = model_dtype(StoredParts.of(stored), ()) if found else ""
        return groups + forms.groups(
            found, lambda fqn, near: self._made(fqn, found[fqn], dtype, near), found.values()
        )

    def found(self, stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, str]]:
        """Yield (FQN, the scale's name) of packed codes with exponents beside them."""
        parts = StoredParts.of(stored)
        for key in parts.ending(*_NAMES, dtypes=EXPONENTS):
            stem, dot, last = key.rpartition(".")
            if last in _NAMES:
                codes = parts.info(f"{stem}{dot}weight")
                if codes is not None and codes.dtype == "int8" and codes.shape:
                    yield f"{stem}{dot}weight", last

    def _recorded(self, read: ScaledRecord, stored: Mapping[str, StoredTensor]) -> Found:
        name = read.text("scale_name")
        encoding = self.made(read.scale_dtype, extra=read.extra(), scale_name=name)
        return group_by_names(read.fqn, read.info, encoding, stored)

    def _made(self, fqn: str, name: str, dtype: str, stored: Mapping[str, StoredTensor]) -> Found:
        *rows, width = stored[fqn].info.shape
        info = TensorInfo((*rows, 2 * width), dtype)
        extra = parts_beside(fqn, self.made.activations, stored)
        scale = stored[beside(fqn, name)]
        encoding = self.made(scale.info.dtype, extra=extra, scale_name=name)
        return group_by_names(fqn, info, encoding, stored)


class QuarkMxfp4Scheme(DeepseekFp4Scheme):
    """Those of Quark and ModelOpt: 16 bytes of codes have one exponent, as MXFP6 has for 24."""

    name = "quark-mxfp4"
    made = QuarkMxfp4

    def found(self, stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, str]]:
        fqns = StoredParts.of(stored).pairs("_scale", "", "", EXPONENTS, _is_packed).fqns
        return ((fqn, "weight_scale") for fqn in fqns if fqn.rpartition(".")[2] == "weight")


def _is_packed(scale: TensorInfo, codes: TensorInfo) -> bool:
    return codes.dtype == "uint8" and codes.shape[-1:] == (*[16 * n for n in scale.shape[-1:]],)
