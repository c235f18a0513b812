"""What a writer is given, and where it puts it, as columns: output tensors and their slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from ckptmap.core.columns import Columns
from ckptmap.protocols import FlatUnit, OutTensor, Placement, Slot
from ckptmap.tensors import Box, Path, TensorInfo


class Form(NamedTuple):
    """An OutTensor without its path: one for all tensors that are cut alike."""

    info: TensorInfo
    chunks: Sequence[tuple[int, Box]]
    alias_of: Path | None = None
    placement: Placement | None = None
    unit: FlatUnit | None = None


@dataclass(frozen=True, slots=True, eq=False)
class OutTensors(Columns[OutTensor]):
    """Output tensors: tensor i is `forms[i]` at `paths[i]`."""

    paths: Sequence[Path]
    forms: Sequence[Form]

    @staticmethod
    def row(path: Path, form: Form) -> OutTensor:
        return OutTensor(path, *form)

    @classmethod
    def of(cls, tensors: Iterable[OutTensor]) -> Self:
        if isinstance(tensors, cls):
            return tensors
        held = list(tensors)
        return cls([tensor.path for tensor in held], [Form(*tensor[1:]) for tensor in held])


@dataclass(frozen=True, slots=True, eq=False)
class Slots(Columns[Slot]):
    """Slots of one output file: slot i is `boxes[i]` of the tensor at `paths[i]`, `sizes[i]` bytes
    from byte `offsets[i]` on."""

    paths: Sequence[Path]
    boxes: Sequence[Box]
    offsets: Sequence[int]
    sizes: Sequence[int]

    row = Slot
