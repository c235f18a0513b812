"""The base of torchao's 8-bit schemes: names of parts, stored forms, recognition.

    fc.weight [out, in] T  ->  fc._weight_qdata [out, in] i8 or e4m3, fc._weight_scale f32 [out, 1]
    w'[i, j] = qdata[i, j] * scale[i, 0]

The names are those of torchao's safetensors flattening (prototype/safetensors, since 0.15), so transformers
and torchao load a Hugging Face directory of them. In other containers a record says how to read them.
Pickled objects are read as the same parts, see `subclass_reader`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from ckptmap.core.encoding_records import different, records_of
from ckptmap.core.json_text import parse_json
from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.formats.safetensors.torchao_metadata import SCHEME, parts_of
from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.protocols.encodings import Record, Records
from ckptmap.quantization.blockwise.group_checks import (
    DAMAGED,
    check_parts,
    expected_parts,
    malformed,
    refuse_unstated,
)
from ckptmap.quantization.blockwise.scaled_encoding import ScaledEncoding
from ckptmap.quantization.blockwise.scaled_record import read_record
from ckptmap.quantization.linear_weights import LinearLayerScheme, is_expert
from ckptmap.quantization.torchao import config_json as torchao_config
from ckptmap.quantization.torchao.rank_join import unpack_cut
from ckptmap.quantization.torchao.safetensors_flat import FlatEntry, flat_of, flat_parts, part_key
from ckptmap.quantization.torchao.subclass_reader import (
    OPTIONAL,
    PARTS,
    SMOOTHING,
    TorchaoParts,
    kind_of,
    unpack,
)
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.tensors import FLOATING, Box, Cut, Opaque, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TorchaoEncoding(ScaledEncoding):
    """The encoding of one tensor of torchao's.

    kind        the name of torchao's class
    attributes  the other attributes of the class, as JSON in torchao's own form
    activation  how a wrapper class that torchao has since dropped quantized activations
    """

    codes_part: ClassVar[str] = "qdata"
    scale_part: ClassVar[str] = "scale"
    zero_part: ClassVar[str] = "zero_point"
    activations: ClassVar[Collection[str]] = OPTIONAL

    kind: str = ""
    attributes: str = "{}"
    activation: str = ""

    def part_key(self, key: str, part: str) -> str:
        return part_key(key, part)

    @property
    def is_smoothed(self) -> bool:
        """Do activations pass a factor of each column, which the codes were divided by?"""
        return any(name == SMOOTHING for name, _, _ in self.extra)

    def refusal(self, info: TensorInfo) -> Refusal | None:
        for name, _, shape in self.extra:
            if name == SMOOTHING and prod(shape) != info.shape[-1]:
                return Refusal(
                    f"{name} has a factor for each column, expected {info.shape[-1]}, found {list(shape)}"
                )
        return super().refusal(info)

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        """Return the grid of its codes; None also where they are not those of the weight alone."""
        return None if self.is_smoothed else super().grid(info)

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Decode any box: w' = code * scale * factor of the column, in fp32, rounded once."""
        import torch

        if not self.is_smoothed or not box.numel:
            super().decode(info, parts, box, out)
            return
        wide = torch.empty(box.sizes, dtype=torch.float32, device=out.device)
        super().decode(info, parts, box, wide)
        columns = parts[SMOOTHING].view(-1).narrow(0, box.offsets[-1], box.sizes[-1])
        out.copy_(wide.mul_(columns.to(wide)))

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        return {
            "native": "torchao",
            "kind": self.kind,
            "zero_dtype": self.zero_dtype,
            "extra": self.extra_record,
            "attributes": parse_json(self.attributes),
            "activation": self.activation,
        }


class TorchaoScheme(LinearLayerScheme):
    """Recognizes torchao's codes of one dtype in every stored form; as a target it has a scale a row.

    made          the class of its encodings
    kinds         torchao's classes in safetensors files; the first one is written
    pickled       torchao's classes in pickles, as `subclass_reader.kind_of` names them
    plain         the attributes of a tensor that quantizes no activations, as JSON
    codes_dtypes  the dtypes of its codes
    """

    name: str
    suffix: str
    made: type[TorchaoEncoding]
    kinds: tuple[str, ...]
    pickled: tuple[str, ...]
    plain: str
    codes_dtypes: tuple[str, ...]
    by_loaded_name: ClassVar[bool] = True

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups of records and of torchao's metadata. Raises SourceError CKM115."""
        flat = {id(r) for fqn, r in different(records) if flat_of(fqn, r, self.kinds) is not None}
        mine = records_of(records, (self.name,))
        if flat:
            mine = {
                fqn: record
                for fqn, record in records.items()
                if (id(record) in flat and not self.leaves(fqn, stored)) or fqn in mine
            }

        def made(fqn: str, record: Record, near: Mapping[str, StoredTensor]) -> Found:
            entry = flat_of(fqn, record, self.kinds)
            return self._recorded(fqn, record, near) if entry is None else self._flat(entry, near)

        return WeightForms(stored).recorded(mine, made)

    def leaves(self, fqn: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Return whether another scheme reads the same class with these codes."""
        return False

    def _flat(self, flat: FlatEntry, stored: Mapping[str, StoredTensor]) -> Found:
        keys, weight = flat_parts(flat, stored)
        return self._group(flat.fqn, weight), keys

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        """Return the group of a pickled subclass or its shards. Raises SourceError CKM115 if parts do not fit."""
        leaves = [piece for _, piece in leaf.pieces] if isinstance(leaf, Cut) else [leaf]
        if not all(kind_of(each) in self.pickled for each in leaves):
            return None
        weight = unpack_cut(fqn, leaf) if isinstance(leaf, Cut) else unpack(fqn, leaf)
        return self._group(fqn, weight) if weight.codes.info.dtype in self.codes_dtypes else None

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        if len(info.shape) != 2:
            return Refusal(f"quantizes matrices by rows, found shape {list(info.shape)}")
        encoding = self._fresh((1, max(1, info.shape[1])))
        return encoding.refusal(info) or encoding

    def takes(self, fqn: str) -> bool:
        """Return whether torchao can load the tensor: see `is_expert`."""
        return not is_expert(fqn)

    def kept_record(
        self, fqn: str, record: Record
    ) -> tuple[Mapping[str, object], Sequence[str]] | None:
        """Return what torchao's metadata says of a tensor, whatever its class, and its stored keys."""
        if record.get("scheme") != SCHEME:
            return None
        return {**record, "native": SCHEME}, parts_of(fqn, record)

    def outdated(self, config: Mapping[str, object]) -> bool:
        """Return whether a config is of a form that current torchao refuses."""
        return torchao_config.is_outdated(config)

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """Return the encoding for codes in any blocks that divide the tensor; scales in float32, so lossless."""
        encoding = self._fresh(grid.block)
        whole = not any(n % b for n, b in zip(info.shape, grid.block, strict=False))
        if grid.codes != TensorInfo(info.shape, encoding.codes_dtype) or not whole:
            return None
        return None if encoding.refusal(info) else encoding

    def _fresh(self, block: tuple[int, ...]) -> TorchaoEncoding:
        return self.made(block, kind=self.kinds[0], attributes=self.plain)

    def _group(self, fqn: str, weight: TorchaoParts) -> Group:
        extra = tuple((k, v.info.dtype, v.info.shape) for k, v in weight.extra.items())
        attributes = json.dumps(weight.attributes) if weight.attributes else self.plain
        encoding = self.made(
            weight.block, weight.scale.info.dtype, weight.zero.info.dtype if weight.zero else "", extra,
            weight.kind, attributes, weight.activation,
        )  # fmt: skip
        parts = {"qdata": weight.codes, "scale": weight.scale, **weight.extra}
        if weight.zero is not None:
            parts["zero_point"] = weight.zero
        return Group(fqn, weight.info, encoding, self._checked(fqn, encoding, weight.info, parts))

    def _recorded(
        self, fqn: str, record: Record, stored: Mapping[str, StoredTensor]
    ) -> tuple[Group, Sequence[str]]:
        read = read_record(fqn, record, self.name)
        encoding = self.made(
            read.block, read.scale_dtype, read.dtype("zero_dtype"), read.extra(), read.text("kind"),
            read.attributes(), read.text("activation"),
        )  # fmt: skip
        names = ("qdata", "scale", "zero_point", *(name for name, _, _ in encoding.extra))
        tensors = {part: stored.get(part_key(fqn, part)) for part in names}
        parts = self._checked(fqn, encoding, read.info, tensors)
        unstated = {part: part_key(fqn, part) for part in PARTS if part not in parts}
        refuse_unstated(fqn, "its encoding record", unstated, stored)
        return Group(fqn, read.info, encoding, parts), tuple(part_key(fqn, p) for p in parts)

    def _checked(
        self, fqn: str, encoding: TorchaoEncoding, info: TensorInfo, tensors: Mapping[str, object]
    ) -> dict[str, StoredTensor]:
        expected = expected_parts(fqn, encoding, info)
        if encoding.scale_dtype not in FLOATING:
            raise malformed(
                fqn, f"scales of dtype {encoding.scale_dtype}, expected floating values", DAMAGED
            )
        return check_parts(fqn, self.name, expected, tensors)
