"""Memory for the first save is made before it, in a thread, and used for whatever fits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ckptmap
from ckptmap.live.save.reserve import reserve
from ckptmap.storage import pinned_memory
from ckptmap.storage.pinned_memory import Slabs
from tests.support.examples import examples


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of each slab of pageable memory that is made."""
    found: list[int] = []
    own = pinned_memory._pageable

    def pageable(nbytes: int) -> torch.Tensor:
        found.append(nbytes)
        return own(nbytes)

    monkeypatch.setattr(pinned_memory, "_pageable", pageable)
    monkeypatch.setattr(pinned_memory, "_kept", {})
    yield found
    joined()


def joined() -> None:
    while pinned_memory._reserving:
        pinned_memory._reserving.pop().join()


def stepped() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(256, 300), nn.Linear(300, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("by", ["a step that is not due", "restore"])
def test_the_first_save_of_a_manager_makes_no_memory(
    by: str, made: list[int], tmp_path: Path
) -> None:
    model, optimizer = stepped()
    ckptmap.save(tmp_path / "runs/step-0", model, optimizer, step=0, background=False)
    with ckptmap.CheckpointManager(tmp_path / "runs", every=3) as manager:
        assert not made
        if by == "restore":
            manager.restore(model, optimizer)
        else:
            assert manager.save(1, model, optimizer) is None
        joined()
        before = list(made)
        assert sum(before) > 3 * sum(p.nbytes for p in model.parameters())
        assert manager.save(2, model, optimizer) is None
        for step in (3, 6):
            manager.save(step, model, optimizer)
            manager.wait()
    assert made == before
    again, other = stepped()
    assert manager.restore(again, other, exact=True) is not None
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("manager", "save"),
    [({"background": False}, {}), ({}, {"only": "trainable"})],
    ids=["nothing is copied", "a part is saved"],
)
def test_no_memory_is_made_in_vain(
    manager: dict[str, Any], save: dict[str, Any], made: list[int], tmp_path: Path
) -> None:
    model, optimizer = stepped()
    with ckptmap.CheckpointManager(tmp_path, every=2, **manager) as one:
        one.save(1, model, optimizer, **save)
    joined()
    assert not made


def test_what_has_no_state_yet_and_other_kinds_of_values(made: list[int]) -> None:
    """An optimizer before its first step, one without tensors, none at all, a wrapped one."""
    model, optimizer = stepped()
    reserve(None)
    reserve(torch.optim.SGD(model.parameters(), lr=0.1))
    joined()
    assert sum(made) < 2 * (sum(p.nbytes for p in model.parameters()) + (1 << 20))
    pinned_memory._kept.clear()
    made.clear()
    reserve({"a": optimizer})
    joined()
    assert sum(made) > 3 * sum(p.nbytes for p in model.parameters())


@given(
    first=st.lists(st.integers(0, 5000), max_size=12),
    second=st.lists(st.integers(0, 5000), max_size=12),
)
@examples(100)
def test_other_sizes_take_what_fits(first: list[int], second: list[int]) -> None:
    """Places never overlap, and what is kept grows to no more than 1.5 times of what is needed."""
    pinned_memory._kept.clear()
    one = Slabs.take(first, pinned=False)
    one.give_back()
    other = Slabs.take(second, pinned=False)
    places = [other.place(number) for number in range(len(second))]
    assert [place.numel() for place in places] == second
    for number, place in enumerate(places):
        place.fill_(number)
    assert all(bool((place == number).all()) for number, place in enumerate(places))
    assert all(place.data_ptr() % 64 == 0 for place in places if place.numel())
    wanted = sum(pinned_memory.slab_layout(second)[0])
    assert sum(slab.numel() for slab in other.slabs) <= 1.5 * wanted
    pinned_memory._kept.clear()


def test_where_no_thread_can_be_started_the_save_makes_its_memory(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that had not begun was waited for: each later save raised RuntimeError."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        pinned_memory.reserve_pageable([1 << 12])
        pinned_memory.reserve_pinned([1 << 12])
    assert not pinned_memory._reserving
    assert Slabs.take([1 << 12], pinned=False).place(0).numel() == 1 << 12


def test_several_wait_for_the_same_threads() -> None:
    """`while threads: threads.pop()` raised IndexError for one, or let it go on before the thread had ended."""
    go_on, early = threading.Event(), list[str]()
    slow = threading.Thread(target=go_on.wait, args=(20,))
    slow.start()
    threads = [slow]

    def wait() -> None:
        pinned_memory.wait_for(threads)
        early.extend(["early"] if slow.is_alive() else [])

    waiting = [threading.Thread(target=wait) for _ in range(4)]
    for one in waiting:
        one.start()
    go_on.set()
    for one in waiting:
        one.join(20)
        assert not one.is_alive()
    assert threads == [] and early == []
