"""Read the pickle of a flat state dict {name: tensor} without an object for each of 100,000 tensors.

This is a fast path for the pickle of a torch.save file; `reader.parse` reads every pickle. The entry of each tensor is a run of opcodes, here with the name, the storage key and the memo
numbers (the operands of r):

    X \\x1a... NAME r.... h\\2((h\\3h\\4 X \\1... KEY r.... h\\6M\\0\\x08t r.... QK\\0M\\0\\x08\\x85 ... R r....

Entries have the same form if they differ only in name, storage key and memo numbers. The restricted
unpickler reads one entry of each form, and the opcodes before and after the entries. The names and
keys of the others are columns. This module checks each byte of the entries, and that memo numbers
count on. If a check fails, the caller reads the whole pickle with the unpickler.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TypeVar

from ckptmap.core.tensor_columns import Extents, PlainTensors, nbytes_of
from ckptmap.errors import SourceError
from ckptmap.formats.pickle.byte_columns import PieceGroup, group_pieces
from ckptmap.formats.pickle.byte_columns import Places as At
from ckptmap.formats.pickle.template import opcodes
from ckptmap.formats.torch_save.reader import ReadTensor
from ckptmap.formats.zip.reader import Records
from ckptmap.tensors import Extent, Places

T = TypeVar("T")

MANY = 64
"""Number of entries from which on columns are faster than the unpickler."""
MIN_NBYTES = 40 * MANY
"""Bytes that a pickle of MANY entries has at least."""
MAX_FORMS = 64
"""Number of forms of entries above which the unpickler reads the pickle."""
BATCH_NBYTES = 1 << 18
"""Bytes of entries that are matched at once: their columns stay in the CPU cache."""
MAX_BEFORE_NBYTES = 1 << 18
"""Bytes within which the first matching entry must begin. The entries before it do not match, because
their memo numbers take one byte."""

_GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....)"
_INTS = rb"(?:\)|%s{1,3}[\x85-\x87]|\((?:%s){4,8}t)" % (_INT, _INT)
_START = rb"(X..\0\0)([^\n]{0,255}?)(r....%s\(\(%s%sX..\0\0)(\d+)" % (_GET, _GET, _GET)
"""An entry up to the key: the name with its length and memo number, and the key with its length."""
_TORCH = (
    (rb"r....%s%st" % (_GET, _INT)) + (rb"r....Q%s%s(?:r....)?" % (_INT, _INTS))
    + (rb"%s(?:r....)?[\x88\x89]" % _INTS)  # an empty tuple is given no number
    + (rb"%s\)Rr....tr....Rr...." % _GET)
)  # fmt: skip
"""The rest of an entry as torch writes it: every object gets a memo number."""
_OURS = rb"%s%stQ%s%s%s[\x88\x89]%s\)RtR" % (_GET, _INT, _INT, _INTS, _INTS, _GET)
"""The rest of an entry as `pickle.writer` writes it."""


class _Writing:
    """The opcodes by which one writer pickles the entry of a tensor."""

    def __init__(self, tail: bytes) -> None:
        self.entry = re.compile(rb"((?:u\()?%s(%s))" % (_START, tail), re.DOTALL)
        numbered = tail.replace(rb"(?:r....)?", rb"r....").replace(rb"r....", rb"(?:r(....))?")
        self._tail = re.compile(numbered, re.DOTALL)

    def start(self, data: bytes) -> int | None:
        """Return the offset of the first entry; None if there is none near the start."""
        for match in self.entry.finditer(data, 0, MAX_BEFORE_NBYTES):
            if int.from_bytes(match[2][1:], "little") == len(match[3]):
                return match.start()
        return None

    def numbers(self, tail: bytes) -> At:
        """Return the offsets of the memo numbers in the opcodes after the key."""
        match = self._tail.fullmatch(tail)
        assert match is not None, "it is what the same opcodes matched before"
        return tuple([start for start, _ in match.regs[1:] if start >= 0])


@cache
def _writings() -> tuple[_Writing, ...]:
    return _Writing(_TORCH), _Writing(_OURS)


@dataclass(frozen=True)
class _Entries:
    """The fields of entries in columns, each as pickled bytes."""

    whole: Sequence[bytes]
    length: Sequence[bytes]
    name: Sequence[bytes]
    middle: Sequence[bytes]
    key: Sequence[bytes]
    tail: Sequence[bytes]


@dataclass(frozen=True)
class _Views:
    """The places of tensors that fill whole storages, by the key of the storage."""

    records: Records
    keys: Sequence[str]

    def locate(self, index: int) -> Places:
        """Return the byte range of tensor `index` in the file."""
        offset, _, crc32 = self.records.locate(f"data/{self.keys[index]}")
        return Extent(self.records.file, offset, crc32)

    def locate_all(self) -> Extents:
        """Return the byte ranges of all tensors in the file."""
        offsets, crcs = self.records.locate_all([f"data/{key}" for key in self.keys])
        return Extents([self.records.file] * len(offsets), offsets, crcs)


def plain_tensors(
    records: Records, data: bytes, parse: Callable[[bytes, int], object]
) -> PlainTensors | None:
    """Return the tensors of a pickle of one flat dict of tensors; None for any other pickle.

    Each tensor must fill a storage of its own, in row-major order. `parse(part, nbytes)` runs the
    restricted unpickler on a part of the pickle, of which the whole has `nbytes` bytes.
    """
    if len(data) < MIN_NBYTES:
        return None
    for writing in _writings():
        start = writing.start(data)
        if start is not None:
            break
    else:
        return None
    run = _Run(writing, data[:start])
    end = start
    while end < len(data):
        matches = writing.entry.findall(data, end, end + BATCH_NBYTES)
        if not matches:
            break
        entries = _Entries(*zip(*matches, strict=True))
        text = b"".join(entries.whole)
        if not data.startswith(text, end) or not run.take(entries):
            return None
        end += len(text)
    if len(run.names) < MANY:
        return None
    try:
        tree = parse(b"".join((data[:start], *run.samples.values(), data[end:])), len(data))
    except SourceError:
        return None
    if type(tree) is not dict and not isinstance(tree, OrderedDict):
        return None
    if not all(map(_is_whole, tree.values())) or not all(type(name) is str for name in tree):
        return None
    return _together(records, tree, run)


class _Run:
    """The columns of consecutive entries; `before` is the start of the pickle."""

    def __init__(self, writing: _Writing, before: bytes) -> None:
        self._writing = writing
        self._given = max(_given(before), default=-1)
        self._next: int | None = None
        self._forms: dict[tuple[bytes, bytes], int] = {}
        self.names: list[str] = []
        self.keys: list[str] = []
        self.first_of_form: list[int] = []
        """For each entry, the index of the first entry of its form."""
        self.samples: dict[int, bytes] = {}
        """Index -> pickled bytes of the first entry of each form."""

    def take(self, entries: _Entries) -> bool:
        """Add entries. Return False if a name or key has another length than stated, if memo numbers do
        not count on, or if there are too many forms."""
        heads = group_pieces(entries.length, lambda _: (1,), MAX_FORMS)
        middles = group_pieces(entries.middle, lambda piece: (1, len(piece) - 4), MAX_FORMS)
        tails = group_pieces(entries.tail, self._writing.numbers, MAX_FORMS)
        if not (heads and middles and tails):
            return False
        names, keys = list(map(len, entries.name)), list(map(len, entries.key))
        first = self._counted(tails, int.from_bytes(entries.middle[0][1:5], "little"))
        holds = (
            all(part.hold_numbers(0, part.of(names)) for part in heads)
            and all(
                part.hold_numbers(0, part.of(first)) and part.hold_numbers(1, part.of(keys))
                for part in middles
            )
            and all(
                part.hold_numbers(at, _shifted(part.of(first), 1 + at))
                for part in tails
                for at in range(len(part.numbers))
            )
        )
        return holds and self._add(entries, list(zip(_forms(middles), _forms(tails), strict=True)))

    def _counted(self, tails: Sequence[PieceGroup], start: int) -> Sequence[int]:
        """Return the memo number that the name of each entry must have; `start` is the first one's."""
        if self._next is None:
            self._next = max(start, self._given + 1)
        start = self._next
        if len(tails) == 1:
            step, count = 1 + len(tails[0].numbers), len(tails[0].indices)
            self._next += step * count
            return range(start, self._next, step)
        steps = _in_order((t.indices, [1 + len(t.numbers)] * len(t.indices)) for t in tails)
        *first, self._next = accumulate(steps, initial=start)
        return first

    def _add(self, entries: _Entries, forms: list[tuple[bytes, bytes]]) -> bool:
        for form in dict.fromkeys(forms):
            if form not in self._forms:
                index = forms.index(form)
                self._forms[form] = at = len(self.names) + index
                self.samples[at] = entries.whole[index]
        try:  # one decode for all: the pattern allows no line feed in a name
            self.names += b"\n".join(entries.name).decode().split("\n")
        except UnicodeDecodeError:
            return False
        self.keys += b"\n".join(entries.key).decode().split("\n")
        self.first_of_form += map(self._forms.__getitem__, forms)
        return len(self._forms) <= MAX_FORMS


def _forms(parts: Sequence[PieceGroup]) -> list[bytes]:
    return _in_order((part.indices, part.forms) for part in parts)


def _shifted(numbers: Sequence[int], by: int) -> Sequence[int]:
    if isinstance(numbers, range):
        return range(numbers.start + by, numbers.stop + by, numbers.step)
    return [number + by for number in numbers]


def _in_order(parts: Iterable[tuple[Sequence[int], Sequence[T]]]) -> list[T]:
    """Return the values in the order of their indices."""
    parts = list(parts)
    if len(parts) == 1:
        return list(parts[0][1])
    by_index = {
        i: value for indices, values in parts for i, value in zip(indices, values, strict=True)
    }
    return [by_index[i] for i in range(len(by_index))]


def _given(data: bytes) -> Iterator[int]:
    """Yield the memo numbers that the opcodes at the start of a pickle assign."""
    for at, end in opcodes(data):
        if data[at] in b"qr":
            yield int.from_bytes(data[at + 1 : end], "little")
        elif data[at] in b"p\x94":
            yield 1 << 64  # torch does not write these: no memo number of an entry fits then


def _together(records: Records, tree: Mapping[str, ReadTensor], run: _Run) -> PlainTensors | None:
    """Return the tensors of the unpickled entries and of all entries in columns, in file order; None
    if names or storages repeat, or if a tensor does not fill its storage."""
    samples = [run.names[i] for i in run.samples]
    read = list(tree)
    at = read.index(samples[0]) if samples[0] in tree else 0
    end = at + len(samples)
    if read[at:end] != samples:
        return None
    info_of_first = {i: tree[run.names[i]].info for i in run.samples}
    before, after = [tree[name] for name in read[:at]], [tree[name] for name in read[end:]]
    names = [*read[:at], *run.names, *read[end:]]
    keys = [*(t.key for t in before), *run.keys, *(t.key for t in after)]
    infos = [t.info for t in before]
    infos += map(info_of_first.__getitem__, run.first_of_form)
    infos += [t.info for t in after]
    if len(set(keys)) != len(keys) or len(set(names)) != len(names):
        return None  # tied tensors, or a name that occurs twice
    if records.sizes_of([f"data/{key}" for key in keys]) != nbytes_of(infos):
        return None
    return PlainTensors(names, infos, _Views(records, keys))


def _is_whole(value: object) -> bool:
    """Return True for a tensor that is all of its storage, in row-major order."""
    return type(value) is ReadTensor and value.start == 0 and value.grid.is_contiguous
