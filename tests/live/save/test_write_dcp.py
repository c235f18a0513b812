"""Copies of values on devices: which of them a save waits for, and when."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptmap
from ckptmap.errors import RunError
from ckptmap.live.save import staged_values, write_dcp
from ckptmap.live.save.staged_values import snapshot
from ckptmap.storage import own_files, pinned_memory
from ckptmap.tensors import Box
from ckptmap.tensors import Path as StatePath
from tests.support.examples import examples
from tests.support.resume_model import net
from tests.support.stand_in_device import DeviceModule, Event, install, on_device

Key = tuple[StatePath, Box]


def values(**by_name: torch.Tensor) -> dict[Key, torch.Tensor]:
    return {(("model", n), Box.whole(tuple(v.shape))): v for n, v in by_name.items()}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DeviceModule:
    module = DeviceModule()
    install(monkeypatch, module)
    monkeypatch.setattr(pinned_memory, "_refusals", ["said before"])
    return module


@pytest.mark.parametrize("background", [True, False])
def test_a_save_waits_for_the_copies_from_every_device(
    background: bool, device: DeviceModule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    threads = []
    write_file = write_dcp._write_file

    def spy(*given: object) -> write_dcp.WrittenFile:
        device.log.append(("write", ""))
        threads.append(threading.current_thread())
        return write_file(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(write_dcp, "_write_file", spy)
    extra = {
        "a": on_device(torch.arange(5), "cuda:0"),
        "b": on_device(torch.ones(3), "cuda:1"),
        "c": on_device(torch.zeros(2), "cuda:1"),
    }
    ckptmap.save(tmp_path / "out", net(0), extra=extra, background=background).wait()
    streams = ["stream of cuda:0", "stream of cuda:1"]
    recorded, waited = [[(what, s) for s in streams] for what in ("record", "wait")]
    assert device.log[:4] == recorded + waited
    assert device.log[4:] and all(what == "write" for what, _ in device.log[4:])
    assert all((one is threading.main_thread()) != background for one in threads)
    again = net(1)
    assert torch.equal(ckptmap.load(tmp_path / "out", again).extra["a"], torch.arange(5))


def test_a_save_in_the_background_waits_on_a_device_that_is_used(
    device: DeviceModule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its thread begins with device 0, and a wait there would take memory of it."""

    @contextmanager
    def on_used_device() -> Iterator[None]:
        device.log.append(("on", threading.current_thread().name))
        yield
        device.log.append(("off", ""))

    monkeypatch.setattr(staged_values, "on_used_device", on_used_device)
    extra = {"b": on_device(torch.ones(3), "cuda:3")}
    ckptmap.save(tmp_path / "out", net(0), extra=extra).wait()
    stream = "stream of cuda:3"
    assert device.log == [
        ("record", stream), ("on", "ckptmap-save"), ("wait", stream), ("off", ""),
    ]  # fmt: skip


def test_the_event_comes_after_the_last_copy_of_its_device(
    device: DeviceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    copy = torch.Tensor.copy_

    def spy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        device.log.append(("copy", str(src.device)))
        started.append(non_blocking)
        with torch._C.DisableTorchFunctionSubclass():
            return copy(self, src)

    monkeypatch.setattr(torch.Tensor, "copy_", spy)
    taken = snapshot(
        values(a=on_device(torch.ones(2), "xpu:1"), b=on_device(torch.ones(2), "xpu:0"),
               c=on_device(torch.ones(2), "xpu:1")), copied=True,
    )  # fmt: skip
    assert device.log == [
        ("copy", "xpu:1"), ("copy", "xpu:0"), ("copy", "xpu:1"),
        ("record", "stream of xpu:1"), ("record", "stream of xpu:0"),
    ]  # fmt: skip
    assert started == [True] * 3 and len(taken.copies) == 2


def watched(monkeypatch: pytest.MonkeyPatch, fits: int) -> list[tuple[int, ...]]:
    """Let copies run out of memory that must bring more than `fits` elements in order first; return the
    shapes that were copied. No copy may be of a conjugate or negative view: torch changes the signs of
    the host's memory at once, while the copy goes on."""
    copied: list[tuple[int, ...]] = []
    copy = torch.Tensor.copy_

    def copy_(here: torch.Tensor, live: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert not (non_blocking and (live.is_conj() or live.is_neg()))
        if not live.is_contiguous() and live.numel() > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        copied.append(tuple(live.shape))
        return copy(here, live.as_subclass(torch.Tensor))

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return copied


def test_a_view_has_its_own_signs_before_it_is_copied(
    device: DeviceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    views = {
        "conj": whole.conj(),
        "neg": torch._neg_view(torch.arange(3.0)),
        "both": whole.conj().imag,
    }
    assert views["conj"].is_conj() and views["neg"].is_neg() and views["both"].is_neg()
    watched(monkeypatch, 100)
    taken = snapshot(values(**{k: on_device(v, "cuda:0") for k, v in views.items()}), copied=True)
    for (path, _), found in taken.values.items():
        wanted = views[str(path[1])].resolve_conj().resolve_neg()
        assert not (found.is_conj() or found.is_neg()) and torch.equal(found, wanted)


def test_a_tensor_that_is_brought_in_order_by_halves(
    device: DeviceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    device.empty_cache = lambda: emptied.append(1)  # type: ignore[attr-defined]
    live = torch.arange(7 * 10).view(10, 7).t()
    copied = watched(monkeypatch, 20)
    taken = snapshot(
        values(a=on_device(live, "cuda:0"), b=on_device(live.t(), "cuda:0")), copied=True
    )
    assert copied == [(1, 10), (2, 10), (2, 10), (2, 10), (10, 7)] and len(emptied) == 3
    first, second = taken.values.values()
    assert torch.equal(first, live) and torch.equal(second, live.t())


def test_a_row_that_does_not_fit_is_an_error(
    device: DeviceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(monkeypatch, 3)
    with pytest.raises(
        RunError, match=r"^cuda:0 ran out of memory while \[1, 10\] torch.int64"
    ) as caught:
        snapshot(values(a=on_device(torch.arange(70).view(10, 7).t(), "cuda:0")), copied=True)
    assert caught.value.code == "CKM313" and "contiguous" in caught.value.hint


def test_a_device_without_events_is_copied_from_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, DeviceModule(has_events=False))
    taken = snapshot(values(a=on_device(torch.arange(4), "mps:0")), copied=False)
    assert taken.copies == []
    assert [copy.tolist() for copy in taken.values.values()] == [[0, 1, 2, 3]]
    assert all(type(copy) is torch.Tensor for copy in taken.values.values())


def test_the_cpu_is_waited_for_by_nobody() -> None:
    live = torch.arange(4)
    taken = snapshot(values(a=live), copied=True)
    live.zero_()
    assert taken.copies == []
    assert [copy.tolist() for copy in taken.values.values()] == [[0, 1, 2, 3]]
    (kept,) = snapshot(values(a=live), copied=False).values.values()
    assert kept.data_ptr() == live.data_ptr()


def test_a_copy_that_fails_is_an_error_of_the_save(
    device: DeviceModule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lost(event: Event) -> None:
        raise RunError("CKM306", "the device is lost")

    monkeypatch.setattr(Event, "synchronize", lost)
    extra = {"a": on_device(torch.arange(5), "cuda:0")}
    handle = ckptmap.save(tmp_path / "out", net(0), extra=extra)
    with pytest.raises(RunError, match="the device is lost"):
        handle.wait()
    assert not (tmp_path / "out").exists()


def test_memory_that_cannot_be_pinned_is_pageable_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned_memory, "_refusals", [])
    empty = torch.empty

    def refuse(*shape: object, pin_memory: bool = False, **how: object) -> torch.Tensor:
        if pin_memory:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return empty(*shape, **how)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.warns(RuntimeWarning, match=r"24 B of host memory could not be pinned") as seen:
        first = pinned_memory.host_memory((2, 3), torch.float32)
        second = pinned_memory.host_memory((2, 3), torch.float32)
    assert len(seen) == 1
    assert first.shape == second.shape == (2, 3) and first.device.type == "cpu"


# ------------------------------------------------------------------------------- pinned memory


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each allocation of pinned memory."""
    taken: list[int] = []

    def host_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        taken.append(math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(pinned_memory, "host_memory", host_memory)
    monkeypatch.setattr(pinned_memory, "_kept", {})
    return taken


def test_a_save_pins_memory_once_and_the_next_one_none(
    device: DeviceModule, pinned: list[int], tmp_path: Path
) -> None:
    for turn in range(3):
        extra = {
            name: on_device(torch.full((1000,), turn, dtype=torch.int16), f"cuda:{i % 2}")
            for i, name in enumerate("abcdefgh")
        }
        extra |= {
            "none": on_device(torch.zeros(0), "cuda:0"),
            "one": on_device(torch.tensor(True), "cuda:1"),
        }
        ckptmap.save(tmp_path / f"out{turn}", net(0), extra=extra).wait()
        loaded = ckptmap.load(tmp_path / f"out{turn}", net(1)).extra
        assert all(loaded[name].tolist() == [turn] * 1000 for name in "abcdefgh")
        assert loaded["one"].item() is True and loaded["none"].shape == (0,)
    assert len(pinned) <= 3 and all(nbytes.bit_count() == 1 for nbytes in pinned)


def test_memory_of_a_save_that_is_being_written_is_not_used_again(
    device: DeviceModule, pinned: list[int]
) -> None:
    first = snapshot(values(a=on_device(torch.ones(4), "cuda:0")), copied=True)
    other = snapshot(values(a=on_device(torch.zeros(4), "cuda:0")), copied=True)
    assert [copy.tolist() for copy in first.values.values()] == [[1.0] * 4] and len(pinned) == 2
    first.release()
    again = snapshot(values(a=on_device(torch.full((4,), 2.0), "cuda:0")), copied=True)
    assert len(pinned) == 2 and [copy.tolist() for copy in other.values.values()] == [[0.0] * 4]
    again.release()
    snapshot(values(a=torch.ones(4)), copied=True).release()
    larger = snapshot(values(a=on_device(torch.ones(64), "cuda:0")), copied=True)
    assert pinned == [64, 64, 256] and larger.slabs is not None


def test_a_save_in_the_background_copies_into_the_memory_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned_memory, "_kept", {})
    live = torch.ones(3, 5).t()
    first = snapshot(values(a=live, b=torch.zeros(0), c=torch.tensor(True)), copied=True)
    live.zero_()
    copies = list(first.values.values())
    assert copies[0].is_contiguous() and torch.equal(copies[0], torch.ones(5, 3))
    assert copies[1].shape == (0,) and copies[2].item() is True
    first.release()
    again = snapshot(values(a=live, b=torch.zeros(0), c=torch.tensor(False)), copied=True)
    assert next(iter(again.values.values())).data_ptr() == copies[0].data_ptr()
    while_training_waits = snapshot(values(a=live.t()), copied=False)
    assert next(iter(while_training_waits.values.values())).data_ptr() == live.data_ptr()


def test_a_manifest_that_cannot_be_written_is_an_error_of_the_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(path: Path, pieces: object) -> None:
        if path.name == "ckptmap.manifest.json":
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        own_files.write_new(path, [])

    monkeypatch.setattr("ckptmap.live.save.write_dcp.write_new", fails)
    with pytest.raises(RunError, match=r"manifest.json: write failed: Stale file handle") as caught:
        ckptmap.save(tmp_path / "out", net(0), background=False)
    assert caught.value.hint.startswith("check the disk and the permissions")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("number", "code", "hint"),
    [
        (errno.ENOSPC, "CKM306", "free some space and save again"),
        (
            errno.ENOENT,
            "CKM306",
            "its directory was removed or renamed while it was written: save again",
        ),
        (
            errno.EFBIG,
            "CKM313",
            "raise the limit of a file's size (ulimit -f), or choose a filesystem",
        ),
        (errno.ENOMEM, "CKM313", "free some memory, or raise the limit (ulimit -v, a container's)"),
    ],
)
def test_a_failed_write_says_what_to_do_about_it(
    number: int, code: str, hint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ckptmap.live.save.write_dcp._write_all", fails)
    with pytest.raises(RunError, match="write failed: ") as caught:
        ckptmap.save(tmp_path / "out", net(0), background=False)
    assert caught.value.code == code and caught.value.hint.startswith(hint)
    assert "shard" not in caught.value.hint and "threads" not in caught.value.hint
    assert not list(tmp_path.iterdir())


@given(sizes=st.lists(st.integers(0, 5000), max_size=30))
@examples(200)
def test_slabs_hold_every_tensor_apart_in_powers_of_two(sizes: list[int]) -> None:
    slabs, where = pinned_memory.slab_layout(sizes)
    assert all(nbytes.bit_count() == 1 for nbytes in slabs)
    ends = [0] * len(slabs)
    for (slab, offset), nbytes in sorted(zip(where, sizes, strict=True)):
        assert offset % 64 == 0 and ends[slab] <= offset and offset + nbytes <= slabs[slab]
        ends[slab] = offset + nbytes
    each = sum(1 << max(n - 1, 63).bit_length() for n in sizes)  # an allocation for each tensor
    assert sum(slabs) <= each
