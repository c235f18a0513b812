"""Output tensors, and the slots of output files that hold their chunks, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from ckptmap.core.columns import Columns
from ckptmap.protocols import FlatUnit, OutTensor, Placement, Slot
from ckptmap.tensors import Box, Path, TensorInfo


class Form(NamedTuple):
    """An OutTensor without its path; tensors with the same shape and cut share one."""

    info: TensorInfo
    chunks: Sequence[tuple[int, Box]]
    alias_of: Path | None = None
    placement: Placement | None = None
    unit: FlatUnit | None = None


@dataclass(frozen=True, slots=True, eq=False)
class OutTensors(Columns[OutTensor]):
    """Output tensors as columns: tensor i has the path `paths[i]` and the form `forms[i]`."""

    paths: Sequence[Path]
    forms: Sequence[Form]

    @staticmethod
    def row(path: Path, form: Form) -> OutTensor:
        return OutTensor(path, *form)

    @classmethod
    def of(cls, tensors: Iterable[OutTensor]) -> Self:
        if isinstance(tensors, cls):
            return tensors
        rows = list(tensors)
        return cls([tensor.path for tensor in rows], [Form(*tensor[1:]) for tensor in rows])

    def infos(self) -> list[TensorInfo]:
        """Return shape and dtype of each."""
        return [form.info for form in self.forms]


@dataclass(frozen=True, slots=True, eq=False)
class Slots(Columns[Slot]):
    """The slots of one output file as columns.

    Slot i holds the box `boxes[i]` of the tensor at `paths[i]`, in `sizes[i]` bytes from byte
    `offsets[i]` of the file on.
    """

    paths: Sequence[Path]
    boxes: Sequence[Box]
    offsets: Sequence[int]
    sizes: Sequence[int]

    row = Slot
