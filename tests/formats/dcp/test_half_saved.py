"""A save over a checkpoint that was killed half way leaves data of two saves under one `.metadata`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptmap
from ckptmap.errors import SourceError


def saved(path: Path, value: float, rows: int = 8) -> list[Path]:
    """Save four tensors as torch does, each in a file of its own; return the data files."""
    state = {f"w{n}": torch.full((rows, 8), value + n) for n in range(4)}
    writer = dcp.FileSystemWriter(path, single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return sorted(path.glob("*.distcp"))


def dated(path: Path, start: float, step: float, names: list[str]) -> None:
    for number, name in enumerate(names):
        os.utime(path / name, (start + number * step, start + number * step))


def test_data_that_is_much_younger_than_its_metadata_is_told(tmp_path: Path) -> None:
    """Every item lies where `.metadata` says, and torch loads the mixture without a word."""
    files = [file.name for file in saved(tmp_path / "run", 1.0)]
    assert len(files) == 4
    dated(tmp_path / "run", 1e9, 1, [*files, ".metadata"])
    assert not ckptmap.open(tmp_path / "run").notes
    saved(tmp_path / "next", 100.0)
    shutil.copy(tmp_path / "next" / files[1], tmp_path / "run" / files[1])
    dated(tmp_path / "run", 1e9 + 600, 0, [files[1]])
    with ckptmap.open(tmp_path / "run") as ckpt:
        assert {float(ckpt[name].read()[0, 0]) for name in ckpt} > {101.0}
        (note,) = ckpt.notes
    assert note.startswith(f"{files[1]}: written 596 s after .metadata: a save over this")
    report = ckptmap.convert(tmp_path / "run", tmp_path / "out.pt", to="full")
    assert note in report.notes


@pytest.mark.parametrize("first", [0, 2, 4])
def test_a_copy_without_its_times_is_no_half_save(first: int, tmp_path: Path) -> None:
    """A copy writes one file after the other, `.metadata` anywhere among them."""
    names = [file.name for file in saved(tmp_path / "run", 1.0)]
    names.insert(first, ".metadata")
    dated(tmp_path / "run", 1e9, 100, names)
    assert not ckptmap.open(tmp_path / "run").notes


def test_items_of_another_size_name_the_cause(tmp_path: Path) -> None:
    files = [file.name for file in saved(tmp_path / "run", 1.0)]
    saved(tmp_path / "next", 100.0, rows=500)
    shutil.copy(tmp_path / "next" / files[1], tmp_path / "run" / files[1])
    ckpt = ckptmap.open(tmp_path / "run")
    with ckpt, pytest.raises(SourceError, match=r"item 'w\d' at byte 0") as caught:
        [ckpt[name].read() for name in ckpt]
    assert "a save into this directory" in caught.value.hint
    assert caught.value.hint.endswith("or use an earlier checkpoint")
