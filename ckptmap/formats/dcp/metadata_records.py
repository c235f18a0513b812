"""The contents of a DCP `.metadata` file as records: the chunks of each tensor, and their places.

An `Item` is the byte range of one chunk, or one value, in a data file: a torch.save archive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ckptmap.tensors import Path, TensorInfo

Offsets = tuple[int, ...]


class Item(NamedTuple):
    """A byte range: `nbytes` from `offset` on, in a file of the directory."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()
    """Names of the stream transforms (compression) of the bytes, outermost last: `stream.zstd/1`."""


class TensorEntry(NamedTuple):
    """A tensor: its info, and (offsets, sizes, item) of each chunk."""

    info: TensorInfo
    chunks: tuple[tuple[Offsets, Offsets, Item], ...]


@dataclass(frozen=True)
class Whole(Mapping[str, TensorEntry]):
    """Tensors of one chunk and at least one element, in columns; an entry is made on access."""

    names: Sequence[str]
    infos: Sequence[TensorInfo]
    files: Sequence[str]
    offsets: Sequence[int]
    lengths: Sequence[int]

    @classmethod
    def of(cls, tensors: Mapping[str, TensorEntry]) -> Whole | None:
        """Return the columns; None: a tensor has several chunks, no element, or a stream transform."""
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
        """Return the item of tensor `index`."""
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
    """`tensors` and `values` by flat key; `paths` maps a flat key to its path in the state dict."""

    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, Item] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)

    def path(self, key: str) -> Path:
        """Return the path of a key. A key is never split: names contain dots. Without a path, the key is
        a path of one segment."""
        return self.paths.get(key, (key,))
