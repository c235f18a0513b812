"""Patterns of names: globs, and the ranges that `inspect` prints."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from ckptmap.core.name_globs import matches, matches_any, suggestion
from ckptmap.core.tensor_table import TensorSummary, fold

NAMES = [f"model.layers.{n}.{w}" for n in range(12) for w in ("mlp.w", "norm")] + ["lm_head"]


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("model.layers.{0..2}.*", [n for n in NAMES if n.split(".")[2:3] in (["0"], ["1"], ["2"])]),
        ("*.{9..11}.norm", [f"model.layers.{n}.norm" for n in (9, 10, 11)]),
        ("model.layers.{0..11, 3 of them}.norm", [n for n in NAMES if n.endswith("norm")]),
        ("model.layers.{11..0}.norm", []),
        ("lm_head", ["lm_head"]),
        ("{0..2}", []),
    ],
)
def test_ranges(pattern: str, wanted: list[str]) -> None:
    assert [name for name in NAMES if matches(name, pattern)] == wanted


@pytest.mark.parametrize("pattern", ["*", "model.*", "*.1?.w", "[lm]*", "*[!0-9].norm", "a[", ""])
def test_other_patterns_are_those_of_fnmatch(pattern: str) -> None:
    assert [matches(n, pattern) for n in NAMES] == [fnmatchcase(n, pattern) for n in NAMES]


def test_a_name_of_special_characters_matches_itself() -> None:
    for name in ("w[0]", "a*b", "a\nb", "{0..1}", "layers.{n}.w"):
        assert matches(name, name) and matches_any(name, ["x", name])
    assert matches("a\nb.1.c", "a*{0..1}.c") and not matches("a.01x.c", "a.{0..1}.c")


def test_every_line_of_the_table_matches_what_it_stands_for() -> None:
    names = [*NAMES, *(f"h.{n}.w" for n in (0, 3, 4, 9))]
    look = TensorSummary("model", (1,), ("float32",), "", 4)
    lines = fold(names, [look] * len(names))
    assert any(", 4 of them}" in line.pattern for line in lines)
    for line in lines:
        assert sum(matches(name, line.pattern) for name in names) == line.count


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("layers.0.*", "did you mean '*layers.0.*', which matches 2?"),
        ("model.layers.1", "did you mean 'model.layers.1.*', which matches 2?"),
        ("lm_haed", "did you mean 'lm_head'?"),
        ("model.layer.1.*", "did you mean 'model.layers.1.*', which matches 2?"),
        ("modl.layesr.{1..2}.*", "did you mean 'model.layers.{1..2}.*', which matches 4?"),
        ("*.layer.1.*", "did you mean '*.layers.1.*', which matches 2?"),
        ("*.layers.{0..1}.nrom", "did you mean '*.layers.{0..1}.norm', which matches 2?"),
        ("zzz", ""),
    ],
)
def test_what_may_be_meant_by_a_pattern_that_matches_nothing(pattern: str, meant: str) -> None:
    assert suggestion(pattern, NAMES) == meant
