"""What writers are asked for, and where they put it, as columns: tensors and slots by the 100,000
share their forms and boxes, and one of them is made when somebody asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

from ckptmap.protocols import FlatUnit, OutTensor, Placement, Slot
from ckptmap.tensors import Box, Path, TensorInfo


class Form(NamedTuple):
    """An OutTensor but for its path: one for all that are cut alike."""

    info: TensorInfo
    chunks: Sequence[tuple[int, Box]]
    alias_of: Path | None = None
    placement: Placement | None = None
    unit: FlatUnit | None = None


class OutTensors(Sequence[OutTensor]):
    """Tensor i is `forms[i]` at `paths[i]`."""

    __slots__ = ("forms", "paths")

    def __init__(self, paths: list[Path], forms: list[Form]) -> None:
        assert len(paths) == len(forms)
        self.paths, self.forms = paths, forms

    @classmethod
    def of(cls, tensors: Iterable[OutTensor]) -> OutTensors:
        """These; themselves where they are columns already."""
        if isinstance(tensors, OutTensors):
            return tensors
        held = list(tensors)
        return cls([tensor[0] for tensor in held], [Form(*tensor[1:]) for tensor in held])

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[OutTensor]:
        for path, form in zip(self.paths, self.forms, strict=True):
            yield OutTensor(path, *form)

    @overload
    def __getitem__(self, index: int) -> OutTensor: ...
    @overload
    def __getitem__(self, index: slice) -> OutTensors: ...
    def __getitem__(self, index: int | slice) -> OutTensor | OutTensors:
        if isinstance(index, slice):
            return OutTensors(self.paths[index], self.forms[index])
        return OutTensor(self.paths[index], *self.forms[index])


class Slots(Sequence[Slot]):
    """Slot i is `boxes[i]` of the tensor at `paths[i]`: `sizes[i]` bytes from `offsets[i]` on."""

    __slots__ = ("boxes", "offsets", "paths", "sizes")

    def __init__(
        self, paths: Sequence[Path], boxes: Sequence[Box], offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> None:  # fmt: skip
        assert len(paths) == len(boxes) == len(offsets) == len(sizes)
        self.paths, self.boxes, self.offsets, self.sizes = paths, boxes, offsets, sizes

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> Slots:
        """These; themselves where they are columns already."""
        if isinstance(slots, Slots):
            return slots
        held = list(slots)
        columns = [[slot[i] for slot in held] for i in range(4)]
        return cls(*columns)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Slot]:
        return map(Slot, self.paths, self.boxes, self.offsets, self.sizes)

    @overload
    def __getitem__(self, index: int) -> Slot: ...
    @overload
    def __getitem__(self, index: slice) -> Slots: ...
    def __getitem__(self, index: int | slice) -> Slot | Slots:
        if isinstance(index, slice):
            i = index
            return Slots(self.paths[i], self.boxes[i], self.offsets[i], self.sizes[i])
        return Slot(self.paths[index], self.boxes[index], self.offsets[index], self.sizes[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((len(self), *self[:1]))
