"""How much memory of the device, and how much pinned memory, a block of code held at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.gpu_session.session import StepRun


@contextmanager
def peaks(step: StepRun, what: str) -> Iterator[None]:
    """Report the most that torch's allocators had handed out in the block, beyond what they had before it.

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


def active_pinned(which: str) -> int:
    """Return the bytes of pinned memory that are in use ("current"), or were at most ("peak").

    Pinned blocks have 2^n bytes, and count as such.
    """
    import torch

    return int(torch.cuda.host_memory_stats().get(f"active_bytes.{which}", 0))
