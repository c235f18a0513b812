"""Errors, hints and notes name options to a command line, and arguments to a Python caller."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptmap
from ckptmap.core.printable import advised, quote
from ckptmap.errors import CkptmapError, PlanError
from ckptmap.typed_options import FLAGS, VALUED, as_given, typed_options
from tests.cli.test_option_names import CALLS, OF_THE_TERMINAL, option_names
from tests.support.paths import ROOT

pytestmark = pytest.mark.python_texts

TEXTS = [
    ("leave it behind with --optimizer drop, or", "leave it behind with optimizer='drop', or"),
    ("give --like PATH: a config.json", "give like=PATH: a config.json"),
    ("a file is of another save, or --like is", "a file is of another save, or like= is"),
    ("for example --mesh dp=2,tp=4 --tp-plan FILE", "for example mesh='dp=2,tp=4', tp_plan=FILE"),
    ("--encode '*.a' --encode '*.b'", "encode=['*.a', '*.b']"),
    ("leave out --as, or --names-from", "leave out as_=, or names_from="),
    ("give --threads 1 and --no-sync", "give threads=1 and sync=False"),
    ("or '' for all: --source-root NAME, else", "or '' for all: source_root=NAME, else"),
    ("name them with --param-order FILE", "name them with param_order=[[...]]"),
    ("ckptmap convert 'a b' DST --to hf, then --to full", "ckptmap convert 'a b' DST --to hf, then to='full'"),
    ("as `ckptmap inspect` shows, --names hf", "as `ckptmap inspect` shows, names='hf'"),
    ("pip install --force-reinstall torch", "pip install --force-reinstall torch"),
    ("(all of them with --json)", "(all of them with --json)"),
    ("a/--drop b", "a/--drop b"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "given"), TEXTS)
def test_options_become_arguments(typed: str, given: str) -> None:
    assert as_given(typed) == given
    assert as_given(given) == given
    with typed_options():
        assert as_given(typed) == typed


@pytest.mark.parametrize(
    "value",
    [
        "a b",
        "it's",
        "a'\"b",
        "a\nb",
        "-x",
        "\u202eabc",
        "ü",
        "a=b",
        "x\\y",
        "$HOME",
        "it",
        "EMA",
        "at:",
        "a,",
    ],
)
def test_a_value_is_the_same_in_python_as_in_a_shell(value: str) -> None:
    name, _, written = as_given(f"leave it out with {advised(drop=value)}, or not").partition("=")
    assert name == "leave it out with drop"
    assert ast.literal_eval(written.removesuffix(", or not")) == value
    many = as_given(f"leave them behind with {advised(drop=value)} {advised(drop='b')}")
    assert ast.literal_eval(many.partition("=")[2]) == [value, "b"]


def test_a_shell_takes_quoted_words(tmp_path: Path) -> None:
    import subprocess

    words = ["a b", "it's", "a\nb'", "\x1b[31m", "\u202eabc", "ü", "\\n", "\udcff", ""]
    line = f"printf '%s\\0' {' '.join(map(quote, words))}"
    assert line.isprintable()
    printed = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    import os

    assert [os.fsdecode(word) for word in printed.split(b"\0")[:-1]] == words


def test_every_option_is_known() -> None:
    """An option that Python has as an argument is turned into it."""
    names = {name.rstrip("_").replace("_", "-") for call in CALLS for name in option_names(call)}
    terminal = {"dry-run", "json", "quiet", "keys", "shards", "o", "plan", "rank-timeout"}
    assert {name.replace("_", "-") for name in OF_THE_TERMINAL} <= terminal
    assert names - terminal - {"adapter", "adapter-config", "force", "leave"} <= FLAGS | VALUED
    assert not terminal & (FLAGS | VALUED)


VALUES = re.compile(r"[A-Z]+(-\w+)?|\[\[\.\.\.\]\]|\d+|True|False|'[^']*[^a-z'][^']*'|''|")
PLAIN = {
    "accelerate", "auto", "compile", "cpu", "cuda", "ddp", "drop", "fqn", "full", "gguf", "hf", "index",
    "keep", "model", "module", "net", "none", "student",
}  # fmt: skip


def texts() -> Iterator[tuple[str, str]]:
    """Every text in the code that names an option, with the place; docstrings apart."""
    for file in sorted((ROOT / "ckptmap").rglob("*.py")):
        if not re.search(r"--[a-z]{2}", file.read_text()):
            continue
        tree = ast.parse(file.read_text())
        docstrings = {
            id(node.value) for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }  # fmt: skip
        inside = {
            id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(
                    str(v.value) if isinstance(v, ast.Constant) else "X1" for v in node.values
                )
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in {*docstrings, *inside}
            ):
                text = node.value
            else:
                continue
            if re.search(r"--[a-z]{2}", text):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", text


def test_every_text_is_sound_in_python() -> None:
    """No word of a sentence is taken for a value, and no option stays outside a command line."""
    wrong = []
    for place, text in texts():
        given = as_given(text)
        for value in re.findall(r"(?<![\w.])[a-z][a-z_]*=((?:'[^']*'|\[\[|[\w.\]-])*)", given):
            if not VALUES.fullmatch(value) and value.strip("'") not in PLAIN and value != "[[...]]":
                wrong.append((place, value, given))
    assert not wrong


def test_a_python_caller_reads_arguments(tmp_path: Path) -> None:
    """By an error, its text and its hint, by the unresolved keys and the notes of a plan."""
    path = tmp_path / "m.pt"
    torch.save({"a.w": torch.ones(2), "odd": torch.nn.Linear(1, 1)}, path)
    with pytest.raises(PlanError, match="world_size=") as raised:
        ckptmap.plan(path, to="full", world_size=4)
    for text in (raised.value.message, raised.value.hint, str(raised.value)):
        assert "--" not in text
    plan = ckptmap.plan(path, to="full")
    assert "drop='odd'" in plan.unresolved[0].hint
    assert "drop='odd'" in str(plan)
    assert "--" not in str(plan)


def test_an_error_of_another_rank_is_read_as_here() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(CkptmapError("CKM204", "--mesh x: y", "give --like PATH")))
    assert (error.message, error.hint) == ("mesh='x': y", "give like=PATH")
    with typed_options():
        assert (error.message, error.hint) == ("--mesh x: y", "give --like PATH")
