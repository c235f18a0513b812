"""Garbage collection pauses in a block, and what a caller froze stays frozen and uncounted."""

from __future__ import annotations

import gc

import pytest

from ckptmap.core.gc_pause import MANY, paused_gc


def test_collection_is_off_in_the_block_alone() -> None:
    with paused_gc():
        assert not gc.isenabled()
        with paused_gc():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_many_objects_move_to_the_oldest_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    moved: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: moved.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: moved.append("unfreeze"))
    with paused_gc():
        kept = [[number] for number in range(2 * MANY)]
    assert moved == ["freeze", "unfreeze"] and len(kept) == 2 * MANY


def test_after_few_objects_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count takes 35 ms where torch and transformers are frozen, at every file that is opened."""
    monkeypatch.setattr(
        gc, "get_freeze_count", lambda: pytest.fail("all frozen objects are walked")
    )
    threshold = gc.get_threshold()
    gc.set_threshold(10 * MANY)  # as the command line does: objects of before do not count either
    try:
        before = [[number] for number in range(2 * MANY)]
        with paused_gc():
            kept = [[number] for number in range(10)]
    finally:
        gc.set_threshold(*threshold)
    assert len(kept) == 10 and len(before) == 2 * MANY


def test_frozen_objects_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    monkeypatch.setattr(gc, "unfreeze", lambda: pytest.fail("unfreezes what a caller froze"))
    with paused_gc():
        kept = [[number] for number in range(2 * MANY)]
    assert len(kept) == 2 * MANY
