"""Refuse pickles with opcodes that harm the C unpickler, before it runs.

The opcodes LONG_BINPUT and PUT state the index of the memo slot that they fill, and the C unpickler
zeroes an array of twice that index. So ten bytes of a pickle, or one flipped bit, cost up to 64 GiB.
The EXT opcodes return objects that copyreg cached in this process, past `find_class`. LONG4 makes an
integer that takes Python minutes to print, and `torch.load(weights_only=True)` does not know it. To find them,
this module walks over the opcodes (Python's pickletools describes them), most of them with one
regular expression.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pickle import UnpicklingError

COUNTED = {
    **dict.fromkeys(b"UC\x8c\x8a", 1),  # strings, bytes and long integers: op, length, data
    **dict.fromkeys(b"TXB", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
"""Opcode -> bytes of the length that comes before its data."""

_PLAIN = (
    rb"[(012QRaebd}\]lostu)N\x81\x85-\x89\x8f-\x94\x97\x98]++"  # no argument
    rb"|[Khq\x80].|M..|[Jj].{4}|[G\x95].{8}"
    rb"|[FgILPSV][^\n]*+\n|[ci][^\n]*+\n[^\n]*+\n"
)

_PUT, _LONG_BINPUT = b"pr"
_EXTENSIONS = b"\x82\x83\x84"
_LONG4 = 0x8B


_UNICODE = b"X\x8c"
_SHORT = 256
"""Bytes of a string below which the regular expression may match it by its length."""
_MANY = 512
"""Number of strings after which compiling a new regular expression, with their lengths, pays."""


@lru_cache(maxsize=64)
def _run(width: int, top: int, lengths: frozenset[int] = frozenset()) -> re.Pattern[bytes]:
    """Return a pattern for a run of opcodes that are harmless.

    Among them are strings of these lengths, and LONG_BINPUT with an index in bounds: byte `width` of
    the index is at most `top`, and the bytes above it are 0.
    """
    put = rb"r.{%d}[\0-\x%02x]\0{%d}" % (width, top, 3 - width)
    texts = [rb"|(?:X\x%02x\0\0\0|\x8c\x%02x).{%d}" % (n, n, n) for n in sorted(lengths)]
    return re.compile(b"(?:%s|%s%s)*+" % (_PLAIN, put, b"".join(texts)), re.DOTALL)


def check_opcodes(data: bytes, of_nbytes: int) -> None:
    """Raise UnpicklingError for EXT opcodes and LONG4, and for a memo index above the size of the pickle.

    That size is `len(data)`, or `of_nbytes` if `data` is a part of a pickle of so many bytes. Any
    other fault of the pickle is left to the unpickler.
    """
    limit, room = len(data), max(len(data), of_nbytes)
    width = max(0, (room.bit_length() - 1) // 8)
    bound = (width, room >> (8 * width)) if width < 4 else (3, 255)
    run = _run(*bound)
    at = met = 0
    lengths: set[int] = set()
    while at < limit:
        matched = run.match(data, at)
        at = matched.end() if matched else at
        op = data[at] if at < limit else 0
        length_nbytes = COUNTED.get(op)
        if length_nbytes is not None:
            after = at + 1 + length_nbytes
            nbytes = int.from_bytes(data[at + 1 : after], "little")
            at = after + nbytes
            if op in _UNICODE and nbytes < _SHORT:
                lengths.add(nbytes)
                met += 1
                if met == _MANY:
                    run, met = _run(*bound, frozenset(lengths)), 0
        elif op in (_PUT, _LONG_BINPUT):
            at = _check_put(data, at, room)
        elif op in _EXTENSIONS:
            raise UnpicklingError("uses copyreg extension codes")
        elif op == _LONG4:
            raise UnpicklingError("an integer of more than 255 bytes")
        else:
            return  # STOP, or an opcode that the unpickler refuses itself


def _check_put(data: bytes, at: int, room: int) -> int:
    """Return the offset after the PUT or LONG_BINPUT at `at`."""
    if data[at] == _LONG_BINPUT:
        end = at + 5
        index = int.from_bytes(data[at + 1 : end], "little")
    else:
        end = data.find(b"\n", at) + 1 or len(data)
        digits = data[at + 1 : end].strip()
        index = int(digits) if digits.isdigit() and len(digits) < 20 else 1 << 64
    if index > room:
        raise UnpicklingError(
            f"memo index {index}, expected at most {room}, the bytes of the pickle"
        )
    return end
