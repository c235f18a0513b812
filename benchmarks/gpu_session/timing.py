"""Seconds of a call on a device, rates of copies, and seeded values."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def synchronize(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def clocked(run: Callable[[], Any], device: str = "cpu") -> float:
    """Return the seconds of one call, until the device has done its work."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def timed(run: Callable[[], Any], rounds: int, device: str) -> float:
    """Return the median seconds of a call after a first one, by CUDA events or the clock."""
    import torch

    run()
    if not device.startswith("cuda"):
        return statistics.median(clocked(run) for _ in range(rounds))
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def host_buffer(nbytes: int, pinned: bool) -> Any:
    """Return bytes of host memory whose pages exist."""
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).fill_(1)


def link_s_per_byte(device: str, nbytes: int, *, pinned: bool = True, up: bool = True) -> float:
    """Return the seconds that one byte takes between host memory and the device; `up`: to it."""
    import torch

    here = host_buffer(nbytes, pinned and device.startswith("cuda"))
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    source, target = (here, there) if up else (there, here)
    return timed(lambda: target.copy_(source, non_blocking=True), 5, device) / nbytes


def weight(side: int, dtype: str, seed: int = 1) -> Any:
    """Return a matrix of values as weights have them, on the CPU."""
    import torch

    maker = torch.Generator().manual_seed(seed)
    return torch.randn(side, side, generator=maker).mul_(0.02).to(getattr(torch, dtype))


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two tensors on any devices have the same bytes."""
    import torch

    # A copy: the strides of a tensor of one element, or none, may be any numbers.
    as_it_lies = {"memory_format": torch.contiguous_format}
    plain = [t.detach().resolve_conj().resolve_neg().cpu().clone(**as_it_lies) for t in (a, b)]
    one, two = (t.reshape(-1).view(torch.uint8) for t in plain)
    return bool(torch.equal(one, two))
