"""The files of a plan, and the work that fills them.

A slot is the place of one chunk in an output file. Its bytes are copied from the source, or an
`Encode` makes them. A `Compare` reads what the source holds twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self, overload

from ckptmap.core.bool_check import BOOL
from ckptmap.core.columns import Columns
from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.core.slot_columns import Slots
from ckptmap.core.tensor_columns import Extents
from ckptmap.protocols import Encoding, OutFile
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.replicas import HINT
from ckptmap.tensors import Chunk, Extent, StoredTensor, TensorInfo


@dataclass(frozen=True, slots=True, eq=False)
class Sources(Columns[StoredTensor | None]):
    """Where the bytes of each slot come from: slot i is the tensor of `infos[i]` that lies from
    `offsets[i]` of `files[i]` on. Where `files[i]` is "" the tensor lies otherwise, and is
    `others[i]`; None: an Encode step makes the bytes."""

    infos: Sequence[TensorInfo | None]
    files: Sequence[str]
    offsets: Sequence[int]
    crcs: Sequence[int | None]
    others: Sequence[StoredTensor | None]

    @staticmethod
    def row(
        info: TensorInfo, file: str, offset: int, crc32: int | None, other: StoredTensor | None
    ) -> StoredTensor | None:
        return StoredTensor(info, Extent(file, offset, crc32)) if file else other

    @classmethod
    def of(cls, tensors: Iterable[StoredTensor | None]) -> Self:
        if isinstance(tensors, cls):
            return tensors
        stored = list(tensors)
        n = len(stored)
        return cls([None] * n, [""] * n, [0] * n, [None] * n, stored)

    @classmethod
    def at(cls, infos: Sequence[TensorInfo], extents: Extents) -> Self:
        """Return the sources of tensors that lie at these extents."""
        files, offsets, crcs = extents.files, extents.offsets, extents.crcs
        return cls(infos, files, offsets, crcs, [None] * len(files))

    @classmethod
    def none(cls, infos: Sequence[TensorInfo]) -> Self:
        """Return the sources of tensors whose bytes an Encode step makes."""
        n = len(infos)
        return cls(infos, [""] * n, [0] * n, [None] * n, [None] * n)

    def is_copied(self, index: int) -> bool:
        """Return whether the bytes of slot `index` are copied unchanged."""
        return bool(self.files[index]) or self.others[index] is not None


@dataclass(frozen=True)
class FilePlan:
    """One output file; `sources[i]` is the stored tensor whose box `slots[i].box` fills slot i.

    None: an `Encode` makes the bytes of the slot.
    """

    out: OutFile
    sources: Sequence[StoredTensor | None]

    @cached_property
    def slots(self) -> Slots:
        return Slots.of(self.out.slots)

    @cached_property
    def origins(self) -> Sources:
        return Sources.of(self.sources)

    @cached_property
    def bools(self) -> frozenset[int]:
        """Slots that are copied from BOOL tensors, whose bytes are checked to be 0 or 1."""
        origins = self.origins
        kinds = {id(info): info for info in origins.infos if info is not None}
        # Tensors share few infos, so identity is compared in place of 100,000 dtypes.
        bool_infos = {key for key, info in kinds.items() if info.dtype == BOOL}
        slots = set[int]()
        if bool_infos:
            slots |= {i for i, info in enumerate(origins.infos) if id(info) in bool_infos}
        others = enumerate(origins.others)
        slots |= {i for i, stored in others if stored is not None and stored.info.dtype == BOOL}
        return frozenset(slots)


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot: `plan.files[file].out.slots[slot]`."""

    file: int
    slot: int


@dataclass(frozen=True)
class Encode:
    """Encode one logical tensor anew, from its values or from its codes.

    targets   part of the encoding -> the slots that tile the part, in row-major order
    fidelity  "exact", "codes", "cast", "quantize" or "requantize"
    keeps     the codes that are kept bit for bit; None: the tensor is decoded and encoded
    """

    tensor: LazyTensor
    encoding: Encoding
    targets: Mapping[str, Sequence[SlotRef]]
    fidelity: str
    keeps: CodeGrid | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EncodeForm:
    """What tensors that are encoded alike have in common.

    source FQN -> the tensor
    parts  the parts that are encoded, each with its place among the stored tensors of one tensor
    """

    source: Callable[[str], LazyTensor]
    encoding: Encoding
    parts: Sequence[tuple[str, int]]
    fidelity: str
    keeps: CodeGrid | None


class EncodedTensor(NamedTuple):
    """A logical tensor that is encoded anew; `first` is the number of the first tensor that stores it."""

    fqn: str
    form: EncodeForm
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class EncodedTensors(Columns[EncodedTensor]):
    """Logical tensors that are encoded anew, as columns."""

    fqns: Sequence[str]
    forms: Sequence[EncodeForm]
    firsts: Sequence[int]

    row = EncodedTensor


@dataclass(frozen=True, slots=True)
class SlotNumbers:
    """The slots of stored tensors, by the numbers of the tensors.

    files, slots  file and slot of the tensor of each number; -1: it has none
    several       the slots of a tensor that has more than one
    """

    files: Sequence[int]
    slots: Sequence[int]
    several: Mapping[int, Sequence[SlotRef]]

    @classmethod
    def of(cls, count: int, numbers: Iterable[Sequence[int]]) -> Self:
        """Return the slots of `count` tensors; `numbers` are those of the tensors in the slots of each file."""
        files, slots = [-1] * count, [-1] * count
        several: dict[int, list[SlotRef]] = {}
        for file, tensors in enumerate(numbers):
            for slot, tensor in enumerate(tensors):
                if slots[tensor] < 0:
                    files[tensor], slots[tensor] = file, slot
                    continue
                if tensor not in several:
                    several[tensor] = [SlotRef(files[tensor], slots[tensor])]
                several[tensor].append(SlotRef(file, slot))
        return cls(files, slots, several)

    def refs(self, number: int) -> Sequence[SlotRef]:
        if number in self.several:
            return self.several[number]
        return [SlotRef(self.files[number], self.slots[number])] if self.slots[number] >= 0 else []


class Encodes(Sequence[Encode]):
    """The tensors that are encoded anew; the step of each is made when it is looked up."""

    def __init__(
        self, encoded: EncodedTensors, numbers: SlotNumbers, files: Sequence[FilePlan]
    ) -> None:
        self._encoded, self._numbers, self._files = encoded, numbers, files

    @overload
    def __getitem__(self, index: int) -> Encode: ...
    @overload
    def __getitem__(self, index: slice) -> Encodes: ...
    def __getitem__(self, index: int | slice) -> Encode | Encodes:
        if isinstance(index, slice):
            return Encodes(self._encoded[index], self._numbers, self._files)
        fqn, form, first = self._encoded[index]
        targets = {part: self._in_order(first + at) for part, at in form.parts}
        return Encode(form.source(fqn), form.encoding, targets, form.fidelity, form.keeps)

    def __len__(self) -> int:
        return len(self._encoded)

    def _in_order(self, number: int) -> Sequence[SlotRef]:
        """Return the slots of a stored tensor in row-major order."""
        refs = self._numbers.refs(number)
        if len(refs) < 2:
            return refs
        return sorted(refs, key=lambda ref: self._files[ref.file].slots.boxes[ref.slot].offsets)


@dataclass(frozen=True)
class Compare:
    """A replica that must hold the same bytes as the tensor it repeats."""

    key: str
    tensor: StoredTensor
    replica: Chunk
    hint: str = HINT
