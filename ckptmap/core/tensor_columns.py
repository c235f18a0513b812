"""The plain tensors of a checkpoint as columns: names, shapes and dtypes, and places in files.

Most checkpoints hold nothing else: each tensor is one extent, with all its bytes in row-major order
in one file. A StoredTensor is created from the columns only when it is looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from ckptmap.core.columns import Columns, NamedRows, each
from ckptmap.tensors import Extent, Path, Places, StoredTensor, TensorInfo


@dataclass(frozen=True, slots=True, eq=False)
class Extents(Columns[Extent]):
    """The places of tensors: tensor i begins at byte `offsets[i]` of `files[i]`.

    `crcs[i]` is the checksum that the file format states for exactly its bytes, or None.
    """

    files: Sequence[str]
    offsets: Sequence[int]
    crcs: Sequence[int | None]

    row = Extent

    def locate(self, index: int) -> Places:
        return Extent(self.files[index], self.offsets[index], self.crcs[index])

    def locate_all(self) -> Self:
        return self


class Locator(Protocol):
    """Finds the places of tensors in a format where each tensor has a header that must be read.

    `locate` reads the header of one tensor, `locate_all` those of all tensors. `locate_all` returns None if some
    tensor is not one extent. Both raise SourceError.
    """

    def locate(self, index: int) -> Places: ...
    def locate_all(self) -> Extents | None: ...


def extents_of(tensors: Iterable[StoredTensor]) -> Extents | None:
    """Return the places of these tensors; None: one of them is not a single extent without replicas."""
    places = []
    for tensor in tensors:
        place = tensor.place if type(tensor) is StoredTensor and not tensor.replicas else None
        if type(place) is not Extent:
            return None
        places.append(place)
    return Extents.of(places)


def nbytes_of(infos: Sequence[TensorInfo]) -> list[int]:
    """Return the size of each tensor in bytes; computed once for infos that are one object."""
    return each(infos, lambda info: info.nbytes)


class _Tensors:
    """Plain tensors by number: tensor i is created on first access, and is then the same object."""

    __slots__ = ("created", "infos", "located")

    def __init__(self, infos: Sequence[TensorInfo], located: Extents | Locator) -> None:
        self.infos, self.located = infos, located
        self.created: dict[int, StoredTensor] = {}

    def __getitem__(self, index: int) -> StoredTensor:
        tensor = self.created.get(index)
        if tensor is None:
            located = self.located
            is_known = isinstance(located, Extents)
            place = located.locate(index) if is_known else partial(located.locate, index)
            tensor = StoredTensor(self.infos[index], place)
            self.created[index] = tensor
        return tensor

    def __len__(self) -> int:
        return len(self.infos)


class PlainTensors(Mapping[Path, StoredTensor]):
    """Plain tensors in stored order, by paths of one segment; no two share bytes.

    Tensor i has the name `names[i]` and the shape and dtype `infos[i]`.
    """

    __slots__ = ("_rows", "by_name", "infos", "names")

    def __init__(
        self, names: Sequence[str], infos: Sequence[TensorInfo], located: Extents | Locator
    ) -> None:
        self.names, self.infos = names, infos
        self._rows = _Tensors(infos, located)
        self.by_name = NamedRows(names, self._rows)
        """Each tensor by its name."""

    def extents(self) -> Extents | None:
        """Return the places of all tensors; None if some tensor is not one extent."""
        extents = self._rows.located.locate_all()
        if extents is not None:
            self._rows.located = extents
        return extents

    @property
    def known_extents(self) -> Extents | None:
        """The places of all tensors, where the index has told them; None: headers would have to be read."""
        located = self._rows.located
        return located if isinstance(located, Extents) else None

    def renamed(self, names: Mapping[str, str]) -> PlainTensors:
        """Return the same tensors with new names: `names` maps each old name to its new one."""
        renamed = [names[name] for name in self.names]
        return PlainTensors(renamed, self.infos, self._rows.located)

    def __getitem__(self, path: Path) -> StoredTensor:
        if len(path) != 1 or type(path[0]) is not str:
            raise KeyError(path)
        return self.by_name[path[0]]

    def __contains__(self, path: object) -> bool:
        return isinstance(path, tuple) and len(path) == 1 and path[0] in self.by_name

    def __iter__(self) -> Iterator[Path]:
        return zip(self.names, strict=True)

    def __len__(self) -> int:
        return len(self.names)
