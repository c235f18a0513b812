"""compressed-tensors: 8-bit codes beside `weight_scale`, or codes packed into int32 words.

    fc.weight [out, in] T  ->  fc.weight i8 or e4m3 [out, in], fc.weight_scale T [out, 1]
                           or  fc.weight_packed i32 [out, ceil(in * bits / 32)], ...: see `packed`

    w'[i, j] = (code[i, j] - zero) * scale

The shape of the scale says whether there is one per row, group of columns, tile or tensor. Values get the
scale's dtype, as `decompress` does (compressed-tensors 0.20, compressors/naive_quantized). Scales and zero
points of activations belong to the tensor and move with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ckptmap.core.encoding_records import records_of
from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.protocols import Encoder, Encoding, Group, Refusal
from ckptmap.protocols.encodings import Record, Records, beside
from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.blockwise.group_checks import (
    group_by_names,
    refuse_kept_modules,
    refuse_unstated,
)
from ckptmap.quantization.blockwise.read_config import quantization_config
from ckptmap.quantization.blockwise.rounding_rules import RoundingRule, TorchaoFloat8
from ckptmap.quantization.blockwise.scaled_encoding import DTYPES, ScaledEncoding
from ckptmap.quantization.blockwise.scaled_record import read_record
from ckptmap.quantization.compressed_tensors.config_agreement import (
    METHOD,
    Stored,
    kept_modules,
    require_agreement,
)
from ckptmap.quantization.compressed_tensors.config_json import (
    ConfigGroups,
    block_found,
)
from ckptmap.quantization.compressed_tensors.integer_encoder import IntegerEncoder, IntegerForm
from ckptmap.quantization.compressed_tensors.packed import (
    Packed,
    packed_keeping,
    rounded_scales,
)
from ckptmap.quantization.compressed_tensors.packed_reader import find_packed
from ckptmap.quantization.compressed_tensors.target import CompressedTarget
from ckptmap.quantization.extra_parts import parts_beside
from ckptmap.quantization.linear_weights import is_linear_module
from ckptmap.quantization.weight_forms import WeightForms, one_of_each_form
from ckptmap.tensors import StoredTensor, TensorInfo

ACTIVATIONS = (
    "input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_global_scale",
)  # fmt: skip


GROUP = 128


class NamedParts:
    """An encoding whose parts have the library's names: `fc.weight_scale`, and `fc.input_scale` for activations."""

    def part_key(self, key: str, part: str) -> str:
        if part in ACTIVATIONS:
            return beside(key, part)
        return f"{key}_{part}" if part else key


@dataclass(frozen=True)
class Plain(NamedParts, ScaledEncoding):
    """Unpacked codes; a zero point has the scale's shape.

    `scale_stored` is the stored shape of a single scale where it is [] or [1, 1].
    """

    codes_part: ClassVar[str] = ""
    scale_part: ClassVar[str] = "scale"
    zero_part: ClassVar[str] = "zero_point"
    activations: ClassVar[Collection[str]] = ACTIVATIONS

    scale_stored: tuple[int, ...] | None = None

    def rounded(self, info: TensorInfo) -> str:
        return rounded_scales(self.scale_dtype, info)

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        """Return the stored shape of the scales: [1] for one scale, unless its file has another."""
        if self.block_of(info) != info.shape:
            return super().scale_shape(info)
        return (1,) if self.scale_stored is None else self.scale_stored

    def rule(self, info: TensorInfo) -> RoundingRule:
        return TorchaoFloat8(self.scale_dtype)

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        return {
            "native": "compressed-tensors",
            "zero_dtype": self.zero_dtype,
            "extra": self.extra_record,
            "scale_ndim": 1 if self.scale_stored is None else len(self.scale_stored),
        }


@dataclass(frozen=True)
class PlainInt8(Plain):
    """Codes of up to 8 `bits`, one in each byte: with fewer, codes and values of --as use fewer levels."""

    name: ClassVar[str] = "ct-int8"
    scheme: ClassVar[str] = "ct-int8-plain"

    bits: int = 8

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        if len(info.shape) != 2:
            return Refusal(f"matrices are quantized, found shape {list(info.shape)}")
        return None

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        rows, columns = self.block_of(info)
        form = IntegerForm(self.bits, (rows, columns), bool(self.zero_dtype), "", False)
        return IntegerEncoder((info.shape[0], info.shape[1]), form, self.constants(info))

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        """Return a recoder for codes of 8 bits, unless codes have fewer here."""
        return super().recoder(info, grid, device) if self.bits == 8 else None

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        more = super().more_record(info)
        return more if self.bits == 8 else {**more, "bits": self.bits}


@dataclass(frozen=True)
class PlainFp8(Plain):
    name: ClassVar[str] = "ct-fp8"
    scheme: ClassVar[str] = "ct-fp8"
    codes_dtype: ClassVar[str] = "float8_e4m3fn"


_BY_CODES: Mapping[str, type[Plain]] = {"int8": PlainInt8, "float8_e4m3fn": PlainFp8}
_BY_SCHEME = {kind.scheme: kind for kind in _BY_CODES.values()}


class _Rows(CompressedTarget, ABC):
    """The base of the two targets."""

    def takes_layer(self, fqn: str, info: TensorInfo) -> bool:
        return is_linear_module(fqn, info)

    @abstractmethod
    def _fresh(self, block: tuple[int, ...], scale_dtype: str) -> ScaledEncoding: ...

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        """Return the encoding with a scale a row, in the dtype of the weights, which holds it exactly."""
        if len(info.shape) != 2:
            return Refusal(f"quantizes matrices by rows, found shape {list(info.shape)}")
        encoding = self._fresh((1, max(1, info.shape[1])), info.dtype)
        return encoding.refusal(info) or encoding

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """Return the encoding for codes with a scale per row, group, float8 tile or tensor; scales in fp32."""
        if len(info.shape) != 2 or len(grid.block) != 2:
            return None
        encoding = self._fresh(grid.block, "float32")
        grouped = grid.block[0] == 1 and info.shape[1] % grid.block[1] == 0
        tiled = encoding.codes_dtype != "int8" and info.shape[1] % grid.block[1] == 0
        fits = grid.block == info.shape or grouped or tiled
        return encoding.keeping(info, grid) if fits else None


class CompressedFp8(_Rows):
    """Reads every unpacked form; as a target it is float8 with a scale a row."""

    name = "ct-fp8"
    suffix = "ct-fp8"
    live = "float8"

    def _fresh(self, block: tuple[int, ...], scale_dtype: str) -> ScaledEncoding:
        return PlainFp8(block, scale_dtype)

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups of unpacked codes. Raises SourceError CKM115 where scales do not fit."""
        mine = records_of(records, _BY_SCHEME)
        groups = WeightForms(stored).recorded(mine, _recorded)
        groups += _found(stored, records, self.mounts)
        if groups:
            config = quantization_config(groups[0][0].parts[""], self.mounts)
            refuse_kept_modules(groups, "", kept_modules(config), config)
            said = ConfigGroups(config)
            for group in one_of_each_form(groups, said.kinds(groups.fqns)):
                _require_agreement(group, config)
        return groups


class CompressedInt8(_Rows):
    """Reads every packed form; as a target it is 8-bit with a scale a row.

    compressed-tensors writes int8 weights in this form where activations are not quantized.
    """

    name = "ct-int8"
    suffix = "ct-int8"
    live = "int8"

    def _fresh(self, block: tuple[int, ...], scale_dtype: str) -> ScaledEncoding:
        return Packed(block, scale_dtype)

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups of packed codes. Raises SourceError CKM115 where parts do not fit."""
        return find_packed(stored, records, self.mounts)

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        return packed_keeping(8, info, grid) or super().keeping(info, grid, exact)


class CompressedInt4(_Rows):
    """Packed 4-bit codes with a scale for each 128 columns, as compressed-tensors' preset W4A16; with one a
    row where 128 does not divide them. `CompressedInt8` reads them."""

    name = "ct-int4"
    suffix = "ct-int4"
    live = "microscaled"
    more_names = tuple(f"ct-int{bits}" for bits in (1, 2, 3, 5, 6, 7))

    def _fresh(self, block: tuple[int, ...], scale_dtype: str) -> ScaledEncoding:
        return Packed(block, scale_dtype, bits=4)

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        if len(info.shape) != 2:
            return Refusal(f"quantizes matrices by groups, found shape {list(info.shape)}")
        width = info.shape[1]
        encoding = self._fresh((1, max(1, GROUP if width % GROUP == 0 else width)), info.dtype)
        return encoding.refusal(info) or encoding

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        return packed_keeping(4, info, grid) or super().keeping(info, grid, exact)

    def group(
        self, stored: Mapping[str, StoredTensor], records: Records
    ) -> list[tuple[Group, Sequence[str]]]:
        return []


def _recorded(
    fqn: str,
    record: Record,
    stored: Mapping[str, StoredTensor],
) -> Found:
    read, kind = read_record(fqn, record, "compressed-tensors"), _BY_SCHEME[str(record["scheme"])]
    single = _single(read.count("scale_ndim", 1))
    encoding = kind(read.block, read.scale_dtype, read.dtype("zero_dtype"), read.extra(), single)
    if isinstance(encoding, PlainInt8):
        encoding = replace(encoding, bits=min(max(1, read.count("bits", 8)), 8))
    group, keys = group_by_names(read.fqn, read.info, encoding, stored)
    unstated = {
        part: encoding.part_key(read.fqn, part)
        for part in ("zero_point", *ACTIVATIONS)
        if part not in group.parts
    }
    refuse_unstated(read.fqn, "its encoding record", unstated, stored)
    return group, keys


def _require_agreement(group: Group, config: Mapping[str, object]) -> None:
    parts = group.parts
    bits = group.encoding.bits if isinstance(group.encoding, PlainInt8) else None
    kind = "float" if bits is None else "int"
    zero = parts.get("zero_point")
    shown = Stored(group.info, kind, bits or 8, False, parts[""], parts["scale"], zero)
    require_agreement(group.fqn, shown, config)


def _single(ndim: int) -> tuple[int, ...] | None:
    """Return the shape of a single scale with `ndim` dims, None for the usual one."""
    return None if ndim == 1 else (1,) * min(max(0, ndim), 8)


def _found(stored: Mapping[str, StoredTensor], known: Collection[str], mounts: Mounts) -> Groups:
    """Return the groups of other writers, recognized by `weight_scale` beside 8-bit codes."""
    config: Mapping[str, object] | None = None
    said = ConfigGroups({})
    found: dict[str, tuple[type[Plain], int]] = {}
    parts = StoredParts.of(stored)
    for number, fqn, other in zip(*parts.pairs("_scale", "", "", dtypes=DTYPES), strict=True):
        codes, scale = parts.table.infos[other], parts.table.infos[number]
        kind = _BY_CODES.get(codes.dtype)
        if kind is None or fqn in known:
            continue
        if config is None:
            config = quantization_config(stored[fqn], mounts)
            said = ConfigGroups(config)
        if not _is_of_others(codes, scale, config):
            found[fqn] = kind, _bits(said.of(fqn.rpartition(".")[0]))
    read = config or {}
    return WeightForms(stored).groups(
        found, lambda fqn, near: _made(fqn, *found[fqn], read, near), found.values()
    )


def _is_of_others(codes: TensorInfo, scale: TensorInfo, config: Mapping[str, object]) -> bool:
    """Return whether the scales have dims as this library never stores them, and no config says that it did.

    ModelOpt stores [out] for rows and [out / 128, 1, in / 128, 1] for tiles, and Quark [out] (vLLM 0.11,
    model_executor/layers/quantization), which stores groups the other way: codes [in, out], scales [in / g, out].
    """
    alike = scale.numel == 1 or len(scale.shape) == len(codes.shape)
    method = config.get("quant_method")
    return scale.numel > 1 if method == "quark" else not alike and method != METHOD


def _bits(groups: Sequence[Mapping[str, object]]) -> int:
    """Return the bits of codes in whole bytes, which only a config tells; 8 where it does not."""
    said = [w.get("num_bits") for group in groups if isinstance(w := group.get("weights"), Mapping)]
    numbers = {bits if type(bits) is int else None for bits in said}  # JSON may hold a list
    bits = numbers.pop() if len(numbers) == 1 else 8
    return bits if bits is not None and 1 <= bits <= 8 else 8


def _made(
    fqn: str,
    kind: type[Plain],
    bits: int,
    config: Mapping[str, object],
    stored: Mapping[str, StoredTensor],
) -> Found:
    scale = stored[f"{fqn}_scale"].info
    info = TensorInfo(stored[fqn].info.shape, scale.dtype)
    zero = stored.get(f"{fqn}_zero_point")
    block = block_found(fqn, info, scale, config)
    single = _single(len(scale.shape)) if block == info.shape else None
    made = kind(
        block,
        scale.dtype,
        zero.info.dtype if zero else "",
        parts_beside(fqn, ACTIVATIONS, stored),
        single,
    )
    if isinstance(made, PlainInt8):
        made = replace(made, bits=bits)
    return group_by_names(fqn, info, made, stored)
