"""Parse JSON that others may have written: bounded, strict, and with one line that says what is wrong.

Every JSON document that ckptmap reads is parsed here; a test forbids `json.loads` elsewhere. Python's
parser alone takes a key twice, integers of thousands of digits (which other code then cannot print
or convert), `1e400` as infinity, and nesting until the stack ends. The format is RFC 8259: UTF-8
without a byte order mark.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

MAX_NBYTES = 1 << 30
"""Bytes of a document: the manifest of a million tensors takes less."""
MAX_VALUES = 16_000_000
"""Values in a document, counted before it is parsed: parsing costs about 100 bytes each."""
MAX_DEPTH = 100
"""Levels of arrays and objects."""
MAX_DIGITS = 100
"""Digits of an integer. 64 bits take 20; transformers writes int(1e30), which has 31."""
SHOWN = 20
"""Characters of the text that an error shows."""

MARKS = 5
STEP = MAX_DIGITS // MARKS
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b",[{")
_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_MARKS = re.compile(rf"\d{{{MARKS},}}")
_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
_STRING = re.compile(r'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
_BRACKETS = re.compile(r"[^\[\]{}]+")
_PAIRS = json.JSONDecoder(object_pairs_hook=tuple)
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


class JsonError(ValueError):
    """Text that ckptmap does not take as JSON; one line with the place, what was expected, and what is
    there. The caller adds the file's name."""


def parse_json(
    data: bytes | bytearray | str, *, max_nbytes: int = MAX_NBYTES, allow_nan: bool = False
) -> Any:
    """Return the value of a JSON document. Raises JsonError.

    max_nbytes  the size that is accepted: bytes, or characters of a `str`
    allow_nan   True: NaN and Infinity, which JSON has no form for, and numbers that float64 cannot
                hold, are read as Python reads them. Configs of transformers hold them.
    """
    return _parsed(*_text(data, max_nbytes), allow_nan, _unique)


def parse_object(data: bytes | bytearray | str, *, allow_nan: bool = False) -> dict[str, object]:
    """Return the JSON object in `data`, as `parse_json` does. Raises JsonError for any other value, too."""
    return as_object(parse_json(data, allow_nan=allow_nan))


def parse_pairs(data: bytes | bytearray | str) -> Any:
    """Return the value of a JSON document whose objects are tuples of (key, value) pairs.

    Keys that stand there twice are kept, for a caller that names them itself. Raises JsonError.
    """
    return _parsed(*_text(data, MAX_NBYTES), False, tuple)


def parse_strings(text: str, at: int) -> tuple[tuple[tuple[str, str], ...], int]:
    """Return the (key, value) pairs of the JSON object of strings that begins at `at`, and where it ends.

    Raises JsonError where there is none; text after it is the caller's.
    """
    try:
        pairs, end = _PAIRS.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise JsonError(f"expected an object of strings at character {at}") from error
    if type(pairs) is not tuple or not all(type(value) is str for _, value in pairs):
        raise JsonError(f"expected an object of strings at character {at}")
    return pairs, end


def as_object(value: object) -> dict[str, object]:
    """Return the value if it is a JSON object. Raises JsonError."""
    if not isinstance(value, dict):
        raise JsonError(f"expected a JSON object, got {_kind(value)}")
    return value


def _text(data: bytes | bytearray | str, max_nbytes: int) -> tuple[str, int]:
    """Return the text, and how many brackets open in it; those in strings count, too."""
    if len(data) > max_nbytes:
        raise JsonError(f"expected at most {max_nbytes} bytes, got {len(data)} or more")
    if isinstance(data, str):
        text = data
    else:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            got = bytes(data[error.start : error.start + 4])
            raise JsonError(f"byte {error.start}: expected UTF-8, got {got!r}") from error
    if text.startswith("\ufeff"):
        raise JsonError("byte 0: expected JSON, got a byte order mark (save the text without one)")
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    marks = raw.translate(None, _NO_MARKS)  # once through the text, not once for each mark
    if len(marks) > MAX_VALUES:
        raise JsonError(f"expected at most {MAX_VALUES} JSON values, got {len(marks)}")
    return text, len(marks) - marks.count(b",")


def _parsed(
    text: str, brackets: int, allow_nan: bool, pairs: Callable[[list[tuple[str, Any]]], object]
) -> Any:
    # `int` itself is much faster, and right where no run of digits is long.
    integer = _integer if _has_long_number(text) else int
    real, constant = (float, float) if allow_nan else (_finite, _constant)
    try:
        value = json.loads(
            text,
            object_pairs_hook=pairs,
            parse_int=integer,
            parse_float=real,
            parse_constant=constant,
        )
    except json.JSONDecodeError as error:
        raise JsonError(_what(error, text)) from error
    except RecursionError as error:
        raise _too_deep(_depth(text)) from error
    if brackets > MAX_DEPTH and (depth := _depth(text)) > MAX_DEPTH:
        raise _too_deep(depth)
    return value


def _has_long_number(text: str) -> bool:
    """Return whether more than MAX_DIGITS digits follow each other.

    Then MARKS characters of every STEP-th one that follow each other are digits, too: few places are looked at
    closely. A search through all of the text takes twice as long as `json.loads`.
    """
    sample = text[::STEP]
    if sample.isascii() and b"0" * MARKS not in sample.encode().translate(_AS_ZEROS):
        return False
    return any(
        _LONG_NUMBER.search(text, max(0, run.start() * STEP - STEP), run.end() * STEP)
        for run in _MARKS.finditer(sample)
    )


def _what(error: json.JSONDecodeError, text: str) -> str:
    """Return the parser's message as place, expected, got."""
    expected = error.msg.replace("Expecting", "expected", 1)
    expected = expected.replace("Extra data", "expected the end of the text")
    got = repr(text[error.pos : error.pos + SHOWN]) if error.pos < len(text) else "the end"
    return f"line {error.lineno}, column {error.colno}: {expected.removesuffix(' at')}, got {got}"


def _depth(text: str) -> int:
    """Return how many levels of arrays and objects the text has."""
    brackets = _BRACKETS.sub("", _STRING.sub("", text))
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _too_deep(depth: int) -> JsonError:
    return JsonError(f"nested too deeply: expected at most {MAX_DEPTH} levels, got {depth}")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # RFC 8259 allows a key twice and leaves open which value counts. Most programs take the last, some
    # the first: no value is right for all that read a file which is carried over.
    tree = dict(pairs)
    if len(tree) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise JsonError(
            f"expected each key once, got {twice[:80]!r} twice: remove one of the two (Python's"
            " json takes the last)"
        )
    return tree


def _integer(digits: str) -> int:
    count = len(digits.lstrip("-"))
    if count > MAX_DIGITS:
        raise JsonError(
            f"expected integers of at most {MAX_DIGITS} digits, got one of {count}:"
            f" {digits[:SHOWN]}..."
        )
    return int(digits)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JsonError(f"expected numbers that float64 can hold, got {text[:SHOWN]}")
    return number


def _constant(name: str) -> float:
    raise JsonError(f"expected finite numbers, got {name}")


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
