"""Parts of the command line: sizes, JSON, error codes."""

from __future__ import annotations

import argparse
import json
import re

import pytest
import typer
from ckptmap_cli.printer import dumps
from ckptmap_cli.sizes import parse_nbytes
from ckptmap_cli.typer_app import COMMANDS, build

from ckptmap.core.printable import as_lines, json_text, one_line, printable
from ckptmap.core.tensor_table import TensorSummary, fold
from ckptmap.error_codes import CODES
from tests.support.paths import ROOT


def test_codes_are_those_that_are_raised() -> None:
    raised = {
        code
        for folder in ("ckptmap", "cli")
        for file in (ROOT / folder).rglob("*.py")
        for code in re.findall(r'"(CKM\d{3})"', file.read_text())
    }
    assert raised == set(CODES)


def test_codes_are_explained_in_whole_sentences() -> None:
    for code, entry in CODES.items():
        assert entry.title and not entry.title.endswith("."), code
        assert entry.why.endswith(".") and entry.next_step, code


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("64MiB", 64 << 20), ("2GB", 2 * 10**9), ("1.5 kib", 1536), ("5g", 5 * 10**9)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 XB", "0", "1e9"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"is no size|1 byte or more"):
        parse_nbytes(text)


def test_json_holds_what_json_has_no_word_for() -> None:
    odd = {("a", 1): float("nan"), "b": b"xyz", "c": (1, {2}), "d": argparse.Namespace(x=1)}
    text = dumps({"odd": odd, "lone": "\ud800"})
    assert json.loads(text)["lone"] == "\ud800"
    assert json.loads(text)["odd"] == {
        "('a', 1)": "nan", "b": "<3 bytes>", "c": [1, [2]], "d": "Namespace(x=1)"
    }  # fmt: skip


def test_names_alike_but_for_numbers_are_one_line() -> None:
    names = ["a.0.w", "a.10.w", "a.x1.w", "a.2.w", "b.1.2", "b.1.5", "c\n.3", "#.1", "\0.1"]
    folded = fold(names, [TensorSummary("model", (2,), ("int8",), "", 4) for _ in names])
    assert [(group.pattern, group.count, group.nbytes) for group in folded] == [
        ("a.{0..10, 3 of them}.w", 3, 12), ("a.x1.w", 1, 4), ("b.1.{2..5, 2 of them}", 2, 8),
        ("c\n.3", 1, 4), ("#.1", 1, 4), ("\0.1", 1, 4),
    ]  # fmt: skip


def test_names_cannot_speak_to_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x9b\tc\nd") == "a\\x1b[2Jb\\x0d\\x9b\\x09c\nd"
    assert printable("\u202ea\u2066\u200f\u061c\ud800\u2028é\xa0中") == (
        "\\u202ea\\u2066\\u200f\\u061c\\ud800\\u2028é\xa0中"
    )
    assert one_line("a\nok: b") == "a\\x0aok: b"
    assert as_lines(["a\nb", "c"]) == "a\\x0ab\nc"
    odd = {"\x9b\u202e\x7f\ud800\n": "\x1b"}
    text = json_text(json.dumps(odd, ensure_ascii=False))
    assert text == '{"\\u009b\\u202e\\u007f\\ud800\\n": "\\u001b"}' and json.loads(text) == odd


def test_only_the_command_that_is_asked_for_is_built() -> None:
    assert len(build(["verify", "x"]).registered_commands) == 1
    assert len(build(["--help"]).registered_commands) == len(COMMANDS)
