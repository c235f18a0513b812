"""Names without their numbers are those that a look at each name gives."""

from __future__ import annotations

import random

import pytest

from ckptmap.core.encoding_records import EncodingRecords, records_of
from ckptmap.core.name_shapes import digit_masks, without_numbers
from ckptmap.core.tensor_table import NUMBER, TensorSummary, fold
from ckptmap.mapping.name_patterns import skeleton

SEGMENTS = (
    "layers", "w1", "w2", "0", "00", "1", "01", "10", "12", "7", "8", "99", "", "é9", "٣", "3٣", "x\ny",
    "123456789012345678", "1234567890123456789",
)  # fmt: skip


def some_names(seed: int) -> list[str]:
    draw = random.Random(seed)
    pool = draw.sample(SEGMENTS, draw.randint(2, 6))
    made = (".".join(draw.choices(pool, k=draw.randint(1, 4))) for _ in range(draw.randint(0, 40)))
    return list(dict.fromkeys(made))


@pytest.mark.parametrize("seed", range(60))
def test_numbers_are_replaced_as_in_each_name(seed: int) -> None:
    names = some_names(seed)
    assert [len(mask) for mask in digit_masks(names)] == list(map(len, names))
    for replaced in (lambda name: skeleton(name)[0], lambda name: NUMBER.sub("*", name)):
        assert without_numbers(names, replaced) == list(map(replaced, names))


@pytest.mark.parametrize("seed", range(60))
def test_rows_are_those_of_each_name_in_order_of_first_appearance(seed: int) -> None:
    names = some_names(seed)
    kinds = [
        TensorSummary("model", (2,), ("x",), "", 3),
        TensorSummary("other", (2,), ("x",), "", 5),
    ]
    looks = [kinds[len(name) % 2] for name in names]
    wanted: dict[tuple[str, str], list[str]] = {}
    for name, look in zip(names, looks, strict=True):
        wanted.setdefault((NUMBER.sub("*", name), look.role), []).append(name)
    rows = fold(names, looks)
    assert [(row.first, row.count) for row in rows] == [(n[0], len(n)) for n in wanted.values()]
    for row, alike in zip(rows, wanted.values(), strict=True):
        numbers = [NUMBER.findall(name) for name in alike]
        assert row.numbers == [set(place) for place in zip(*numbers, strict=True)]
        assert row.nbytes == row.look.nbytes * len(alike)


def test_names_that_differ_in_digits_inside_a_segment_are_of_two_rows() -> None:
    look = TensorSummary("model", (2,), ("x",), "", 1)
    names = ["e.5.w1", "e.10.w2", "e.5.w2", "e.7.w1"]
    rows = [(row.pattern, row.count) for row in fold(names, [look] * 4)]
    assert rows == [("e.{5..7, 2 of them}.w1", 2), ("e.{5..10, 2 of them}.w2", 2)]


def test_records_of_a_scheme_keep_their_order() -> None:
    records = {
        "a": {"scheme": "x"},
        "b": {"scheme": "y"},
        "c": {"scheme": "x"},
        "d": {"scheme": [1]},
    }
    for given in (records, EncodingRecords(records)):
        assert list(records_of(given, ("x",))) == ["a", "c"]
        assert list(records_of(given, {"y": 1, "x": 2})) == ["a", "b", "c"]
        assert records_of(given, ("z",)) == {}
