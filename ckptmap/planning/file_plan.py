"""What a plan consists of: files to be written, and where the bytes of each slot come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from ckptmap.core.bool_bytes import BOOL
from ckptmap.core.code_grids import Grid
from ckptmap.core.slot_columns import Slots
from ckptmap.core.tensor_columns import Located
from ckptmap.protocols import Encoding, OutFile
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.replicas import HINT
from ckptmap.tensors import Chunk, StoredTensor, TensorInfo


class Sources(Sequence[StoredTensor | None]):
    """Where the bytes of each slot are: those of slot i from `offsets[i]` of `files[i]` on, which
    is "" where they lie otherwise, in the tensor `others[i]`, or where they are yet to be made."""

    __slots__ = ("crcs", "files", "infos", "offsets", "others")

    def __init__(
        self,
        infos: Sequence[TensorInfo | None],
        located: Located,
        others: Mapping[int, StoredTensor],
    ) -> None:
        assert len(infos) == len(located.files)
        self.infos, self.others = infos, others
        self.files, self.offsets, self.crcs = located.files, located.offsets, located.crcs

    @classmethod
    def of(cls, tensors: Iterable[StoredTensor | None]) -> Sources:
        """These, one by one; themselves where they are columns already."""
        if isinstance(tensors, Sources):
            return tensors
        held = list(tensors)
        count = len(held)
        others = {index: stored for index, stored in enumerate(held) if stored is not None}
        return cls([None] * count, Located([""] * count, [0] * count), others)

    def copied(self, index: int) -> bool:
        """Does it move as bytes?"""
        return bool(self.files[index]) or index in self.others

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> StoredTensor | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[StoredTensor | None]: ...
    def __getitem__(self, index: int | slice) -> StoredTensor | list[StoredTensor | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        info = self.infos[index]
        if info is None or not self.files[index]:
            return self.others.get(index)
        return StoredTensor(info, Located(self.files, self.offsets, self.crcs).one(index))


@dataclass(frozen=True)
class FilePlan:
    """One output file; `sources[i]` holds the bytes of slot i as they are (the slot's box is in
    that stored tensor's coordinates), None: an Encode step writes it."""

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
        """Slots that are copied from BOOL tensors, whose bytes are looked at."""
        origins = self.origins
        kinds = {id(info): info for info in origins.infos if info is not None}
        wanted = {key for key, info in kinds.items() if info.dtype == BOOL}
        found = [i for i, info in enumerate(origins.infos) if id(info) in wanted] if wanted else []
        others = [i for i, stored in origins.others.items() if stored.info.dtype == BOOL]
        return frozenset((*found, *others))


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot: `plan.files[file].out.slots[slot]`."""

    file: int
    slot: int


@dataclass(frozen=True)
class Encode:
    """Encode one logical tensor anew, from its values or from its codes; `targets[part]` are the
    slots that tile it."""

    tensor: LazyTensor
    encoding: Encoding
    targets: Mapping[str, Sequence[SlotRef]]
    fidelity: str
    """exact, codes, cast, quantize or requantize."""
    keeps: Grid | None = None
    """The codes that are kept bit for bit; None: decoded and encoded anew."""


@dataclass(frozen=True)
class Compare:
    """A replica that must hold the same bytes as the tensor it repeats."""

    key: str
    tensor: StoredTensor
    replica: Chunk
    hint: str = HINT
