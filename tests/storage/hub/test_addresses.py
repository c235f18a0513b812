"""What is no path is told as such, with the form that works: a page of the Hub, a bucket, a stream."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from ckptmap_cli.main import main

import ckptmap
from ckptmap.errors import SourceError

PAGE = "https://huggingface.co/org/name"


@pytest.mark.parametrize(
    ("address", "step"),
    [
        ("https://huggingface.co/org/name", "write hf://org/name"),
        ("https://huggingface.co/org/name/", "write hf://org/name"),
        ("https://www.huggingface.co/org/name/tree/main", "write hf://org/name"),
        ("https://hf.co/org/name/tree/v1/sub/folder", "write hf://org/name@v1/sub/folder"),
        (
            "https://huggingface.co/org/name/blob/main/model.safetensors?download=true",
            "write hf://org/name/model.safetensors",
        ),
        ("https://example.org/model.pt", "copy it to this machine, and give its path"),
        ("s3://bucket/run", "copy it to this machine, and give its path"),
        ("-", "save it to a file, and give the path of that"),
    ],
)
def test_an_address_is_answered_with_what_works(address: str, step: str) -> None:
    with pytest.raises(SourceError) as caught:
        ckptmap.open(address)
    assert (caught.value.code, caught.value.hint) == ("CKM101", step)


def test_a_file_of_such_a_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s3:").mkdir()
    Path("s3:/run").write_bytes(b"nothing")
    with pytest.raises(SourceError, match="run: "):
        ckptmap.open("s3://run")


@pytest.mark.parametrize(("place", "hint"), [(PAGE, "write hf://org/name"), ("-", "save it to")])
@pytest.mark.parametrize(
    "args",
    [
        ("inspect", "{}"), ("plan", "{}", "--to", "hf"), ("convert", "{}", "out", "--to", "hf"),
        ("convert", "a.pt", "out", "--to", "hf", "--config-from", "{}"),
        ("convert", "a.pt", "out", "--to", "full", "--names-like", "{}"),
        ("verify", "{}"), ("verify", "out.pt", "--against", "{}"), ("diff", "{}", "a.pt"),
        ("diff", "a.pt", "{}"), ("merge", "{}", "a.pt", "out"), ("merge", "a.pt", "{}", "out"),
        ("push", "{}", "org/name"), ("push", "a.pt", "{}"), ("pull", "{}", "out"),
        ("report", "{}", "-o", "r.html"),
    ],
)  # fmt: skip
def test_every_command_answers_them_alike(
    args: tuple[str, ...],
    place: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For a source, an option that names a checkpoint, and a repository to push to."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "a.pt")
    ckptmap.convert("a.pt", "out.pt", to="full")
    assert main([place if arg == "{}" else arg for arg in args]) == 2
    error = capsys.readouterr().err
    assert "error[CKM101]" in error and f"hint: {hint}" in error


@pytest.mark.parametrize(
    "args", [("convert", "a.pt", "{}", "--to", "full"), ("pull", "hf://o/n", "{}")]
)
@pytest.mark.parametrize("place", [PAGE, "-"])
def test_no_command_writes_to_them(
    args: tuple[str, ...],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "a.pt")
    assert main([place if arg == "{}" else arg for arg in args]) == 2
    assert "error[CKM304]" in capsys.readouterr().err and {*os.listdir()} == {"a.pt"}


def test_what_pull_takes_is_written_for_a_name_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "org/name", "out"]) == 2
    assert "hint: write hf://org/name, or use ckptmap convert" in capsys.readouterr().err
