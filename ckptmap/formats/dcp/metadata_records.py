"""What a DCP directory's `.metadata` says: the chunks of each tensor, and where their bytes lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ckptmap.tensors import Path, TensorInfo

Offsets = tuple[int, ...]


class Item(NamedTuple):
    """Where one entry's bytes lie: `nbytes` from `offset` of a file of the directory."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()
    """Names of what the bytes went through, outermost last: `stream.zstd/1`."""


class TensorEntry(NamedTuple):
    """A tensor: its info, and (offsets, sizes, item) of each chunk."""

    info: TensorInfo
    chunks: tuple[tuple[Offsets, Offsets, Item], ...]


@dataclass(frozen=True)
class Whole(Mapping[str, TensorEntry]):
    """Tensors of one chunk each and at least one element, in columns; an entry is made when it is
    asked for."""

    names: Sequence[str]
    infos: Sequence[TensorInfo]
    files: Sequence[str]
    offsets: Sequence[int]
    lengths: Sequence[int]

    @classmethod
    def of(cls, tensors: Mapping[str, TensorEntry]) -> Whole | None:
        """None: some tensor is in several chunks, empty, or went through something."""
        if isinstance(tensors, Whole):
            return tensors
        items = []
        for info, chunks in tensors.values():
            if len(chunks) != 1:
                return None
            offsets, sizes, item = chunks[0]
            if sizes != info.shape or any(offsets) or 0 in sizes or item.transforms:
                return None
            items.append(item)
        infos = [entry.info for entry in tensors.values()]
        columns = zip(*items, strict=True) if items else ((), (), ())
        files, offsets, lengths, *_ = columns
        return cls(list(tensors), infos, files, offsets, lengths)

    @cached_property
    def _at(self) -> Mapping[str, int]:
        return dict(zip(self.names, range(len(self.names)), strict=True))

    def item(self, index: int) -> Item:
        """Where tensor `index` lies."""
        return Item(self.files[index], self.offsets[index], self.lengths[index])

    def __getitem__(self, name: str) -> TensorEntry:
        index = self._at[name]
        info = self.infos[index]
        return TensorEntry(info, (((0,) * len(info.shape), info.shape, self.item(index)),))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Metadata:
    """`tensors` and `values` by flat key; `paths` says where each flat key sits."""

    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, Item] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)

    def path(self, key: str) -> Path:
        """Never found by splitting the key: names hold dots. Without a path the key is one."""
        return self.paths.get(key, (key,))
