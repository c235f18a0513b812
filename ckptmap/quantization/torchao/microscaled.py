"""Read and write torchao's MXTensor and NVFP4Tensor: `microscaled_encodings` has their forms.

Pickled objects and torchao's flattened safetensors are read as the same parts. What is written is flattened.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import ClassVar

from ckptmap.core.encoding_records import different, records_of
from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.formats.safetensors.torchao_metadata import part_key
from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.protocols.encodings import Record, Records
from ckptmap.quantization.blockwise.group_checks import (
    DAMAGED,
    check_parts,
    expected_parts,
    malformed,
)
from ckptmap.quantization.linear_weights import LinearLayerScheme, is_expert
from ckptmap.quantization.torchao import config_json
from ckptmap.quantization.torchao.microscaled_encodings import (
    ACTIVATIONS,
    NAMES,
    AoMxE5m2,
    AoMxfp4,
    AoMxfp8,
    AoNvfp4,
    Microscaled,
    fresh_data,
)
from ckptmap.quantization.torchao.microscaled_parts import (
    MicroscaledParts,
    described,
    flattened,
    is_flattened,
    pickled,
)
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.tensors import Cut, Opaque, StoredTensor, TensorInfo


class _Scheme(LinearLayerScheme):
    """The base: each reads and writes the tensors of one class with codes of one kind.

    made   the class of its encodings
    kinds  (class, dtype of its codes, block size)
    """

    name: str
    suffix: str
    live = "microscaled"
    by_loaded_name: ClassVar[bool] = True
    made: type[Microscaled]
    block: ClassVar[int] = 32

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups of torchao's metadata and of records. Raises SourceError CKM115."""
        flat = {
            id(record)
            for fqn, record in different(records)
            if is_flattened(record) and self._is_mine(described(fqn, record))
        }
        mine = records_of(records, (self.name,))
        if flat:
            mine = {
                fqn: record for fqn, record in records.items() if id(record) in flat or fqn in mine
            }
        return WeightForms(stored).recorded(mine, self._flat)

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        """Return the group of a pickled object; shards of ranks are not joined."""
        parts = pickled(fqn, leaf) if isinstance(leaf, Opaque) else None
        return self._group(parts) if parts is not None and self._is_mine(parts) else None

    def _is_mine(self, parts: MicroscaledParts) -> bool:
        mine = (self.made.kind, self.made.elements, self.block)
        return mine == (parts.kind, parts.elements, parts.block)

    def _flat(self, fqn: str, record: Record, stored: Mapping[str, StoredTensor]) -> Found:
        parts = flattened(fqn, record, stored)
        return self._group(parts), tuple(part_key(fqn, name) for name in parts.parts)

    def _group(self, parts: MicroscaledParts) -> Group:
        info, encoding = parts.info, self._encoding(parts)
        plain = replace(encoding, data="")
        if not encoding.swizzled and fresh_data(plain, info) == parts.data:
            encoding = plain  # as ckptmap writes it
        expected = expected_parts(parts.fqn, encoding, info)
        held = {part: parts.parts.get(NAMES.get(part, part)) for part in expected}
        if len(parts.parts) != len(expected):
            names = [NAMES.get(part, part) for part in expected]
            more = sorted(set(parts.parts) - set(names))
            raise malformed(parts.fqn, f"{self.name}: parts {more}, expected {names}", DAMAGED)
        return Group(parts.fqn, info, encoding, check_parts(parts.fqn, self.name, expected, held))

    def _encoding(self, parts: MicroscaledParts) -> Microscaled:
        made, data, swizzled = self.made, json.dumps(parts.data), parts.is_swizzled
        if issubclass(made, AoMxfp4):
            return made(swizzled=swizzled, data=data)
        if issubclass(made, AoMxfp8):
            return made(self._block(parts.info), swizzled=swizzled, data=data)
        overall = parts.parts.get("per_tensor_scale")
        extra = tuple(
            (name, part.info.dtype, part.info.shape)
            for name, part in parts.parts.items()
            if name in ACTIVATIONS
        )
        shape = () if overall is None else overall.info.shape
        if shape not in ((), (*parts.info.shape[:1], 1, 1)):
            raise malformed(
                parts.fqn, f"per_tensor_scale of shape {list(shape)}, of {parts.info}", DAMAGED
            )
        return made(
            extra=extra, global_shape=shape, has_overall=overall is not None, swizzled=swizzled,
            data=data,
        )  # fmt: skip

    def _block(self, info: TensorInfo) -> tuple[int, ...]:
        return (*(1 for _ in info.shape[1:]), self.block)

    def encoding(self, info: TensorInfo) -> Microscaled | Refusal:
        if len(info.shape) != 2 or info.dtype not in ("bfloat16", "float32"):
            return Refusal(f"quantizes matrices in bfloat16 and float32, found {info}")
        if info.shape[1] % self.block or not info.numel:
            return Refusal(f"has blocks of {self.block}, which do not divide {info.shape[1]}")
        made = self.made
        return made(self._block(info)) if issubclass(made, AoMxfp8) else made()

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """Return the encoding for codes in the same blocks along rows, with scales of the same kind."""
        encoding = self.encoding(info)
        if isinstance(encoding, Refusal):
            return None
        return encoding.keeping(info, grid)

    def takes(self, fqn: str) -> bool:
        """Return whether torchao can load the tensor: see `is_expert`."""
        return not is_expert(fqn)

    def outdated(self, config: Mapping[str, object]) -> bool:
        """Return whether a config is of a form that current torchao refuses."""
        return config_json.is_outdated(config)

    def quantization_config(
        self, encoded: Mapping[str, TensorInfo], dense: Collection[str]
    ) -> Mapping[str, object]:
        return config_json.microscaled(self.made.kind, self.made.elements, dense)


class AoMxfp4Scheme(_Scheme):
    """MXTensor with codes of 4 bits."""

    name = "torchao-mxfp4"
    suffix = "torchao-mxfp4"
    made = AoMxfp4


class AoMxfp8Scheme(_Scheme):
    """MXTensor with codes in float8_e4m3fn."""

    name = "torchao-mxfp8"
    suffix = "torchao-mxfp8"
    made = AoMxfp8


class AoMxE5m2Scheme(_Scheme):
    """MXTensor with codes in float8_e5m2, which is read only."""

    name = "torchao-mxfp8-e5m2"
    suffix = ""
    made = AoMxE5m2

    def encoding(self, info: TensorInfo) -> Microscaled | Refusal:
        return Refusal("it is read only; choose -torchao-mxfp8, which is more exact")

    def example(self, info: TensorInfo) -> Encoding:
        """Return an encoding of this form: see `planning.encoding_forms`."""
        return AoMxE5m2(self._block(info))


class AoNvfp4Scheme(_Scheme):
    """NVFP4Tensor, with or without a scale of the tensor."""

    name = "torchao-nvfp4"
    suffix = "torchao-nvfp4"
    made = AoNvfp4
    block = 16
