"""A destination whose name is of the other kind than its setup is refused, with a name that is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckptmap_cli.main import main

import ckptmap
from ckptmap.errors import DestinationError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save({"a.weight": torch.zeros(4, 4)}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


@pytest.mark.parametrize(
    ("to", "dst", "message", "step"),
    [
        ("hf", "x.safetensors", "names a file, but this setup writes a directory", "x"),
        ("fsdp2", "run.pt", "names a file, but this setup writes a directory", "run"),
        ("full", "out/", "names a directory, but this setup writes one file", "out.pt"),
        ("ddp", "runs/a/", "names a directory, but this setup writes one file", "runs/a.pt"),
    ],
)
def test_a_name_of_the_other_kind(
    source: Path,
    tmp_path: Path,
    to: str,
    dst: str,
    message: str,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DestinationError, match=message) as refused:
        ckptmap.convert(source, dst, to)
    assert refused.value.code == "CKM304" and refused.value.hint.endswith(f": {step}")
    assert main(["convert", str(source), dst, "--to", to]) == 2
    assert f"{dst}: {message}" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.pt"]
    ckptmap.convert(source, step, to)


@pytest.mark.parametrize(
    "dst", ["s3://bucket/x", "file:///tmp/out", "https://huggingface.co/a/b", "-"]
)
def test_an_address_is_no_destination(
    source: Path, tmp_path: Path, dst: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DestinationError, match="is not a path on this machine") as refused:
        ckptmap.convert(source, dst, "hf")
    assert refused.value.code == "CKM304"
    assert [file.name for file in tmp_path.iterdir()] == ["in.pt"]


def test_what_is_there_tells_more_than_its_name(source: Path, tmp_path: Path) -> None:
    """An empty directory may have any name; a file of one is told as what it is."""
    (tmp_path / "odd.pt").mkdir()
    ckptmap.convert(source, tmp_path / "odd.pt", "hf")
    (tmp_path / "there.pt").write_bytes(b"x")
    with pytest.raises(DestinationError, match="is a file, expected a directory or nothing") as at:
        ckptmap.convert(source, tmp_path / "there.pt", "hf")
    assert "--overwrite replaces a directory by a directory only" in at.value.hint
