"""Define the records that the `.metadata` file of a DCP directory is read into and written from.

They hold the shape, dtype and chunks of each tensor, and for each chunk or plain value an `Item`: a
byte range of a data file (`__R_I.distcp`), which holds one torch.save archive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptmap.core.columns import Columns, NamedRows
from ckptmap.tensors import Path, TensorInfo

Offsets = tuple[int, ...]


class Item(NamedTuple):
    """A byte range: `nbytes` from `offset` on, in a file of the directory."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()
    """Names of the stream transforms (compression) of the bytes, outermost last, as `stream.zstd/1`."""


class TensorEntry(NamedTuple):
    """A tensor: its info, and of each chunk its offsets and sizes (elements), and its item."""

    info: TensorInfo
    chunks: tuple[tuple[Offsets, Offsets, Item], ...]


@dataclass(frozen=True, slots=True, eq=False)
class WholeEntries(Columns[TensorEntry]):
    """Tensors of one chunk and at least one element each, as columns.

    `offsets` and `lengths` are the byte ranges of their items.
    """

    infos: Sequence[TensorInfo]
    files: Sequence[str]
    offsets: Sequence[int]
    lengths: Sequence[int]

    @staticmethod
    def row(info: TensorInfo, file: str, offset: int, length: int) -> TensorEntry:
        box = (0,) * len(info.shape), info.shape
        return TensorEntry(info, ((*box, Item(file, offset, length)),))


class Whole(NamedRows[str, TensorEntry]):
    """Tensors by key, each of one chunk and at least one element."""

    rows: WholeEntries

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
        files = [item.file for item in items]
        starts, lengths = [item.offset for item in items], [item.nbytes for item in items]
        return cls(list(tensors), WholeEntries(infos, files, starts, lengths))


@dataclass(frozen=True)
class ItemRows:
    """The entries of storage_data in columns.

    Entry i has `fqns[i]`, `offsets[i]` and `lengths[i]` (bytes). All else it has from the pair
    (offsets of the chunk, item) number `form_of[i]` of `forms`.
    """

    forms: Sequence[tuple[Offsets | None, Item]]
    form_of: Sequence[int]
    fqns: Sequence[str]
    offsets: Sequence[int]
    lengths: Sequence[int]

    def items(self) -> dict[tuple[str, Offsets | None], Item]:
        """Return a dict from (FQN, offsets of the chunk, or None for a value) to the item."""
        items = {}
        for fqn, at, offset, nbytes in zip(
            self.fqns, self.form_of, self.offsets, self.lengths, strict=True
        ):
            offsets, (file, _, _, transforms) = self.forms[at]
            items[fqn, offsets] = Item(file, offset, nbytes, transforms)
        return items

    def whole(self, infos: Mapping[str, TensorInfo]) -> Whole | None:
        """Return the tensors `infos` in columns; None unless each has one entry, of one whole chunk."""
        at = dict(zip(self.fqns, range(len(self.fqns)), strict=True))
        if at.keys() != infos.keys() or len(at) != len(self.fqns):
            return None
        order = list(map(at.__getitem__, infos))
        form_numbers = [self.form_of[i] for i in order]
        for shape, form in {
            (info.shape, at) for info, at in zip(infos.values(), form_numbers, strict=True)
        }:
            offsets, item = self.forms[form]
            if offsets != (0,) * len(shape) or item.transforms:
                return None
        files = [item.file for _, item in self.forms]
        entries = WholeEntries(
            list(infos.values()), [files[i] for i in form_numbers],
            [self.offsets[i] for i in order], [self.lengths[i] for i in order],
        )  # fmt: skip
        return Whole(list(infos), entries)


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
