"""AMD Quark's exported weights of integers and float8. They are read, and written back in the form of a checkpoint.

    rows   fc.weight e4m3 or i8 [out, in], fc.weight_scale T [out]
    groups fc.weight i8 [in, out], fc.weight_scale T [in / g, out], fc.weight_zero_point i8 [in / g, out]
    int4   fc.weight i32 [in, out / 8], fc.weight_scale T [in / g, out], fc.weight_zero_point i32 [in / g, out / 8]

    w'[o, i] = T((code - zero) * scale)

Rows are compressed-tensors' but for the shape of the scales; int4 is AWQ's layout under other names, and of the dtype
"int4" codes and zero points are in two's complement ("uint4": as AWQ has them). Only the `quantization_config` beside them
tells, so other ways of packing (`pack_method`), and layers of several settings, stay as they are. Source: `Pack_4_bits`
(quark 0.13, torch/utils/pack.py), and what its frozen models compute with. MXFP4 is `microscaling.deepseek_fp4`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from ckptmap.core.encoding_records import records_of
from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.protocols import Encoder, Encoding, Refusal
from ckptmap.protocols.encodings import Records
from ckptmap.protocols.file_systems import ReadsFiles
from ckptmap.quantization.blockwise.group_checks import group_by_names
from ckptmap.quantization.blockwise.model_dtype import model_dtype
from ckptmap.quantization.blockwise.read_config import quantization_config, stated_dtype
from ckptmap.quantization.blockwise.scaled_encoder import Constants
from ckptmap.quantization.blockwise.scaled_encoding import DTYPES
from ckptmap.quantization.blockwise.scaled_record import ScaledRecord, read_record
from ckptmap.quantization.compressed_tensors.integer_encoder import IntegerEncoder, IntegerForm
from ckptmap.quantization.compressed_tensors.scheme import ACTIVATIONS, PlainFp8, PlainInt8
from ckptmap.quantization.extra_parts import parts_beside
from ckptmap.quantization.gptq.columns import GroupedColumns
from ckptmap.quantization.gptq.encodings import Awq
from ckptmap.quantization.read_only import ReadOnlyScheme
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.tensors import Box, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

METHOD = "quark"
SEVERAL = ("layer_quant_config", "layer_type_quant_config")
"""What states other settings for some layers."""
_PARTS = {"qweight": "", "qzeros": "_zero_point", "scales": "_scale"}
SIGN = -8
"""Flips the upper bit of a code of 4 bits: from a code that was stored with 8 added to one in two's complement."""


class _ScaleOfRows:
    """Before an encoding of compressed-tensors' whose scales have a second dim."""

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return info.shape[:1]


@dataclass(frozen=True)
class QuarkE4m3(_ScaleOfRows, PlainFp8):
    name: ClassVar[str] = "quark-fp8"
    scheme: ClassVar[str] = "quark-fp8"


@dataclass(frozen=True)
class QuarkI8(_ScaleOfRows, PlainInt8):
    """`symmetric`: does the config state that every zero point is 0?"""

    name: ClassVar[str] = "quark-int8"
    scheme: ClassVar[str] = "quark-int8"

    symmetric: bool = False

    @property
    def is_symmetric(self) -> bool:
        return self.symmetric

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        if self.zero_dtype and not self.symmetric:
            return Refusal("its zero points are read, and none are made anew")
        return super().cannot_encode(info)

    def constants(self, info: TensorInfo) -> Constants:
        return {"zero_point": (self.zero_dtype, (0,) * info.shape[0])} if self.zero_dtype else {}

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        rows, width = info.shape
        form = IntegerForm(self.bits, (1, width), False, "", False)
        return IntegerEncoder((rows, width), form, self.constants(info))

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        return {**super().more_record(info), "symmetric": self.symmetric}


@dataclass(frozen=True)
class QuarkI4(Awq):
    """`complement`: are codes and zero points in two's complement?"""

    name: ClassVar[str] = "quark-int4"
    scheme: ClassVar[str] = "quark-int4"

    complement: bool = False

    def part_key(self, key: str, part: str) -> str:
        return f"{key}{_PARTS[part]}"

    def unpacked(self, words: torch.Tensor, box: Box, inner: Box) -> torch.Tensor:
        return self._turned(super().unpacked(words, box, inner))

    def zero_points(self, words: torch.Tensor, row: int, rows: int) -> torch.Tensor:
        return self._turned(super().zero_points(words, row, rows))

    def packed_band(self, codes: torch.Tensor) -> torch.Tensor:
        return super().packed_band(self._turned(codes))

    def packed_zeros(self, zeros: torch.Tensor) -> torch.Tensor:
        return super().packed_zeros(self._turned(zeros))

    def _turned(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.bitwise_xor(SIGN) if self.complement else codes

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        record = super().record(info)
        return None if record is None else {**record, "complement": self.complement}


class _Bytes:
    """A code in a byte, as `Packing` holds several in a word."""

    def words(self, count: int) -> int:
        return count

    def span(self, start: int, count: int) -> tuple[int, int]:
        return start, count

    def unpacked(self, words: torch.Tensor, start: int, count: int) -> torch.Tensor:
        return words


@dataclass(frozen=True)
class QuarkI8Groups(GroupedColumns):
    """Codes of 8 bits in groups of inputs; they are read only."""

    name: ClassVar[str] = "quark-int8"
    scheme: ClassVar[str] = "quark-int8"

    def part_key(self, key: str, part: str) -> str:
        return f"{key}{_PARTS[part]}"

    @property
    def packing(self) -> _Bytes:
        return _Bytes()

    def packed_sizes(self, info: TensorInfo) -> tuple[int, ...]:
        return ()

    def words(self, info: TensorInfo) -> tuple[int, int]:
        return info.shape[1], info.shape[0]

    def word_box(self, box: Box) -> Box:
        return Box(box.offsets[::-1], box.sizes[::-1])

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        parts = super().parts(info)
        if isinstance(parts, Refusal):
            return parts
        codes = {name: TensorInfo(parts[name].shape, "int8") for name in ("qweight", "qzeros")}
        return {**parts, **codes}

    def unpacked(self, words: torch.Tensor, box: Box, inner: Box) -> torch.Tensor:
        return words.narrow(1, inner.offsets[0] - box.offsets[0], inner.sizes[0]).t().contiguous()

    def packed_band(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.t().contiguous()

    def packed_zeros(self, zeros: torch.Tensor) -> torch.Tensor:
        return zeros

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        return None

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        return Refusal("Quark's groups of int8 are read, and not made anew")


_Parts: TypeAlias = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class _Config:
    """The `quantization_config` beside weights; empty where there is none."""

    json: Mapping[str, object]

    @property
    def weight(self) -> Mapping[str, object]:
        """What the config states of all weights."""
        layers = self.json.get("global_quant_config")
        weight = layers.get("weight") if isinstance(layers, Mapping) else None
        return weight if isinstance(weight, Mapping) else {}

    @property
    def has_several(self) -> bool:
        """Whether it states other settings for some layers."""
        return any(self.json.get(key) for key in SEVERAL)


class _Scheme(ReadsFiles, ReadOnlyScheme, ABC):
    """The base of all."""

    name: str
    live = "microscaled"
    unmade = "it is read, and written back in the form of a checkpoint (--as PATH)"

    @abstractmethod
    def example(self, info: TensorInfo) -> Encoding:
        """Return an encoding of this form: see `planning.encoding_forms`."""

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups of this form. Raises SourceError CKM115 where parts do not fit."""
        mine = records_of(records, (self.name,))
        parts = StoredParts.of(stored)
        _, _, scales = next(parts.by_last("_scale", dtypes=DTYPES), ("", [], []))
        some = [parts.table.tensors[number] for number in scales[:1]]  # all are of one directory
        config = _Config(quantization_config(some[0], self.mounts) if some else {})
        found: list[str] = []
        if config.json.get("quant_method") == METHOD and self.states(config):
            fqns = parts.pairs("_scale", "", "", DTYPES, self.fits).fqns
            found = [fqn for fqn in fqns if fqn not in mine and fqn.endswith("weight")]
        forms = WeightForms(stored)
        groups = forms.recorded(
            mine, lambda fqn, record, near: self.recorded(read_record(fqn, record, self.name), near)
        )
        if not found:
            return groups
        scales = parts.table.numbers_of([f"{fqn}_scale" for fqn in found])
        dtype = stated_dtype(stored[found[0]], self.mounts) or model_dtype(parts, scales)
        return groups + forms.groups(found, lambda fqn, near: self.made(fqn, config, dtype, near))

    @abstractmethod
    def fits(self, scale: TensorInfo, codes: TensorInfo) -> bool:
        """Return whether they may be of this form, by dtypes and shapes."""

    def states(self, config: _Config) -> bool:
        """Return whether Quark's config may state this form for every layer that has it."""
        return True

    @abstractmethod
    def made(self, fqn: str, config: _Config, dtype: str, stored: _Parts) -> Found: ...

    @abstractmethod
    def recorded(self, read: ScaledRecord, stored: _Parts) -> Found: ...


class _Rows(_Scheme):
    form: ClassVar[type[QuarkE4m3 | QuarkI8]]

    def fits(self, scale: TensorInfo, codes: TensorInfo) -> bool:
        is_mine = codes.dtype == self.form.codes_dtype and len(codes.shape) == 2
        return is_mine and scale.shape == codes.shape[:1]

    def example(self, info: TensorInfo) -> Encoding:
        return self.form((1, info.shape[-1]), info.dtype)

    def made(self, fqn: str, config: _Config, dtype: str, stored: _Parts) -> Found:
        scale, zero = stored[f"{fqn}_scale"].info, stored.get(f"{fqn}_zero_point")
        info = TensorInfo(stored[fqn].info.shape, scale.dtype)
        extra = parts_beside(fqn, ACTIVATIONS, stored)
        block = (1, info.shape[1])
        encoding = self.form(block, scale.dtype, zero.info.dtype if zero else "", extra)
        symmetric = not config.has_several and config.weight.get("symmetric") is True
        return group_by_names(fqn, info, _stating(encoding, symmetric), stored)

    def recorded(self, read: ScaledRecord, stored: _Parts) -> Found:
        encoding = self.form(read.block, read.scale_dtype, read.dtype("zero_dtype"), read.extra())
        symmetric = read.more.get("symmetric") is True
        return group_by_names(read.fqn, read.info, _stating(encoding, symmetric), stored)


def _stating(encoding: QuarkE4m3 | QuarkI8, symmetric: bool) -> QuarkE4m3 | QuarkI8:
    return replace(encoding, symmetric=symmetric) if isinstance(encoding, QuarkI8) else encoding


class QuarkFp8Scheme(_Rows):
    name = "quark-fp8"
    form = QuarkE4m3


class QuarkInt8Scheme(_Rows):
    name = "quark-int8"
    form = QuarkI8

    def fits(self, scale: TensorInfo, codes: TensorInfo) -> bool:
        return super().fits(scale, codes) or _are_groups(scale, codes)

    def made(self, fqn: str, config: _Config, dtype: str, stored: _Parts) -> Found:
        codes, scale = stored[fqn].info, stored[f"{fqn}_scale"].info
        if not _are_groups(scale, codes):
            return super().made(fqn, config, dtype, stored)
        encoding = QuarkI8Groups(8, codes.shape[0] // scale.shape[0], scale.dtype)
        return group_by_names(fqn, TensorInfo(codes.shape[::-1], dtype), encoding, stored)

    def recorded(self, read: ScaledRecord, stored: _Parts) -> Found:
        if read.more.get("bits") != 8 or "order" not in read.more:
            return super().recorded(read, stored)
        encoding = QuarkI8Groups(8, read.block[-1], read.scale_dtype)
        return group_by_names(read.fqn, read.info, encoding, stored)


def _are_groups(scale: TensorInfo, codes: TensorInfo) -> bool:
    """Return whether codes [in, out] have scales [in / g, out]."""
    if codes.dtype != "int8" or len(codes.shape) != 2 or len(scale.shape) != 2 or scale.numel < 2:
        return False
    return scale.shape[1] == codes.shape[1] and codes.shape[0] % scale.shape[0] == 0


class QuarkInt4Scheme(_Scheme):
    name = "quark-int4"

    def fits(self, scale: TensorInfo, codes: TensorInfo) -> bool:
        if codes.dtype != "int32" or len(codes.shape) != 2 or len(scale.shape) != 2:
            return False
        groups, rows = scale.shape
        return rows == 8 * codes.shape[1] and groups > 0 and codes.shape[0] % groups == 0

    def example(self, info: TensorInfo) -> Encoding:
        return QuarkI4(4, 128, info.dtype)

    def states(self, config: _Config) -> bool:
        if config.has_several:
            return False
        export, weight = config.json.get("export"), config.weight
        packed = isinstance(export, Mapping) and export.get("pack_method") == "reorder"
        whole = weight.get("zero_point_type", "int32") == "int32"
        return packed and whole and weight.get("dtype") in ("int4", "uint4")

    def made(self, fqn: str, config: _Config, dtype: str, stored: _Parts) -> Found:
        weight, scale = config.weight, stored[f"{fqn}_scale"].info
        width = stored[fqn].info.shape[0]
        encoding = QuarkI4(
            4, width // scale.shape[0], scale.dtype, weight.get("symmetric") is True,
            complement=weight.get("dtype") == "int4",
        )  # fmt: skip
        return group_by_names(fqn, TensorInfo((scale.shape[1], width), dtype), encoding, stored)

    def recorded(self, read: ScaledRecord, stored: _Parts) -> Found:
        symmetric, complement = (read.more.get(key) is True for key in ("symmetric", "complement"))
        encoding = QuarkI4(4, read.block[-1], read.scale_dtype, symmetric, complement=complement)
        return group_by_names(read.fqn, read.info, encoding, stored)
