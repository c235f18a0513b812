"""Compare pickles that hold the same opcodes and differ in a few constants.

The rank files of a job hold pickles of the same state dict. Only a few constants differ: a mesh
coordinate, a rank, names of process groups, Python's hash of a mesh. So the pickle of one rank is
parsed, and of the others only these constants are read:

    parsed  K\\x00 segment \\x8a\\x08........ segment      a tree with a `Hole` for each constant
    alike   K\\x07 segment \\x8a\\x07.......  segment      the tree's constants: (7, ...)

A pickle is a program without branches. The same opcodes build the same objects, except for the
constants, unless a function that they call looks at a constant. A `Hole` stands in place of each
constant and can only be stored. Code that computes with it, compares it, or uses it as a size, key
or name raises TypeError, and then the pickles count as not alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from ckptmap.formats.pickle.guard import COUNTED

MAX_HOLES = 1 << 14
"""Greatest number of holes in a pickle. 1,000 tensors need one or two thousand: a hash or two each."""

_INTEGERS = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
"""Opcode of an integer -> bytes of its operand. The operand of J is signed."""
_LONG1, _UNICODE = 0x8A, ord("X")
_CONSTANTS = frozenset((*_INTEGERS, _LONG1, _UNICODE))

_NBYTES = {op: 1 for op in b"(012QRaebd}]lostu)N.\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98"}  # fmt: skip
_NBYTES |= {op: 2 for op in b"Khq\x80"} | {ord("M"): 3, ord("J"): 5, ord("j"): 5, ord("r"): 5}
_NBYTES |= {ord("G"): 9, 0x95: 9}
_LINES = {op: 1 for op in b"FgILPSVp"} | {ord("c"): 2, ord("i"): 2}
"""Opcode -> number of lines in its operand. `_NBYTES` holds the opcodes of a fixed length instead."""


Constant: TypeAlias = int | str


class Hole:
    """The place of a constant that differs between pickles. It can be stored, and nothing else."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def _fail(self, *_: object) -> NoReturn:
        raise TypeError("a constant that differs between pickles decides what they hold")

    __bool__ = __eq__ = __hash__ = __repr__ = __format__ = __getattr__ = _fail


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed pickle, and (start, end) of the constants that differ in other pickles."""

    data: bytes
    holes: tuple[tuple[int, int], ...]
    segments: tuple[bytes, ...]
    """The bytes between the constants: one segment more than constants."""

    @classmethod
    def of(cls, data: bytes, holes: Sequence[tuple[int, int]] = ()) -> Template:
        """Return the template of a pickle with these holes, ascending; by default with none."""
        ends = [0, *(end for _, end in holes)]
        starts = [*(start for start, _ in holes), len(data)]
        segments = tuple([data[a:b] for a, b in zip(ends, starts, strict=True)])
        return cls(data, tuple(holes), segments)

    def constants(self, data: bytes) -> tuple[Constant, ...] | None:
        """Return the constants of a pickle in the holes; None if other bytes differ too."""
        if not data.startswith(self.segments[0]):
            return None
        at = len(self.segments[0])
        constants: list[Constant] = []
        for segment in self.segments[1:]:
            constant = _constant(data, at)
            if constant is None or not data.startswith(segment, constant[1]):
                return None
            constants.append(constant[0])
            at = constant[1] + len(segment)
        return tuple(constants) if at == len(data) else None

    def widened(self, data: bytes) -> Template | None:
        """Return the template with a further hole for each constant that differs in `data`; None if
        opcodes differ, or if there would be more than MAX_HOLES holes."""
        holes = _constant_spans(self.data, data)
        if holes is None or len(holes) + len(self.holes) > MAX_HOLES:
            return None
        return Template.of(self.data, sorted({*self.holes, *holes}))

    def adopted(self, earlier: Template, constants: Sequence[Constant]) -> tuple[Constant, ...]:
        """Return the constants in all holes, for a pickle that matched an `earlier` template with fewer
        holes; `constants` are those in the earlier holes."""
        known = dict(zip(earlier.holes, constants, strict=True))
        own_constants = self.constants(self.data)
        assert own_constants is not None, "a template fits the pickle that it was made of"
        return tuple(
            [known.get(hole, own) for hole, own in zip(self.holes, own_constants, strict=True)]
        )

    def with_persistent_ids(self) -> tuple[bytes, Callable[[object], Hole | None]]:
        """Return a pickle with a persistent id for each constant, and the function that resolves the id
        to a `Hole`. The template's pickle must have been parsed before, so that it is known to have no
        such ids itself."""
        marks = [b"M" + i.to_bytes(2, "little") + b"Q" for i in range(len(self.holes))]
        pieces = [self.segments[0]]
        for mark, segment in zip(marks, self.segments[1:], strict=True):
            pieces += (mark, segment)
        holes = [Hole(index) for index in range(len(self.holes))]
        return b"".join(pieces), lambda pid: holes[pid] if type(pid) is int else None


def _constant(data: bytes, at: int) -> tuple[Constant, int] | None:
    """Return the integer or text that the opcode at `at` pushes, and the offset of the next opcode."""
    op = data[at] if at < len(data) else 0
    width = _INTEGERS.get(op)
    if width is not None:
        start = at + 1
    elif op == _LONG1:
        start, width = at + 2, data[at + 1] if at + 1 < len(data) else 0
    elif op == _UNICODE:
        start, width = at + 5, int.from_bytes(data[at + 1 : at + 5], "little")
    else:
        return None
    end = start + width
    if end > len(data):
        return None
    if op != _UNICODE:
        signed = op not in b"KM"
        return int.from_bytes(data[start:end], "little", signed=signed), end
    try:
        return data[start:end].decode("utf-8", "surrogatepass"), end
    except UnicodeDecodeError:  # the unpickler reports it
        return None


def _constant_spans(first: bytes, second: bytes) -> list[tuple[int, int]] | None:
    """Return (start, end) of the constants of `first` that differ in `second`; None if the pickles differ
    in other bytes."""
    spans: list[tuple[int, int]] = []
    second_opcodes = opcodes(second)
    end = to = 0
    for start, end in opcodes(first):
        at, to = next(second_opcodes, (0, 0))
        if first[start:end] != second[at:to]:
            constants = first[start] in _CONSTANTS and at < to and second[at] in _CONSTANTS
            if not constants or _constant(second, at) is None:
                return None
            spans.append((start, end))
    return spans if end == len(first) and to == len(second) else None


def opcodes(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the opcodes of a pickle, up to an unknown or truncated one."""
    at, limit = 0, len(data)
    while at < limit:
        op = data[at]
        nbytes = _NBYTES.get(op)
        if nbytes is not None:
            end = at + nbytes
        elif op in COUNTED:
            after = at + 1 + COUNTED[op]
            end = after + int.from_bytes(data[at + 1 : after], "little")
        else:
            end = at + 1
            for _ in range(_LINES.get(op, 0)):
                end = data.find(b"\n", end) + 1 or limit + 1
            if end == at + 1:
                return
        if end > limit:
            return
        yield at, end
        at = end
