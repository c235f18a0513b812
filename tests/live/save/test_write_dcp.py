"""Copies of values on devices: which of them a save waits for, and when."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import ckptmap
from ckptmap.errors import RunError
from ckptmap.live.save import write_dcp
from ckptmap.live.save.write_dcp import snapshot
from ckptmap.storage import pinned_memory
from ckptmap.tensors import Box
from ckptmap.tensors import Path as StatePath
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
    with pytest.warns(RuntimeWarning, match=r"24 bytes of host memory could not be pinned") as seen:
        first = pinned_memory.host_memory((2, 3), torch.float32)
        second = pinned_memory.host_memory((2, 3), torch.float32)
    assert len(seen) == 1
    assert first.shape == second.shape == (2, 3) and first.device.type == "cpu"
