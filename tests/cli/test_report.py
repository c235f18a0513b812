"""`ckptmap report`: what it writes, and what it never replaces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckptmap_cli.main import main
from safetensors.torch import save_file


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_file({"fc.weight": torch.ones(8, 64)}, tmp_path / "m.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "m.safetensors"


def test_it_writes_one_file(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["report", "m.safetensors", "--to", "full-bf16", "--to", "full-nf4", "--values"]
    assert main(args) == 0
    assert capsys.readouterr().out == "wrote report.html\n"
    first = Path("report.html").read_bytes()
    assert b"--to full-nf4" in first and b"--to full-bf16" in first
    assert main(args) == 0  # a report is replaced, and the same one is made again
    assert Path("report.html").read_bytes() == first
    assert sorted(path.name for path in source.parent.iterdir()) == ["m.safetensors", "report.html"]


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("m.safetensors", "is there already, and no report of ckptmap"),
        ("folder", "is there already, and no report of ckptmap"),
        ("link.html", "is there already, and no report of ckptmap"),
        ("none/report.html", "there is no directory none"),
    ],
)
def test_it_replaces_nothing_else(
    source: Path, out: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    Path("link.html").symlink_to(source)
    before = source.read_bytes()
    assert main(["report", "m.safetensors", "-o", out]) == 2
    assert f"error[CKM304]: {out}: " in (error := capsys.readouterr().err) and said in error
    assert source.read_bytes() == before


def test_it_leaves_the_checkpoint_as_it_is(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the directory of the checkpoint, too, where the default name would be in it."""
    assert main(["report", "."]) == 2
    assert "error[CKM304]: report.html: lies in ., " in capsys.readouterr().err
    assert [path.name for path in source.parent.iterdir()] == ["m.safetensors"]


def test_errors_are_those_of_the_other_commands(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "nowhere"]) == 2
    assert "error[CKM101]" in capsys.readouterr().err
    assert main(["report", "m.safetensors", "--to", "hg"]) == 2
    assert "error[CKM201]" in capsys.readouterr().err
    assert not Path("report.html").exists()
