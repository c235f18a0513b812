"""Sizes in units, and tables that fit the terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptmap.core import formatting
from ckptmap.core.formatting import counted, fitted, human, some

HEADS = ["model.layers.{0..31}.self_attn.q_proj.weight", "norm"]
TAILS = [
    "32x  [4096, 4096]  bfloat16 -> nf4  quantize",
    " 1x  [4096]        bfloat16 -> bf16  bytes",
]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (16 << 20, "16.0 MiB"), (5 << 40, "5.0 TiB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert human(nbytes) == text


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "file", "1 file is"), (0, "file", "0 files are"), (1024, "entry", "1,024 entries are"),
        (2, "key", "2 keys are"), (1, "entry", "1 entry is"),
    ],
)  # fmt: skip
def test_a_noun_and_its_verb_agree_with_the_count(count: int, noun: str, text: str) -> None:
    assert counted(count, noun, "is", "are") == text
    assert counted(count, noun) == text.rpartition(" ")[0]


def test_a_long_list_is_a_sample_and_a_count() -> None:
    assert some(["a", "b", "c"], 2) == "a, b, c"
    assert some(["a", "b", "c", "d"], 2) == "a, b and 2 more"
    assert some([]) == ""


@pytest.mark.parametrize("width", [None, 200])
def test_a_table_has_one_line_a_row(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formatting, "terminal_width", lambda: width)
    lines = fitted(HEADS, TAILS)
    assert lines == [
        f"  {head:<{len(HEADS[0])}}  {tail}" for head, tail in zip(HEADS, TAILS, strict=True)
    ]


def test_in_a_narrow_terminal_a_long_name_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formatting, "terminal_width", lambda: 60)
    lines = fitted(HEADS, TAILS)
    assert [line.strip() for line in lines] == [HEADS[0], TAILS[0], f"{HEADS[1]}  {TAILS[1]}"]
    assert all(len(line) <= 60 for line in lines)
    assert fitted([], []) == []


def test_one_long_name_costs_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others keep theirs, and the columns stay aligned; all rows were split for one name."""
    monkeypatch.setattr(formatting, "terminal_width", lambda: 40)
    lines = fitted(["a.weight", "a.name.that.is.far.too.long.weight", "b"], ["1x  x"] * 3)
    assert lines == [
        "  a.weight  1x  x", "  a.name.that.is.far.too.long.weight", "            1x  x", "  b         1x  x",
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_closed_stdout_has_no_width(stream: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = open(os.devnull) if stream else None  # noqa: SIM115
    if closed is not None:
        closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    assert formatting.terminal_width() is None


def test_inspect_on_a_terminal_of_60_columns(tmp_path: Path) -> None:
    """A real terminal: its lines fit, names are whole, and NO_COLOR has nothing to take away."""
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.save({name: torch.zeros(64, 64), "b": torch.zeros(3)}, tmp_path / "m.pt")
    outer, inner = pty.openpty()
    environment = {key: os.environ[key] for key in os.environ if key != "NO_COLOR"}
    shown = []
    for more in ({}, {"NO_COLOR": "1"}):
        subprocess.run(
            [sys.executable, "-m", "ckptmap", "inspect", "m.pt"], stdout=inner, cwd=tmp_path, check=True,
            env={**environment, "COLUMNS": "60", "TERM": "xterm-256color", **more},
        )  # fmt: skip
        shown.append(os.read(outer, 1 << 16).decode())
    os.close(inner)
    os.close(outer)
    lines = shown[0].splitlines()
    assert shown[0] == shown[1] and "\x1b" not in shown[0]
    assert f"  {name}" in lines and all(len(line) <= 60 for line in lines)
    assert lines[lines.index(f"  {name}") + 1].split() == [
        "1x",
        "[64,",
        "64]",
        "float32",
        "16.0",
        "KiB",
    ]
