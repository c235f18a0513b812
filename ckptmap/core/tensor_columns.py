"""Tensors that lie alike, side by side: columns in place of one object each.

A checkpoint of 100,000 small tensors is 100,000 names, offsets and the few shapes that they share.
What is done to all of them is done to columns; a tensor is made of them when somebody asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ckptmap.core.interning import distinct, each
from ckptmap.tensors import Extent, Path, Places, StoredTensor, TensorInfo


@dataclass(frozen=True)
class Located:
    """Where tensor i lies: all its bytes in row-major order from `offsets[i]` of `files[i]` on;
    `crcs[i]` is the container's own checksum of exactly these, None in place of all: there is
    none."""

    files: Sequence[str]
    offsets: Sequence[int]
    crcs: Sequence[int | None] | None = None

    @classmethod
    def of(cls, places: Sequence[Extent]) -> Located:
        """Of these extents."""
        return cls([p[0] for p in places], [p[1] for p in places], [p[2] for p in places])

    def one(self, index: int) -> Extent:
        crc32 = None if self.crcs is None else self.crcs[index]
        return Extent(self.files[index], self.offsets[index], crc32)


def nbytes_of(infos: Sequence[TensorInfo]) -> list[int]:
    """Bytes of each; found once for those that are one object."""
    return each(infos, lambda info: info.nbytes)


class Locator(Protocol):
    """Finds what lies behind headers of its own: `one` reads that of one tensor, `all` those of
    all; None where not every tensor is an extent. Both raise SourceError."""

    def one(self, index: int) -> Places: ...
    def all(self) -> Located | None: ...


class Extents(Mapping[Path, StoredTensor]):
    """Plain tensors in stored order, by their path of one segment; none shares its bytes with
    another."""

    __slots__ = ("_at", "_located", "_made", "infos", "names")

    def __init__(
        self, keys: Sequence[str], infos: Sequence[TensorInfo], located: Located | Locator
    ) -> None:
        assert len(keys) == len(infos)
        self.names, self.infos = keys, infos
        self._located: Located | Locator = located
        self._at: Mapping[str, int] | None = None
        self._made: dict[str, StoredTensor] = {}

    def located(self) -> Located | None:
        """Where all of them lie; None where some tensor lies otherwise."""
        place = self._located
        if not isinstance(place, Located):
            found = place.all()
            if found is None:
                return None
            self._located = place = found
        return place

    def kinds(self) -> dict[int, TensorInfo]:
        """The infos that there are, mostly few, by id."""
        return distinct(self.infos)

    def renamed(self, names: Mapping[str, str]) -> Extents:
        """The same under `names[key]`."""
        return Extents([names[key] for key in self.names], self.infos, self._located)

    def held(self, key: str) -> StoredTensor:
        """The tensor of this name. Raises KeyError."""
        made = self._made.get(key)
        if made is None:
            if self._at is None:
                self._at = dict(zip(self.names, range(len(self.names)), strict=True))
            index, place = self._at[key], self._located
            where: Places | Callable[[], Places] = partial(place.one, index)
            if isinstance(place, Located):
                where = place.one(index)
            made = self._made[key] = StoredTensor(self.infos[index], where)
        return made

    def __getitem__(self, path: Path) -> StoredTensor:
        if len(path) != 1 or type(path[0]) is not str:
            raise KeyError(path)
        return self.held(path[0])

    def __contains__(self, path: object) -> bool:
        if self._at is None:
            self._at = dict(zip(self.names, range(len(self.names)), strict=True))
        return isinstance(path, tuple) and len(path) == 1 and path[0] in self._at

    def __iter__(self) -> Iterator[Path]:
        return zip(self.names, strict=True)

    def __len__(self) -> int:
        return len(self.names)
