"""The one JSON parser: what it takes, and the one line that says why it does not."""

from __future__ import annotations

import json
import math

import pytest

from ckptmap.core.json_text import (
    MAX_DEPTH,
    MAX_DIGITS,
    JsonError,
    _has_long_number,
    parse_json,
    parse_object,
    parse_pairs,
)

DOCUMENTS = [
    "null", "true", "-0.5e-3", '"\\u00e9\\ud83d\\ude00 [{\\"}]\\\\"', "[]", "{}", f"[{10**31}]",
    '{"a": [1, {"b": null}], "": "[[[{{{"}', " \n[1.5,\t2]\r\n", "[" * MAX_DEPTH + "]" * MAX_DEPTH,
    "[[]" + ",[]" * 1000 + "]", f'["{"9" * 500}", {"9" * MAX_DIGITS}, 1.{"3" * 500}]',
    '"' + "\\\\[" * 500 + '"', '{"w": "' + "{" * 1500 + '"}',
]  # fmt: skip


@pytest.mark.parametrize("text", DOCUMENTS)
def test_values_are_those_of_json(text: str) -> None:
    assert parse_json(text) == json.loads(text)
    assert parse_json(text.encode()) == parse_json(bytearray(text.encode())) == json.loads(text)


REFUSED = {
    "": "line 1, column 1: expected value, got the end",
    '{"a": 1, 2}': "line 1, column 10: expected property name",
    "[1\n2]": "line 2, column 1: expected ',' delimiter, got '2]'",
    "1 2": "line 1, column 3: expected the end of the text, got '2'",
    '["\x1b"]': r"line 1, column 3: Invalid control character, got '\x1b",
    '{"a": {"k": 1, "k": 2}}': "expected each key once, got 'k' twice",
    "9" * (MAX_DIGITS + 1): "integers of at most 100 digits, got one of 101: 99999999999999999999...",
    "[-" + "9" * 5000 + "]": "integers of at most 100 digits, got one of 5000",
    "1e400": "numbers that float64 can hold, got 1e400",
    "NaN": "expected finite numbers, got NaN",
    "[-Infinity]": "expected finite numbers, got -Infinity",
    "\ufeff{}": "byte 0: expected JSON, got a byte order mark",
    "[" * 101 + "]" * 101: "nested too deeply: expected at most 100 levels, got 101",
    '{"a":' * 1500 + "1" + "}" * 1500: "nested too deeply: expected at most 100 levels, got 1500",
    "[" * 200_000: "nested too deeply: expected at most 100 levels, got 200000",
    "[" * 200_000 + '"' + '\\"' * 200_000 + "\\": "expected at most 100 levels, got 200000",
}  # fmt: skip


@pytest.mark.parametrize(("text", "says"), REFUSED.items(), ids=[text[:12] for text in REFUSED])
def test_all_else_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(JsonError) as caught:
        parse_json(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 200 and str(caught.value).isprintable()


def test_bytes_that_are_no_utf8() -> None:
    with pytest.raises(JsonError, match=r"^byte 2: expected UTF-8, got b'\\xff\"\}'"):
        parse_json(b'{"\xff"}')
    with pytest.raises(JsonError, match="byte order mark"):
        parse_json(b"\xef\xbb\xbf{}")
    with pytest.raises(JsonError, match="expected UTF-8"):
        parse_json("{}".encode("utf-16"))  # as json.loads takes


def test_size_and_number_of_values_are_bounded() -> None:
    with pytest.raises(JsonError, match="expected at most 4 bytes, got 5 or more"):
        parse_json(b"[1,2]", max_nbytes=4)
    with pytest.raises(JsonError, match="expected at most 16000000 JSON values, got 16000001"):
        parse_json(b"," * 16_000_001)


def test_numbers_beyond_json_where_a_caller_allows_them() -> None:
    read = parse_json("[NaN, Infinity, -Infinity, 1e400]", allow_nan=True)
    assert math.isnan(read[0]) and read[1:] == [math.inf, -math.inf, math.inf]


def test_objects() -> None:
    assert parse_object('{"a": 1}') == {"a": 1}
    for text, kind in {"[]": "an array", "3": "a number", "null": "null", '""': "a string"}.items():
        with pytest.raises(JsonError, match=f"^expected a JSON object, got {kind}$"):
            parse_object(text)
    assert parse_pairs('{"a": {"b": 1, "b": [{}]}}') == (("a", (("b", 1), ("b", [()]))),)


@pytest.mark.parametrize("digits", ["9", "٣"])
def test_a_long_number_is_found_wherever_it_stands(digits: str) -> None:
    """Few places of a text are looked at."""
    for before in range(2 * MAX_DIGITS + 5):
        for after in ("", "," * 300):
            short = "x" * before + digits * MAX_DIGITS
            assert not _has_long_number(short + after)
            assert _has_long_number(short + digits + after)
            assert _has_long_number(short + digits * MAX_DIGITS + after)
