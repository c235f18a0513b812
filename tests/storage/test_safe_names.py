"""Names that a file gives stay inside the directory, and an index of 100,000 names costs two calls each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptmap.errors import SourceError
from ckptmap.storage.safe_names import inside

OUT = {
    "a link out": "out", "a folder that leads out": "away/w", "a link to a link out": "twice", "up": "../w",
    "absolute": "/etc/passwd", "of Windows": "..\\w", "empty": "", "NUL": "a\0b", "half a character": "\ud800",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "link" / "model"
    (tmp_path / "real" / "model" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    for name in ("w", "sub/w", "../w"):
        (model / name).write_bytes(b"x")
    for name, target in {"out": "../w", "away": "..", "twice": "out", "in": "sub/w"}.items():
        (model / name).symlink_to(target)
    return model


@pytest.mark.parametrize("name", ["w", "sub/w", "in", "no/such", "a" * 1000])
def test_names_inside(name: str, folder: Path) -> None:
    assert inside(str(folder), name, "x") == str(folder / name)


@pytest.mark.parametrize("name", OUT)
def test_names_that_lead_out(name: str, folder: Path) -> None:
    with pytest.raises(SourceError, match="leads out of the directory") as told:
        inside(str(folder), OUT[name], "x")
    assert told.value.code == "CKM116"


def test_a_plain_name_asks_the_file_system_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    lstat = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: (asked.append(path), lstat(path))[1])
    inside(str(folder), "w", "x")
    assert len(asked) == 1
