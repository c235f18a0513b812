"""TOML of strangers: whatever is wrong is one error, and parsing takes seconds at most."""

from __future__ import annotations

import time

import pytest

from ckptmap.core.toml_text import TomlError, parse_toml

NAMES = "a." * 250
BAD = {
    "no TOML": ("x = [", "Invalid value"),
    "an integer that Python does not parse": (f"x = {'9' * 5000}", "4300 digits"),
    "an integer that Python does not print": (f"x = 0x{'f' * 8000}", "32,000 bits"),
    "arrays without end": (f"x = {'[' * 100_000}", "nested too deep"),
    "arrays within the parser's bound": (f"x = {'[' * 150}1{']' * 150}", "deeper than 100"),
    "a key of 40,000 names": (f"{'a.' * 40_000}a = 1", "too many names"),
    "a table of 40,000 names": (f"[{'a.' * 40_000}a]", "too many names"),
    "many keys in a deep table": (
        f"[{NAMES}a]\n" + "".join(f"{NAMES}k{i} = 1\n" for i in range(2000)), "too many names",
    ),
    "names with the line breaks of Unicode": ('"a\u2028".' * 40_000 + "a = 1", "too many names"),
    "too long": ("#" + " " * (4 << 20), "expected at most"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_documents(name: str) -> None:
    text, problem = BAD[name]
    begun = time.process_time()
    with pytest.raises(TomlError, match=problem) as told:
        parse_toml(text)
    assert "\n" not in str(told.value)
    assert time.process_time() - begun < 5


def test_what_is_usual_is_taken() -> None:
    experts = "".join(
        f'"model.layers.{i}.mlp.experts.7.up_proj" = "colwise"\n' for i in range(9999)
    )
    assert len(parse_toml(experts)) == 9999
    one_line = ", ".join(f'"layers.{i}.w.weight"' for i in range(1000))
    assert len(parse_toml(f"names = [{one_line}]")["names"]) == 1000
    assert parse_toml("x = -9223372036854775808\ny = 1979-05-27T07:32:00Z\nz = nan")["x"] == -(
        2**63
    )
