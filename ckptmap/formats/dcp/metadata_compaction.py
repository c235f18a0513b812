"""Shorten the pickle of a DCP directory's `.metadata` before it is unpickled.

The unpickler makes several objects for each of 100,000 tensors. Most of them are equal to those of
another tensor, or can be columns of numbers:

    state_dict_metadata   NAME body NAME body ...   a body that is equal to an earlier one becomes a
                       -> NAME body NAME get  ...   reference to the object of that one
    storage_data          key{fqn} place{offset, length} ...   one entry of each form stays, and the
                       -> three tuples: fqns, offsets, lengths     others become columns

Two entries have the same form if they differ only in fqn, offset and length. The restricted
unpickler still reads all of the shorter pickle, and resolves every reference and number. Memo
numbers are implicit in these pickles (protocol 4 and later). So an entry that is taken out leaves
as many memo slots, filled with a value that no reader accepts as a name, a size or a class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckptmap.formats.dcp.metadata_classes import MARKS
from ckptmap.formats.pickle.template import opcodes

BATCH_NBYTES = 1 << 18
"""Bytes of entries that are matched at once: their columns stay in the CPU cache."""
LOOK_NBYTES = 1 << 20
"""Bytes within which the next entry must begin."""

_TEXT = 0x8C
_GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"
_NAME = rb"\x8c.[^\x94]{0,255}"
_SIZE = rb"%s(?:\)|(?:%s{1,3}[\x85-\x87]|\(%s{4,}t)\x94)\x85\x94R\x94" % (_GET, _INT, _INT)
_NEW = rb"%s\)\x81\x94" % _GET
_STATE = rb"%s}\x94\(" % _NEW
_PROPERTIES = rb"%s\(%s%s[\x88\x89]%s[\x88\x89]t\x94b" % (_NEW, _GET, _GET, _GET)
_CHUNK = rb"%s%s%s%s%sub" % (_STATE, _GET, _SIZE, _GET, _SIZE)
_CHUNKS = rb"%s\]\x94(?:%sa|\((?:%s)+e)" % (_GET, _CHUNK, _CHUNK)
_TENSOR = rb"%s%s%s%s%s%sub" % (_STATE, _GET, _PROPERTIES, _GET, _SIZE, _CHUNKS)

_TENSOR_ENTRY = re.compile(rb"((?:u\()?(%s)\x94(%s))" % (_NAME, _TENSOR), re.DOTALL)
"""Groups: the whole entry, its name, its body."""
_PLACE_ENTRY = re.compile(
    rb"((?:u\()?(%s%s)(%s\x94|%s)(%s%s%s%sub%s%s%s%s)(%s)(%s)(%s)((?:%sN)?ub))"
    % (_STATE, _GET, _NAME, _GET, _GET, _INT, _GET, _SIZE, _STATE, _GET, _GET, _GET, _INT, _GET, _INT, _GET),
    re.DOTALL,
)  # fmt: skip
"""Groups: the whole entry, its key up to the fqn, the fqn, the opcodes up to the offset, the offset,
the opcodes up to the length, the length, the rest."""


@dataclass(frozen=True)
class Shortened:
    """The shorter pickle. It holds a tuple of five:

    metadata                 with all storage_data entries that were not taken out
    key, place, key, ...     one pair per form, with `MARKS` as fqn, offset and length
    fqns, offsets, lengths   of the entries that were taken out; entry i has the form `forms[i]`
    """

    pickle: bytes
    forms: list[int]


def shortened(data: bytes) -> Shortened | None:
    """Return the shorter pickle; None if torch did not write `data`, or no storage entry matches."""
    text = _unframed(data)
    if text is None:
        return None
    out = [data[:2], b"("]
    at = _share(text, out)
    if at is None:
        return None
    places = _Places()
    at = places.take(text, at, out)
    if at is None or not places.forms or text[-1:] != b".":
        return None
    out += (text[at:-1], b"(", *places.samples, b"t")
    for column in (places.fqns, places.offsets, places.lengths):
        out += (b"(", *column, b"t")
    return Shortened(b"".join((*out, b"t.")), places.forms)


def _unframed(data: bytes) -> bytes | None:
    """Return the opcodes without PROTO and FRAME; None if there are opcodes outside of frames, or if
    the protocol is not 4 or 5."""
    parts, at = [], 2
    while at < len(data):
        start = at + 9
        at = start + int.from_bytes(data[at + 1 : start], "little")
        if data[start - 9] != 0x95 or at > len(data):
            return None
        parts.append(data[start:at])
    return b"".join(parts) if data[:2] in (b"\x80\x04", b"\x80\x05") else None


def _runs(
    pattern: re.Pattern[bytes], text: bytes, at: int
) -> Iterator[tuple[int, int, list[tuple[bytes, ...]]]]:
    """Yield (start, end, entries) for each run of consecutive entries."""
    while first := pattern.search(text, at, at + LOOK_NBYTES):
        start = at = first.start()
        entries = pattern.findall(text, start, max(first.end(), start + BATCH_NBYTES))
        run = b"".join([entry[0] for entry in entries])
        if text.startswith(run, at):
            at += len(run)
        else:
            for count, entry in enumerate(entries):
                if not text.startswith(entry[0], at):
                    del entries[count:]
                    break
                at += len(entry[0])
        yield start, at, entries


def _share(text: bytes, out: list[bytes]) -> int | None:
    """Append the tensors to `out`, a repeated body as a reference. Return the offset after them in
    `text`; None if a name has another length than its opcode states."""
    at = memo = 0
    known: dict[bytes, tuple[bytes, int]] = {}
    for start, end, entries in _runs(_TENSOR_ENTRY, text, at):
        memo += _memos(text[at:start])
        out.append(text[at:start])
        at = end
        for whole, name, body in entries:
            if name[1] != len(name) - 2:
                return None
            shared = known.get(body)
            if shared is not None:
                out += (name, shared[0])
                memo += shared[1]
                continue
            count = 1 + _memos(body)
            get = b"j" + (memo + 1).to_bytes(4, "little")
            known[body] = b"\x94" + get + b"\x94" * (count - 1), count
            out.append(whole)
            memo += count
    return at


def _memos(piece: bytes) -> int:
    """Return the number of opcodes that fill a memo slot."""
    return sum(1 for at, _ in opcodes(piece) if piece[at] == 0x94)


class _Places:
    """The entries that were taken out of storage_data, as columns of opcodes."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[bytes, ...], int] = {}
        self._memos: list[int] = []
        self.forms: list[int] = []
        self.samples: list[bytes] = []
        self.fqns: list[bytes] = []
        self.offsets: list[bytes] = []
        self.lengths: list[bytes] = []

    def take(self, text: bytes, at: int, out: list[bytes]) -> int | None:
        """Take out the entries, and append the bytes between them to `out`. Return as `_share` does."""
        for start, end, entries in _runs(
            _PLACE_ENTRY, text, max(at, text.find(b"storage_data", at))
        ):
            out.append(text[at:start])
            _, heads, fqns, middles, offsets, links, lengths, tails = zip(*entries, strict=True)
            forms = list(zip(heads, middles, links, tails, strict=True))
            for form in set(forms).difference(self._numbers):
                self._add(form)
            numbers = list(map(self._numbers.__getitem__, forms))
            self.forms += numbers
            self.fqns += fqns
            self.offsets += offsets
            self.lengths += lengths
            texts = [fqn for fqn in fqns if fqn[0] == _TEXT]
            if any(fqn[1] != len(fqn) - 3 for fqn in texts):
                return None
            memos = len(texts) + sum(map(self._memos.__getitem__, numbers))
            out.append(b"N" + b"\x94" * memos + b"0")
            at = end
        return at

    def _add(self, form: tuple[bytes, ...]) -> None:
        head, middle, link, tail = form
        self._numbers[form] = len(self._memos)
        self._memos.append(sum(map(_memos, form)))
        fqn, offset, length = [b"K%c" % mark for mark in MARKS]
        self.samples.append(b"".join((head, fqn, middle, offset, link, length, tail)))
