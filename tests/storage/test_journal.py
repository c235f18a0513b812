"""A damaged line of a journal is a unit that was not written, never an error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import CkptmapError
from ckptmap.storage.journal import Journal, Written, _line, _line_end

A = "a" * 16
SLOTS = [Written(0, 1, "0123456789abcdef", 0xFFFFFFFF)]


def entries(path: Path) -> dict[str, object]:
    with Journal(path, A) as journal:
        return dict(journal.entries)


def sealed(body: str) -> str:
    """The line with a valid checksum, so that what it says is judged itself."""
    return body[:-1] + _line_end(body[:-1])


@pytest.mark.parametrize(
    "line",
    [
        '{"unit":"u","slots":[[0,1,"0123456789abcdef",4294967296]]}',
        '{"unit":"u","slots":[[0,1,"0123456789abcdef",-1]]}',
        '{"unit":"u","slots":[[0,1,"0123456789abcdef",1e400]]}',
        '{"unit":"u","slots":[[0,1e400,"0123456789abcdef",1]]}',
        '{"unit":"u","slots":[[0,1,"0123456789abcdef",' + "9" * 9000 + "]]}",
        '{"unit":"u","slots":[[0,true,"0123456789abcdef",1]]}',
        '{"unit":"u","slots":[[0,1,7,1]]}',
        '{"unit":"u","slots":[[0,1]]}',
        '{"unit":"u","slots":[7]}',
        '{"unit":"u","slots":7}',
        '{"unit":["u"],"slots":[]}',
        '{"slots":[]}',
        "[]",
        "7",
        "[" * 100_000 + "]",
    ],
)
def test_a_line_of_nonsense_is_a_unit_not_written(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, A).close()
    head = path.read_text()
    path.write_text(head + _line("before", SLOTS) + "\n" + sealed(line) + "\n")
    assert entries(path) == {"before": tuple(SLOTS)}


def test_what_any_rank_wrote_from_other_source_files_is_discarded(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for rank in range(2):
        with Journal(path, A, rank, "before") as journal:
            journal.add(f"unit-{rank}", SLOTS)
    with Journal(path, A, 0, "before") as journal:
        assert set(journal.entries) == {"unit-0", "unit-1"}
        assert not journal.begins_anew
    with Journal(path, A, 0, "after") as journal:
        assert not journal.entries
        assert journal.begins_anew
    with Journal(path, A, 0, "before") as journal:
        assert not journal.entries
        assert not journal.begins_anew  # nothing was kept that could be discarded


def test_every_changed_bit_of_a_line_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, A) as journal:
        journal.add("u", SLOTS)
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for bit in range(start * 8, len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert entries(path) in ({}, {"u": tuple(SLOTS)} if bit // 8 == len(whole) - 1 else {})
    path.write_bytes(whole)
    assert entries(path) == {"u": tuple(SLOTS)}


def test_a_run_continues_over_any_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CRC-32 in the journal goes into the zip: a changed digit there would damage the output."""
    from ckptmap.operations.workspace import Workspace

    source, dst = tmp_path / "src.safetensors", tmp_path / "out.pt"
    save_file({f"l.{i}.weight": torch.randn(300, 300) for i in range(8)}, source)
    publish, rng = Workspace.publish, random.Random(7)

    def stopped(self: Workspace) -> None:
        raise CkptmapError("CKM307", "stopped", "")

    for _ in range(12):
        monkeypatch.setattr(Workspace, "publish", stopped)
        with pytest.raises(CkptmapError, match="stopped"):
            ckptmap.convert(source, dst, to="full")
        (path,) = tmp_path.glob(".out.pt.ckptmap-*/journal.jsonl")
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data))
        data[at] = rng.choice(b"0123456789\n{}[]\xff\0")
        path.write_bytes(data)
    monkeypatch.setattr(Workspace, "publish", publish)
    ckptmap.convert(source, dst, to="full")
    assert ckptmap.verify(dst, against=source).ok
    assert torch.load(dst, weights_only=True).keys() == {f"l.{i}.weight" for i in range(8)}
