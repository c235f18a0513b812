"""compressed-tensors' microscaled forms: NVFP4, MXFP4 and MXFP8, with or without quantized activations.

    nvfp4  fc.weight_packed u8 [out, in / 2], fc.weight_scale e4m3 [out, in / 16], fc.weight_global_scale f32 [1]
    mxfp4  fc.weight_packed u8 [out, in / 2], fc.weight_scale u8 [out, in / 32]
    mxfp8  fc.weight e4m3 [out, in],          fc.weight_scale u8 [out, in / 32]

    w'[i, j] = T(code * (scale / global_scale))       T(code * 2 ** (scale - 127))

`decompress` gives bfloat16 (compressed-tensors 0.20, compressors/nvfp4, mxfp4, mxfp8): so these are decoded,
unless a record states the dtype that was encoded. Codes and scales are those of its own `calculate_qparams` and
`quantize`. The largest magnitude of activations (`input_global_scale`) moves with the weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ckptmap.core.encoding_records import records_of
from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.protocols import Encoding, Refusal
from ckptmap.protocols.encodings import Record, Records
from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.blockwise.block_geometry import grid_shape
from ckptmap.quantization.blockwise.exponents import DTYPES as EXPONENTS
from ckptmap.quantization.blockwise.exponents import exponents_of
from ckptmap.quantization.blockwise.group_checks import (
    group_by_names,
    refuse_kept_modules,
    refuse_unstated,
)
from ckptmap.quantization.blockwise.read_config import quantization_config
from ckptmap.quantization.blockwise.rounding_rules import RoundingRule
from ckptmap.quantization.blockwise.scaled_encoding import POWERS
from ckptmap.quantization.blockwise.scaled_record import read_record
from ckptmap.quantization.compressed_tensors.config_agreement import (
    Stored,
    kept_modules,
    require_agreement,
)
from ckptmap.quantization.compressed_tensors.config_json import (
    ConfigGroups,
)
from ckptmap.quantization.compressed_tensors.scheme import (
    ACTIVATIONS,
    NamedParts,
    PlainFp8,
)
from ckptmap.quantization.compressed_tensors.target import CompressedTarget
from ckptmap.quantization.extra_parts import Extra, parts_beside
from ckptmap.quantization.linear_weights import is_expert, is_linear_module
from ckptmap.quantization.microscaling.mxfp8 import Mxfp8Rule
from ckptmap.quantization.microscaling.nvfp4 import Nvfp4
from ckptmap.quantization.microscaling.packed_fp4 import PackedFp4
from ckptmap.quantization.weight_forms import WeightForms, one_of_each_form
from ckptmap.tensors import StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

NATIVE = "compressed-tensors"
DECODED = "bfloat16"
"""The dtype of what `decompress` returns."""


@dataclass(frozen=True)
class CtNvfp4(NamedParts, Nvfp4):
    name: ClassVar[str] = "ct-nvfp4"
    scheme: ClassVar[str] = "ct-nvfp4"
    native: ClassVar[str] = NATIVE
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS
    global_part: ClassVar[str] = "global_scale"
    divides: ClassVar[bool] = True


@dataclass(frozen=True)
class CtMxfp4(NamedParts, PackedFp4):
    name: ClassVar[str] = "ct-mxfp4"
    scheme: ClassVar[str] = "ct-mxfp4"
    native: ClassVar[str] = NATIVE
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS
    rounding: ClassVar[str] = "even"


@dataclass(frozen=True)
class CtMxfp8(PlainFp8):
    name: ClassVar[str] = "ct-mxfp8"
    scheme: ClassVar[str] = "ct-mxfp8"
    values_name: ClassVar[str] = POWERS

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return grid_shape(info.shape, self.block_of(info))

    def rule(self, info: TensorInfo) -> RoundingRule:
        return Mxfp8Rule("even")

    def unscaled(self, scales: torch.Tensor) -> torch.Tensor:
        return exponents_of(scales)

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        """Return the recoder where the scales of the grid are powers of two, else None."""
        alike = grid.values == self.values_name
        return super().recoder(info, grid, device) if alike else None


_Encoding = CtNvfp4 | CtMxfp4 | CtMxfp8


class _Microscaled(CompressedTarget, ABC):
    """The base of the three: each reads and writes one form.

    made    the class of its encodings
    codes   the part that holds the codes
    stacks  does transformers decode it where it stacks experts? (5.23, integrations/compressed_tensors.py)
    """

    live = "microscaled"
    made: type[_Encoding]
    codes: ClassVar[str] = "packed"
    stacks: ClassVar[bool] = False

    def takes_layer(self, fqn: str, info: TensorInfo) -> bool:
        return is_linear_module(fqn, info) and (self.stacks or not is_expert(fqn))

    def fresh(self, info: TensorInfo, scale_dtype: str = "", extra: Extra = ()) -> _Encoding:
        """Return the encoding of a tensor."""
        made = self.made
        if issubclass(made, CtMxfp8):
            block = (*(1 for _ in info.shape[1:]), 32)
            return made(block, scale_dtype or "uint8", extra=extra)
        return made(scale_dtype, extra=extra) if scale_dtype else made(extra=extra)

    def encoding(self, info: TensorInfo) -> _Encoding | Refusal:
        if len(info.shape) != 2:
            return Refusal(f"quantizes matrices by rows, found shape {list(info.shape)}")
        encoding = self.fresh(info)
        if isinstance(encoding, CtMxfp8) and info.shape[1] % 32:
            return Refusal(f"has blocks of 32, which do not divide {info.shape[1]}")
        return encoding.refusal(info) or encoding

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """Return the encoding for codes in the same blocks along rows, with scales of the same kind."""
        encoding = self.encoding(info)
        return None if isinstance(encoding, Refusal) else encoding.keeping(info, grid)

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups of this form. Raises SourceError CKM115 where parts do not fit."""
        mine = records_of(records, (self.made.scheme,))
        found = self.found(stored)
        if mine:
            found = [fqn for fqn in found if fqn not in mine]
        if not mine and not found:
            return Groups([], [])
        forms = WeightForms(stored)
        groups = forms.recorded(mine, self._recorded) + forms.groups(found, self._made)
        self._check(groups, self.mounts)
        return groups

    @abstractmethod
    def found(self, stored: Mapping[str, StoredTensor]) -> Sequence[str]:
        """Return the FQNs of weights of this form, by the names and dtypes of their parts."""

    def _made(self, fqn: str, stored: Mapping[str, StoredTensor]) -> Found:
        codes, scale = stored[f"{fqn}_packed" if self.codes else fqn], stored[f"{fqn}_scale"]
        *rows, width = codes.info.shape or (0,)
        info = TensorInfo((*rows, width * 2 if self.codes else width), DECODED)
        extra = parts_beside(fqn, ACTIVATIONS, stored)
        return group_by_names(fqn, info, self.fresh(info, scale.info.dtype, extra), stored)

    def _recorded(self, fqn: str, record: Record, stored: Mapping[str, StoredTensor]) -> Found:
        read = read_record(fqn, record, self.name)
        encoding = self.fresh(read.info, read.scale_dtype, read.extra())
        group, keys = group_by_names(fqn, read.info, encoding, stored)
        unstated = {
            part: encoding.part_key(fqn, part) for part in ACTIVATIONS if part not in group.parts
        }
        refuse_unstated(fqn, "its encoding record", unstated, stored)
        return group, keys

    def _check(self, groups: Groups, mounts: Mounts) -> None:
        """Raise SourceError CKM115 where config.json states another form of a weight, or none."""
        config = quantization_config(groups[0][0].parts[self.codes], mounts)
        refuse_kept_modules(groups, self.codes, kept_modules(config), config)
        said, bits = ConfigGroups(config), 4 if self.codes else 8
        for group in one_of_each_form(groups, said.kinds(groups.fqns)):
            parts = group.parts
            shown = Stored(
                group.info, "float", bits, bool(self.codes), parts[self.codes], parts["scale"]
            )
            require_agreement(group.fqn, shown, config)


class CompressedNvfp4(_Microscaled):
    """NVFP4: the scale of the tensor divides those of the blocks."""

    name = "ct-nvfp4"
    suffix = "ct-nvfp4"
    made = CtNvfp4

    def found(self, stored: Mapping[str, StoredTensor]) -> Sequence[str]:
        parts = StoredParts.of(stored)
        pairs = parts.pairs("_packed", "", "_scale", ("uint8",), _has_float8_scales)
        return [fqn for fqn in pairs.fqns if f"{fqn}_global_scale" in stored]


class CompressedMxfp4(_Microscaled):
    """MXFP4: 4-bit codes with exponents."""

    name = "ct-mxfp4"
    suffix = "ct-mxfp4"
    made = CtMxfp4
    stacks = True

    def found(self, stored: Mapping[str, StoredTensor]) -> Sequence[str]:
        parts = StoredParts.of(stored)
        return parts.pairs("_packed", "", "_scale", ("uint8",), _has_exponents).fqns


def _has_float8_scales(packed: TensorInfo, scale: TensorInfo) -> bool:
    return scale.dtype == "float8_e4m3fn"


def _has_exponents(packed: TensorInfo, scale: TensorInfo) -> bool:
    return scale.dtype in EXPONENTS and not _has_six_bits(packed, scale)


def _is_float8(scale: TensorInfo, codes: TensorInfo) -> bool:
    return codes.dtype == "float8_e4m3fn"


def _has_six_bits(packed: TensorInfo, scale: TensorInfo) -> bool:
    """Return whether 24 bytes have one scale: 32 codes of 6 bits, MXFP6, which is not decoded."""
    return packed.shape[-1:] == (*[24 * n for n in scale.shape[-1:]],)


class CompressedMxfp8(_Microscaled):
    """MXFP8: float8 codes with exponents."""

    name = "ct-mxfp8"
    suffix = "ct-mxfp8"
    made = CtMxfp8
    codes = ""

    def found(self, stored: Mapping[str, StoredTensor]) -> Sequence[str]:
        return StoredParts.of(stored).pairs("_scale", "", "", EXPONENTS, _is_float8).fqns
