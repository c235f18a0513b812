"""optimum-quanto's weights, as its modules store them in a state dict. They are read only.

    qint8, qfloat8*  fc.weight._data        i8 or fp8 [out, in]          fc.weight._scale T [out, 1]; of one row T []
    qint4, qint2     fc.weight._data._data  words of codes, see `stripes`
                     fc.weight._scale       T [groups, 1]                fc.weight._shift T or u8 [groups, 1]

    w' = scale * code                       rounded to T once
    w' = scale * code - shift               each step rounded to T; T shifts
    w' = scale * (code - shift)             u8 shifts, the difference in i8

Source: `QBytesTensor`, `QBitsTensor` and `QModuleMixin._save_to_state_dict` (optimum-quanto 0.2.7). The scales
of a layer's activations (`input_scale`, `output_scale`) move with its weight. The kernels' own packings are
never stored: quanto converts them back when it saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ckptmap.core.encoding_records import records_of
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.protocols import Encoding, Refusal
from ckptmap.protocols.encodings import Record, Records, beside
from ckptmap.protocols.file_systems import ReadsFiles
from ckptmap.quantization.blockwise.group_checks import DAMAGED, group_by_names, malformed
from ckptmap.quantization.blockwise.scaled_encoding import DTYPES, ScaledEncoding
from ckptmap.quantization.blockwise.scaled_record import read_record
from ckptmap.quantization.dense import Dense
from ckptmap.quantization.extra_parts import parts_beside
from ckptmap.quantization.read_only import ReadOnlyScheme
from ckptmap.quantization.striped.quanto_map import map_beside, require_mapped_kind
from ckptmap.quantization.striped.quanto_shapes import config_beside, shape_of
from ckptmap.quantization.striped.striped_encoding import CodeRows, StripedEncoding
from ckptmap.quantization.striped.stripes import Stripes
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.tensors import StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

LIBRARY = "quanto"
ACTIVATIONS = ("input_scale", "output_scale")
INTEGERS = ("uint8", "int8")
"""Dtypes of shifts that are zero points."""
CODES_8 = ("int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")


class _Named:
    def part_key(self, key: str, part: str) -> str:
        """Return the stored name: activation scales are in the module, other parts below the weight."""
        return beside(key, part) if part in ACTIVATIONS else f"{key}.{part}"


@dataclass(frozen=True)
class Quanto8(_Named, ScaledEncoding):
    """8-bit codes; `kind` is their dtype."""

    name: ClassVar[str] = "quanto-8bit"
    scheme: ClassVar[str] = "quanto-8bit"
    codes_part: ClassVar[str] = "_data"
    scale_part: ClassVar[str] = "_scale"
    activations: ClassVar[Collection[str]] = ACTIVATIONS

    kind: str = "int8"

    @property
    def codes_dtype(self) -> str:  # type: ignore[override]
        return self.kind

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        """Return [out, 1, ...]; quanto takes one row for a tensor with one scale, which has no dims."""
        return () if info.shape[0] == 1 else super().scale_shape(info)

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        """Return None: names and dtypes say it."""
        return None

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        return Refusal(f"{self.name} is read, and not made anew")

    def afresh(self) -> Encoding:
        """Return the encoding that changed values are written in."""
        return Dense()


@dataclass(frozen=True)
class QuantoPacked(_Named, StripedEncoding):
    """Codes of 2 or 4 bits.

    bits   bits of a code
    group  elements of a group; 0: a group is a row of the weight
    shift  dtype of the shifts: uint8, int8, or that of the weight
    """

    scheme: ClassVar[str] = "quanto-packed"
    codes_part: ClassVar[str] = "_data._data"
    scale_part: ClassVar[str] = "_scale"
    shift_part: ClassVar[str] = "_shift"
    activations: ClassVar[Collection[str]] = ACTIVATIONS

    bits: int = 4
    group: int = 128
    shift: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"quanto-qint{self.bits}"

    @property
    def stripes(self) -> Stripes:
        return Stripes(self.bits, 8 // self.bits, first_is_high=False)

    def layout(self, info: TensorInfo) -> CodeRows | Refusal:
        width = self.group or info.numel // info.shape[0]
        rows, rest = divmod(info.numel, width)
        if rest:
            return Refusal(f"groups of {width} do not divide shape {list(info.shape)}")
        return CodeRows(rows, width)

    def packed_parts(self, info: TensorInfo, layout: CodeRows) -> Mapping[str, TensorInfo]:
        inner = (self.group,) if self.group else info.shape[1:]
        scales = layout.rows, *(1 for _ in inner)
        return {
            self.codes_part: TensorInfo((self.stripes.step(layout.rows), *inner), "uint8"),
            self.scale_part: TensorInfo(scales, info.dtype),
            self.shift_part: TensorInfo(scales, self.shift),
        }

    def values(self, codes: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        import torch

        if shift.dtype.is_floating_point:
            return codes.to(scale.dtype).mul_(scale).sub_(shift)
        return (codes.to(torch.int8) - shift.to(torch.int8)).to(scale.dtype).mul_(scale)

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        return {
            "scheme": self.scheme, "version": 1, "native": LIBRARY, "bits": self.bits,
            "block": [*(1 for _ in info.shape[1:]), self.group or 1], "is_grouped": bool(self.group),
            "scale_dtype": info.dtype, "shift_dtype": self.shift, "shape": list(info.shape),
            "dtype": info.dtype, "extra": self.extra_record,
        }  # fmt: skip


class _Scheme(ReadsFiles, ReadOnlyScheme):
    """The base of the two."""

    name: str
    live = "striped"
    unmade = "it is read only; choose -int8, -ct-int8, -nf4"
    ending: ClassVar[str]
    """What follows the weight's name in the key of its codes."""

    def _found(self, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
        for key in StoredParts.of(stored).ending(self.ending):
            if f"{key.removesuffix(self.ending)}._scale" in stored:
                yield key.removesuffix(self.ending)


class Quanto8Scheme(_Scheme):
    """Recognizes 8-bit codes by their names."""

    name = Quanto8.scheme
    ending = "._data"

    def example(self, info: TensorInfo) -> Encoding:
        """Return an encoding of this form: see `planning.encoding_forms`."""
        return Quanto8(scale_dtype=info.dtype)

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups. Raises SourceError CKM115 where parts do not fit."""
        fqns = [
            fqn
            for fqn in self._found(stored)
            if _is_by_row(stored[f"{fqn}._data"].info, stored[f"{fqn}._scale"].info)
        ]
        if fqns:
            stated = map_beside(stored[f"{fqns[0]}._data"], self.mounts)
            for fqn in fqns if stated else ():
                require_mapped_kind(fqn, f"q{stored[f'{fqn}._data'].info.dtype}", stated)
        return WeightForms(stored).groups(fqns, _made_8)


class QuantoPackedScheme(_Scheme):
    """Recognizes packed codes by their names; those whose shape nothing tells are left."""

    name = QuantoPacked.scheme
    more_names = ("quanto-qint2", "quanto-qint4")
    ending = "._data._data"

    def example(self, info: TensorInfo) -> Encoding:
        """Return an encoding of this form: see `planning.encoding_forms`."""
        return QuantoPacked(shift=info.dtype)

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups. Raises SourceError CKM115 where parts do not fit."""
        mine = records_of(records, (self.name,))
        groups = Groups.of(_recorded(fqn, record, stored) for fqn, record in mine.items())
        found = [fqn for fqn in self._found(stored) if fqn not in mine]
        if not found:
            return groups
        config = config_beside(stored[found[0] + self.ending], self.mounts)
        read = {fqn: _read(fqn, stored, config) for fqn in found}
        known = {fqn: facts for fqn, facts in read.items() if facts is not None}
        stated = map_beside(stored[found[0] + self.ending], self.mounts)
        for fqn, (bits, *_) in known.items() if stated else ():
            require_mapped_kind(fqn, f"qint{bits}", stated)
        return groups + WeightForms(stored).groups(
            known, lambda fqn, near: _made(fqn, *known[fqn], near), known.values()
        )


def _is_by_row(codes: TensorInfo, scale: TensorInfo) -> bool:
    """Return whether there is a scale of each row; that of a single row has no dims."""
    by_row = (*codes.shape[:1], *(1 for _ in codes.shape[1:]))
    shown = codes.dtype in CODES_8 and scale.dtype in DTYPES and len(codes.shape) > 1
    return shown and scale.shape == (() if codes.shape[0] == 1 else by_row)


def _made_8(fqn: str, stored: Mapping[str, StoredTensor]) -> Found:
    codes, scale = stored[f"{fqn}._data"].info, stored[f"{fqn}._scale"].info
    info = TensorInfo(codes.shape, scale.dtype)
    block = (1, *codes.shape[1:])
    encoding = Quanto8(
        block, scale.dtype, extra=parts_beside(fqn, ACTIVATIONS, stored), kind=codes.dtype
    )
    return group_by_names(fqn, info, encoding, stored)


def _read(
    fqn: str, stored: Mapping[str, StoredTensor], config: Mapping[str, object]
) -> tuple[int, int, tuple[int, ...]] | None:
    """Return bits, group and shape of packed codes; None: something does not tell them."""
    words, scale = stored[f"{fqn}._data._data"].info, stored[f"{fqn}._scale"].info
    if f"{fqn}._shift" not in stored or len(words.shape) < 2 or words.dtype != "uint8":
        return None
    shift = stored[f"{fqn}._shift"].info.dtype
    rows, inner = scale.shape[0] if scale.shape else 0, words.shape[1:]
    fitting = [bits for bits in (2, 4) if rows and -(-rows * bits // 8) == words.shape[0]]
    by_row = scale.shape == (rows, *(1 for _ in inner))
    known = scale.dtype in DTYPES and shift in (*INTEGERS, scale.dtype)
    if len(fitting) != 1 or 0 in inner or not known or not by_row:
        return None
    if len(inner) > 1:
        return fitting[0], 0, (rows, *inner)
    bias = stored.get(beside(fqn, "bias"))
    shape = shape_of(fqn, rows, inner[0], bias, config)
    if shape is None:
        return None
    return fitting[0], 0 if shape == (rows, inner[0]) else inner[0], shape


def _made(
    fqn: str, bits: int, group: int, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]
) -> Found:
    scale, shift = stored[f"{fqn}._scale"].info, stored[f"{fqn}._shift"].info
    encoding = QuantoPacked(parts_beside(fqn, ACTIVATIONS, stored), bits, group, shift.dtype)
    return group_by_names(fqn, TensorInfo(shape, scale.dtype), encoding, stored)


def _recorded(fqn: str, record: Record, stored: Mapping[str, StoredTensor]) -> Found:
    read = read_record(fqn, record, QuantoPacked.scheme)
    bits, shift = read.count("bits", 0), read.dtype("shift_dtype")
    if bits not in (2, 4) or shift not in (*INTEGERS, read.info.dtype):
        raise malformed(fqn, f"quanto record: bits {bits}, shift_dtype {shift!r}", DAMAGED)
    group = read.block[-1] if record.get("is_grouped") else 0
    return group_by_names(fqn, read.info, QuantoPacked(read.extra(), bits, group, shift), stored)
