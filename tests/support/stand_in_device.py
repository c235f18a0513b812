"""A stand-in for a device: tensors that say they are on it, and its module in torch, which records calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on another device."""

    where = torch.device("cpu")  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A view of a tensor of a device is on it, too."""
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, OnDevice) and args and isinstance(args[0], OnDevice):
            made.where = args[0].where
        return made


def on_device(values: torch.Tensor, where: torch.device | str) -> OnDevice:
    """Return the values as a tensor that says it is on a device."""
    made = values.as_subclass(OnDevice)
    made.where = torch.device(where)
    return made


class Event:
    """An event of the stand-in: what it was recorded on, and when it was waited for."""

    def __init__(self, log: list[tuple[str, str]]) -> None:
        self._log, self._stream = log, ""

    def record(self, stream: str) -> None:
        self._stream = stream
        self._log.append(("record", stream))

    def synchronize(self) -> None:
        self._log.append(("wait", self._stream))


class DeviceModule:
    """What `torch.get_device_module` returns for the stand-in."""

    def __init__(self, count: int = 2, current: int = 0, has_events: bool = True) -> None:
        self.log: list[tuple[str, str]] = []
        self._count, self._current = count, current
        if has_events:
            self.Event: Callable[[], Event] = lambda: Event(self.log)
            self.current_stream: Callable[[Any], str] = lambda device: f"stream of {device}"

    def current_device(self) -> int:
        return self._current

    def device_count(self) -> int:
        return self._count

    def is_available(self) -> bool:
        return self._count > 0


def install(monkeypatch: pytest.MonkeyPatch, module: DeviceModule) -> None:
    """Make torch return the stand-in as the module of every device."""
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
