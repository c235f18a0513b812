"""Pinned memory for the first save of a model on a device is made before it, in a thread. The CPU pretends to be the
device, and plain memory to be pinned."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.live.save import reserve as reserve_module
from ckptmap.live.save import staged_values
from ckptmap.live.save.reserve import SaveMemory, reserve
from ckptmap.storage import pinned_memory
from tests.live.save.test_reserve import joined, stepped
from tests.support.stand_in_device import DeviceModule, install


class Made:
    """The pinned memory that is made: (bytes, thread, threads that touch it), and how often CUDA is asked."""

    def __init__(self) -> None:
        self.slabs: list[tuple[int, str, int | None]] = []
        self.refuses_after: int | None = None
        self.refusals = 0

    def registered(self, nbytes: int, most_threads: int | None = None) -> torch.Tensor | None:
        if self.refuses_after is not None and len(self.slabs) >= self.refuses_after:
            self.refusals += 1
            return None
        self.slabs.append((nbytes, threading.current_thread().name, most_threads))
        return torch.full((nbytes,), 255, dtype=torch.uint8)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    found = Made()
    install(monkeypatch, DeviceModule())
    for module in (reserve_module, staged_values):
        monkeypatch.setattr(module, "is_copied_apart", lambda device: True)
    monkeypatch.setattr(pinned_memory, "registered_memory", found.registered)
    monkeypatch.setattr(pinned_memory, "_kept", {})
    monkeypatch.setattr(pinned_memory, "_refusals", ["said before"])
    monkeypatch.setattr(reserve_module, "_holders", type(reserve_module._holders)())
    yield found
    joined()


def nbytes_of(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("by", ["a step that is not due", "restore"])
def test_the_first_save_finds_its_memory_made_in_a_thread(
    by: str, made: Made, tmp_path: Path
) -> None:
    model, optimizer = stepped()
    root = tmp_path / "runs"
    if by == "restore":
        ckptmap.save(root / "step-0", model, optimizer, step=0, background=False)
    pinned_memory._kept.clear()
    made.slabs.clear()
    with ckptmap.CheckpointManager(root, every=3) as manager:
        if by == "restore":
            manager.restore(model, optimizer)
        else:
            assert manager.save(1, model, optimizer) is None
        joined()
        ahead = list(made.slabs)
        assert {name for _, name, _ in ahead} == {pinned_memory.PINNED}
        assert {threads for *_, threads in ahead} == {pinned_memory.AHEAD_THREADS}
        assert sum(nbytes for nbytes, *_ in ahead) >= 3 * nbytes_of(model)
        assert manager.save(2, model, optimizer) is None
        for step in (3, 6):
            manager.save(step, model, optimizer)
            manager.wait()
        beside = sum(nbytes for nbytes, *_ in made.slabs) - sum(nbytes for nbytes, *_ in ahead)
        assert beside <= 1 << 20, "none for weights and moments, and none for the second save"
        assert pinned_memory._kept[True], "it is kept from save to save"
    assert True not in pinned_memory._kept, "and given back when the manager is closed"
    again, other = stepped()
    report = ckptmap.CheckpointManager(root).restore(again, other, exact=True)
    assert report is not None and report.step == 6
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[one][name], other.state[two][name])


def test_a_save_that_comes_early_waits_for_the_thread(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, optimizer = stepped()
    begun, go_on, own = threading.Event(), threading.Event(), made.registered

    def slow(nbytes: int, most_threads: int | None = None) -> torch.Tensor | None:
        begun.set()
        if threading.current_thread().name == pinned_memory.PINNED:
            assert go_on.wait(60)
        return own(nbytes, most_threads)

    monkeypatch.setattr(pinned_memory, "registered_memory", slow)
    with ckptmap.CheckpointManager(tmp_path, every=2) as manager:
        manager.save(1, model, optimizer)
        assert begun.wait(60) and not made.slabs, "training goes on meanwhile"
        threading.Timer(0.2, go_on.set).start()
        manager.save(2, model, optimizer)
    assert sum(nbytes for nbytes, *_ in made.slabs) < 8 * nbytes_of(model), "it was made once"


@pytest.mark.parametrize("after", [0, 1])
def test_what_is_refused_ahead_is_asked_for_by_the_save(
    after: int, made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is kept of what was made before the refusal, and nobody is warned."""
    model, optimizer = stepped()
    monkeypatch.setattr(pinned_memory, "slab_layout", two_slabs(pinned_memory.slab_layout))
    with ckptmap.CheckpointManager(tmp_path, every=2) as manager:
        made.refuses_after = after
        manager.save(1, model, optimizer)
        joined()
        assert True not in pinned_memory._kept and made.refusals == 1
        made.refuses_after = None
        made.slabs.clear()
        manager.save(2, model, optimizer)
        manager.wait()
        assert {name for _, name, _ in made.slabs} == {threading.main_thread().name}
    again, other = stepped()
    assert ckptmap.CheckpointManager(tmp_path).restore(again, other, exact=True) is not None


def two_slabs(layout: Any) -> Any:
    """Cut the slabs in two where there is one: this build of torch pins no memory, so that what is refused shows."""

    def halves(sizes: Any) -> Any:
        wanted, where = layout(sizes)
        return ([wanted[0], 64], where) if len(wanted) == 1 else (wanted, where)

    return halves


def test_no_more_than_a_share_of_what_is_left_is_made_ahead(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, optimizer = stepped()
    needed = sum(pinned_memory.slab_layout([3 * nbytes_of(model)])[0])
    left, limit = tmp_path / "meminfo", tmp_path / "limit"
    monkeypatch.setattr(pinned_memory, "_MEMORY", left)
    monkeypatch.setattr(pinned_memory, "_LIMIT", limit)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def made_with(available: int, allowed: str | None) -> bool:
        left.write_text(f"MemTotal: 1 kB\nMemAvailable:  {available // 1024} kB\n")
        limit.unlink(missing_ok=True)
        if allowed is not None:
            limit.write_text(allowed)
        made.slabs.clear()
        pinned_memory._kept.clear()
        reserve(optimizer)
        joined()
        return bool(made.slabs)

    assert made_with(16 * needed, None) and made_with(16 * needed, "max\n")
    assert not made_with(2 * needed, None), "half of it is another process's, and half is kept free"
    assert not made_with(16 * needed, f"{needed}\n")
    left.unlink()
    made.slabs.clear()
    reserve(optimizer)
    joined()
    assert not made.slabs


@pytest.mark.parametrize("several", [False, True])
def test_frozen_weights_on_a_device_have_their_place_too(
    several: bool, made: Made, tmp_path: Path
) -> None:
    """A base under an adapter is most of what such a save writes."""
    trained, optimizer = stepped()
    base = torch.nn.Linear(1024, 512).requires_grad_(False)
    base.register_buffer("seen", torch.ones(64))
    model: Any = {"a": trained, "b": base} if several else torch.nn.Sequential(trained, base)
    optimizers: Any = {"a": optimizer} if several else optimizer
    with ckptmap.CheckpointManager(tmp_path, every=2) as manager:
        manager.save(1, model, optimizers)
        joined()
        ahead = len(made.slabs)
        assert sum(nbytes for nbytes, *_ in made.slabs) >= 3 * nbytes_of(trained) + nbytes_of(base)
        manager.save(2, model, optimizers)
        manager.wait()
        assert sum(nbytes for nbytes, *_ in made.slabs[ahead:]) <= 1 << 20


def test_memory_is_given_back_with_the_last_manager(made: Made, tmp_path: Path) -> None:
    _, optimizer = stepped()
    one, two, unused = SaveMemory(), SaveMemory(), SaveMemory()
    one.reserve(optimizer)
    two.hold()
    joined()
    unused.give_back()
    one.give_back()
    one.give_back()
    assert pinned_memory._kept[True]
    two.give_back()
    assert True not in pinned_memory._kept
    one.reserve(optimizer)
    two.hold()
    del two  # a manager that nobody closes
    gc.collect()
    one.give_back()
    assert True not in pinned_memory._kept and not pinned_memory._reserving


def test_a_thread_that_is_making_memory_is_waited_for_at_the_close(
    made: Made, tmp_path: Path
) -> None:
    model, optimizer = stepped()
    with ckptmap.CheckpointManager(tmp_path, every=2) as manager:
        manager.save(1, model, optimizer)
    assert made.slabs and True not in pinned_memory._kept and not pinned_memory._reserving
