"""Names that speak to a terminal: none of them reaches stdout or stderr, in any command or form."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptmap_cli.main import main

RAW = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
FORGED = "\nok: forged"
NASTY = "a\x1b[2J\x9b31m\r\x07\x7f\u202e\u2066\u200f\u061c\t" + FORGED
WEIGHT = torch.arange(16.0).reshape(4, 4)


def plain(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What a command has said: no control but the line feed, and no line that a name made."""
    said = capsys.readouterr()
    for text in said:
        assert not RAW.search(text), RAW.search(text)
        assert not any(line.startswith("ok: forged") for line in text.splitlines())
    return said.out, said.err


def saved(folder: Path) -> Path:
    """A torch.save file: names of tensors, extra keys and values, and its own name are odd."""
    tree = {
        "model": {f"{NASTY}.weight": WEIGHT, "b.weight": WEIGHT + 1},
        f"extra{NASTY}": {f"k{NASTY}": f"v{NASTY}"},
        "step": 3,
    }
    file = folder / f"in\x1b[2J\x9b\u202e{FORGED}.pt"
    torch.save(tree, file)
    return file


def distributed(folder: Path) -> Path:
    """A directory of torch.distributed.checkpoint; torch itself names its keys."""
    dst = folder / "dcp\x9b\u202e"
    state = {f"model.{NASTY}.weight": WEIGHT, f"x{NASTY}": "v\x1b[2J"}
    dcp.save(state, checkpoint_id=str(dst), no_dist=True)
    return dst


def tensors(folder: Path) -> Path:
    """A safetensors file; its names may hold bidirectional controls, C0 and C1 are refused."""
    header = {"a\u202e\u2066.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    raw = json.dumps(header).encode()
    file = folder / "model\x9b\u202e.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * 16)
    return file


MAKERS = (saved, distributed, tensors)


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_no_command_prints_a_control(
    make: Callable[[Path], Path],
    form: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    src, out = str(make(tmp_path)), str(tmp_path / "out\x9b\u202e")
    other = tmp_path / "other.pt"
    torch.save({"model": {f"{NASTY}.bias": WEIGHT}, f"n{NASTY}": 1}, other)
    commands = [
        ["inspect", src], ["inspect", src, "--keys", f"*{NASTY}*"], ["plan", src, "--to", "full"],
        ["plan", src, "--to", "hf"], ["plan", src, "--to", "hf-int8", "--strict"],
        ["plan", src, "--to", f"full{NASTY}"], ["plan", src, "--to", "full", "--drop", NASTY],
        ["convert", src, out, "--to", "full"], ["convert", src, out, "--to", "full"],
        ["verify", out], ["verify", out, "--against", src], ["verify", src],
        ["diff", src, str(other)], ["diff", str(other), out, "--values"],
        ["merge", src, str(other), out + "2"], ["mappings", "check", NASTY],
        ["mappings", "new", "--from", src, "--to", str(other)],
        ["mappings", "list", NASTY], ["push", src, f"hf://a/b{NASTY}", "--dry-run"],
        ["pull", f"hf://a/b{NASTY}", out + "3"], ["doctor", "--from", src, "--to", "fsdp2"],
        ["explain", NASTY], ["inspect", f"absent{NASTY}"], [NASTY],
    ]  # fmt: skip
    for args in commands:
        code = main([*args, *form])
        printed, said = plain(capsys)
        assert "please report" not in said, (args, said)
        if form and printed:
            json.loads(printed)
            assert printed.count("\n") == 1
        if not form and code:
            assert len(said.splitlines()) <= 3 or printed, said


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_class_that_a_pickle_names(
    form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = pickle.dumps({"w": 1}, protocol=2)[:-1]
    odd = "o\x1b[2J\x9b\u202es"
    named = b"\x80\x02c" + odd.encode() + b"\n" + odd.encode() + b"\n)R."
    for number, data in enumerate((body + named[2:], named)):
        file = tmp_path / f"{number}.pt"
        torch.save({"w": WEIGHT}, file)
        with zipfile.ZipFile(file) as old:
            records = {entry: old.read(entry) for entry in old.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as new:
            for entry, content in records.items():
                new.writestr(entry, data if entry.endswith("data.pkl") else content)
        main(["inspect", str(file), *form])
        plain(capsys)


def test_a_name_in_json_is_what_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({f"{NASTY}.weight": WEIGHT}, tmp_path / "a.pt")
    assert main(["inspect", str(tmp_path / "a.pt"), "--json"]) == 0
    printed, _ = plain(capsys)
    assert "\\u009b" in printed and "\\u202e" in printed
    assert f"{NASTY}.weight" in {entry["fqn"] for entry in json.loads(printed)["tensors"]}


def pasted(options: str) -> list[str]:
    """The words that a shell makes of a part of a hint."""
    line = f"printf '%s\\0' {options}"
    printed = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    return [os.fsdecode(word) for word in printed.split(b"\0")[:-1]]


@pytest.mark.parametrize(
    "name", ["it's", "-k", "x y", "a\nb", "\x1b[31m", "\u202eab", "ü", "$HOME"]
)
@pytest.mark.parametrize("option", ["--drop", "--no-encode", "--exclude"])
def test_an_option_of_a_hint_is_pasted(
    name: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is in the name of a key, a shell makes of the hint an option that the key is meant by."""
    source, target = tmp_path / "m.pt", "full"
    if option == "--drop":
        torch.save({"w": torch.ones(2), name: torch.nn.Linear(1, 1)}, source)
    elif option == "--no-encode":
        torch.save({f"{name}.weight": torch.full((64, 64), float("nan"))}, source)
        target = "full-nf4"
    else:
        torch.save({"w": torch.ones(2), name: torch.ones(2, dtype=torch.complex64)}, source)
        target = "gguf"
    line = [
        "convert",
        str(source),
        str(tmp_path / ("o.gguf" if target == "gguf" else "o.pt")),
        "--to",
        target,
    ]
    assert main(line) != 0
    hint = capsys.readouterr().err.partition("hint: ")[2]
    assert hint.strip().isprintable()
    start = hint.index(option)
    assert main([*line, *pasted(hint[start:].partition(", or ")[0])]) == 0
