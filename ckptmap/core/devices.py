"""Devices: the index that a name without one stands for, the device in use, and the caller's default."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def indexed(device: str, local_rank: int | None = None) -> str:
    """Return the name of a device with its index: `cuda` -> `cuda:1`.

    A name without an index means the current device of the calling thread, and every new thread begins
    with device 0. So the main thread calls this before threads are given the name. With `local_rank` it is
    the device of that rank on this machine, modulo the number of devices.

    A name that has an index, that of the CPU, and one that cannot be used here are returned as they are.
    """
    if device == "cpu":
        return device
    import torch

    try:
        named = torch.device(device)
        module = torch.get_device_module(named)
    except RuntimeError:  # no device of torch, or one without a module: "meta"
        return device
    if ":" in device or not hasattr(module, "current_device"):
        return device
    if not module.is_available():
        return device
    if local_rank is None:
        return f"{named.type}:{module.current_device()}"
    return f"{named.type}:{local_rank % max(1, module.device_count())}"


def current_device() -> str:
    """Return the name of the accelerator that this thread uses, with its index; `cpu` where there is none.

    This begins to use the accelerator, if nothing has.
    """
    import torch

    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else indexed(found.type)


@contextmanager
def tensors_on_cpu() -> Iterator[None]:
    """Make tensors on the CPU where nothing else is said, while the context, or the function that this
    decorates, lasts.

    A caller may have `torch.set_default_device("cuda")`. Torch is not imported for it.
    """
    torch = sys.modules.get("torch")
    get_default = getattr(torch, "get_default_device", None)  # absent while torch is being imported
    if torch is None or get_default is None or get_default().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield
