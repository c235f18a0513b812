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
    capsys.readouterr()
    assert main([*args, "-q"]) == 0
    assert capsys.readouterr().out == "report.html\n"
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


def test_a_damaged_checkpoint_has_a_page_that_says_so(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code and the error are those of the other commands; the page can be sent to somebody."""
    source.write_bytes(source.read_bytes()[:-100])
    assert main(["report", "m.safetensors"]) == 2
    said = capsys.readouterr()
    assert (
        said.out == "wrote report.html\n" and "error[CKM104]: m.safetensors: truncated" in said.err
    )
    page = Path("report.html").read_text()
    assert "m.safetensors: truncated" in page and "ckptmap explain CKM104" in page
    assert "It cannot be read" in page and "<script" not in page
    assert (
        str(source.parent) not in page
    )  # it may be sent to somebody: paths are as they were typed
    source.rename("good <b>.safetensors")
    assert main(["report", "good <b>.safetensors"]) == 2  # and the report before it is replaced
    page = Path("report.html").read_text()
    assert "good &lt;b&gt;.safetensors" in page and "<b>" not in page


def test_a_directory_that_lacks_a_shard_has_a_page_with_its_files(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("folder")
    folder.mkdir()
    source.rename(folder / "model-00001-of-00002.safetensors")
    assert main(["report", "folder"]) == 2
    page = Path("report.html").read_text()
    assert "1 file" in page and "model-00001-of-00002.safetensors" in page
    assert capsys.readouterr().err.count("error[CKM108]") == 1 and "CKM108" in page
