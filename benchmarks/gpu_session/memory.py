"""How much memory of the device, and how much pinned memory, a block of code held at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.gpu_session.session import StepRun


@contextmanager
def peaks(step: StepRun, what: str, most_pinned: int | None = None) -> Iterator[None]:
    """Report the most that torch's allocators had handed out in the block, beyond what they had before it.

    most_pinned  bytes of pinned memory that it may take; None: any

    Nothing where the device is not a GPU.
    """
    if not step.on_cuda:
        yield
        return
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_peak_host_memory_stats()
    device, pinned = torch.cuda.memory_allocated(), active_pinned("current")
    yield
    torch.cuda.synchronize()
    device, pinned = torch.cuda.max_memory_allocated() - device, active_pinned("peak") - pinned
    step.result.figure(f"{what}: device memory at most", device / 2**20, "MiB")
    step.result.figure(f"{what}: pinned memory at most", pinned / 2**20, "MiB")
    if most_pinned is not None:
        within = f"at most {most_pinned >> 20} MiB, found {pinned / 2**20:.0f}"
        step.result.check(f"{what}: pinned memory within max_memory", pinned <= most_pinned, within)


def active_pinned(which: str) -> int:
    """Return the bytes of pinned memory that are in use ("current"), or were at most ("peak").

    Pinned blocks have 2^n bytes, and count as such. Before it had names of its own for blocks that are
    kept for later, torch called the bytes in use "allocated".
    """
    import torch

    found = torch.cuda.host_memory_stats()
    return int(found.get(f"active_bytes.{which}", found.get(f"allocated_bytes.{which}", 0)))
