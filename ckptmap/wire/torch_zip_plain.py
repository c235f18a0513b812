"""A flat state dict of many tensors, from a pickle whose entries are alike: no object for each.

    X \\x1a... NAME r.... h\\2((h\\3h\\4 X \\1... KEY r.... h\\6M\\0\\x08t r.... QK\\0M\\0\\x08\\x85 ... R r....

One entry of each form is read by the restricted unpickler, with all that is before and after the
entries. The others differ from theirs in name, storage key and memo numbers, which count on: that
is proven byte by byte, and where it does not hold the whole pickle is read.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any

from ckptmap.errors import SourceError
from ckptmap.geometry.columns import Extents, Located, nbytes_of
from ckptmap.tensors import Extent, Places
from ckptmap.wire.pickle_alike import opcodes
from ckptmap.wire.torch_zip_read import ReadTensor
from ckptmap.wire.zip_read import Records

MANY = 64
"""Entries from which looking for them pays."""
MAX_FORMS = 64
MAX_BEFORE_NBYTES = 1 << 18
"""What is before the entries: a few of them, whose memo numbers are of one byte."""

_GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....)"
_INTS = rb"(?:\)|%s{1,3}[\x85-\x87]|\((?:%s){4,8}t)" % (_INT, _INT)
_START = (
    ("length", rb"X..\0\0"), ("name", rb"[^\n]{0,255}?"), ("number", rb"r...."),
    ("form", rb"%s\(\(%s%sX" % (_GET, _GET, _GET)), ("key length", rb"..\0\0"), ("key", rb"\d+"),
)  # fmt: skip
_TORCH = (
    *_START, ("number", rb"r...."), ("form", rb"%s%st" % (_GET, _INT)), ("number", rb"r...."),
    ("form", rb"Q%s%s" % (_INT, _INTS)), ("number", rb"(?:r....)?"),
    ("form", _INTS), ("number", rb"(?:r....)?"),  # an empty tuple is given none
    ("form", rb"[\x88\x89]%s\)R" % _GET), ("number", rb"r...."),
    ("number", rb"tr...."), ("number", rb"Rr...."), ("more", rb"(?:u\()?"),
)  # fmt: skip
"""Entries as torch pickles them: all that it makes gets a memo number, a thousand are put at once."""
_OURS = (
    *_START,
    ("form", rb"%s%stQ%s%s%s[\x88\x89]%s\)RtR" % (_GET, _INT, _INT, _INTS, _INTS, _GET)),
)
"""As `pickle_write` does."""


class _Writing:
    """How a writer pickles the entry of a tensor, in parts of which each is of a kind."""

    def __init__(self, parts: Sequence[tuple[str, bytes]]) -> None:
        self._kinds = [kind for kind, _ in parts]
        self.entry = re.compile(b"".join(b"(%b)" % part for _, part in parts), re.DOTALL)
        self.name, self.key = self._kinds.index("name"), self._kinds.index("key")
        self.forms, self.numbers = self._of("form"), self._of("number")
        (self.length,), (self.key_length,) = self._of("length"), self._of("key length")

    def _of(self, kind: str) -> list[int]:
        return [group for group, found in enumerate(self._kinds) if found == kind]

    def start(self, data: bytes) -> int | None:
        """Where the first entry is; None: there is none near the start."""
        for match in self.entry.finditer(data, 0, MAX_BEFORE_NBYTES):
            stated = int.from_bytes(match[self.length + 1][1:], "little")
            if stated == len(match[self.name + 1]):
                return match.start()
        return None


_WRITINGS = (_Writing(_TORCH), _Writing(_OURS))
Columns = Sequence[Sequence[bytes]]


@dataclass(frozen=True)
class _Views:
    """Tensors that are whole storages, by the storage's key."""

    records: Records
    keys: Sequence[str]

    def one(self, index: int) -> Places:
        offset, _, crc32 = self.records.locate(f"data/{self.keys[index]}")
        return Extent(self.records.file, offset, crc32)

    def all(self) -> Located:
        offsets, crcs = self.records.locate_all([f"data/{key}" for key in self.keys])
        return Located([self.records.file] * len(offsets), offsets, crcs)


def plain_tensors(
    records: Records, data: bytes, parse: Callable[[bytes, int], Any]
) -> Extents | None:
    """The tensors of a pickle, where they are all that it holds and nearly all entries are alike.
    None: it is another. `parse(pickle, nbytes)` reads a part of the pickle, which has so many."""
    starts = ((writing, writing.start(data)) for writing in _WRITINGS)
    writing, start = next(((w, at) for w, at in starts if at is not None), (_WRITINGS[0], None))
    if start is None:
        return None
    found = writing.entry.findall(data, start)
    text = b"".join(map(b"".join, found))
    if len(found) < MANY or not data.startswith(text, start):
        return None
    columns: Columns = list(zip(*found, strict=True))
    if not (_stated(writing, columns) and _numbered(writing, columns, data[:start])):
        return None
    kinds = list(zip(*[columns[group] for group in writing.forms], strict=True))
    samples = dict(zip(reversed(kinds), range(len(kinds) - 1, -1, -1), strict=True))
    if len(samples) > MAX_FORMS:
        return None
    some = [b"".join(found[i]) for i in sorted(samples.values())]
    try:
        tree = parse(b"".join((data[:start], *some, data[start + len(text) :])), len(data))
        names = list(map(bytes.decode, columns[writing.name]))
    except (SourceError, UnicodeDecodeError):
        return None
    if type(tree) is not dict and not isinstance(tree, OrderedDict):
        return None
    if not all(map(_is_whole, tree.values())) or not all(type(name) is str for name in tree):
        return None
    keys = list(map(bytes.decode, columns[writing.key]))
    return _together(records, tree, names, keys, list(map(samples.__getitem__, kinds)))


def _stated(writing: _Writing, columns: Columns) -> bool:
    """Are names and keys as long as is said before them?"""
    pairs = (writing.length, writing.name), (writing.key_length, writing.key)
    return all(_numbers_are(columns[at], map(len, columns[of])) for at, of in pairs)


def _numbers_are(column: Sequence[bytes], wanted: Iterable[int]) -> bool:
    """Do they end with these, in four bytes each?"""
    given, numbers, width = b"".join(column), pack(f"<{len(column)}I", *wanted), len(column[0])
    return all(given[width - 4 + i :: width] == numbers[i::4] for i in range(4))


def _numbered(writing: _Writing, columns: Columns, before: bytes) -> bool:
    """Do memo numbers count on, above all that were given before?"""
    groups = [columns[group] for group in writing.numbers]
    start, count, step = int.from_bytes(groups[0][0][-4:], "little"), len(groups[0]), len(groups)
    if any(number >= start for number in _given(before)):
        return False
    if all(map(all, groups)):
        return all(
            _numbers_are(group, range(at, at + step * count, step))
            for at, group in enumerate(groups, start)
        )
    given = [number[-4:] for entry in zip(*groups, strict=True) for number in entry if number]
    return b"".join(given) == pack(f"<{len(given)}I", *range(start, start + len(given)))


def _given(data: bytes) -> Iterator[int]:
    """The memo numbers that the opcodes of the start of a pickle give."""
    for at, end in opcodes(data):
        if data[at] in b"qr":
            yield int.from_bytes(data[at + 1 : end], "little")
        elif data[at] in b"p\x94":
            yield 1 << 64  # not as torch writes them


def _together(
    records: Records,
    tree: Mapping[str, ReadTensor],
    names: list[str],
    keys: list[str],
    forms: Sequence[int],
) -> Extents | None:
    """What was read, and what is like the samples in it: entry i is like entry `forms[i]`."""
    samples = [names[i] for i in sorted(set(forms))]
    read = list(tree)
    at = read.index(samples[0]) if samples[0] in tree else 0
    end = at + len(samples)
    if read[at:end] != samples:
        return None
    like = {i: tree[names[i]].info for i in set(forms)}
    before, after = [tree[name] for name in read[:at]], [tree[name] for name in read[end:]]
    names = [*read[:at], *names, *read[end:]]
    keys = [*(t.key for t in before), *keys, *(t.key for t in after)]
    infos = [*(t.info for t in before), *map(like.__getitem__, forms), *(t.info for t in after)]
    if len(set(keys)) != len(keys) or len(set(names)) != len(names):
        return None  # ties, and names that are there twice
    if records.sizes_of([f"data/{key}" for key in keys]) != nbytes_of(infos):
        return None
    return Extents(names, infos, _Views(records, keys))


def _is_whole(value: Any) -> bool:
    """Is it a tensor that is all of its storage, in row-major order?"""
    return type(value) is ReadTensor and value.start == 0 and value.grid.is_contiguous
