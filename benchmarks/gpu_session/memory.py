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

    from ckptmap.storage.registered_memory import COUNT

    torch.cuda.synchronize()
    give_back_pinned()
    COUNT.most = COUNT.now
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_peak_host_memory_stats()
    device, held = torch.cuda.memory_allocated(), pinned("current")
    yield
    torch.cuda.synchronize()
    device, most = torch.cuda.max_memory_allocated() - device, pinned("peak") - held
    step.result.figure(f"{what}: device memory at most", device / 2**20, "MiB")
    step.result.figure(f"{what}: pinned memory at most", most / 2**20, "MiB")
    if most_pinned is not None:
        within = f"at most {most_pinned >> 20} MiB, found {most / 2**20:.0f}"
        step.result.check(f"{what}: pinned memory within max_memory", most <= most_pinned, within)


def pinned(which: str) -> int:
    """Return the bytes of pinned memory that torch and ckptmap have now ("current"), or had at most ("peak"),
    those included that torch keeps for later.

    Pinned blocks have 2^n bytes, and count as such. The bytes in use ("active_bytes") are no measure: in torch
    2.11 they count each block that is used again once more.
    """
    import torch

    from ckptmap.storage.registered_memory import COUNT

    ours = COUNT.now if which == "current" else COUNT.most
    return ours + int(torch.cuda.host_memory_stats().get(f"allocated_bytes.{which}", 0))


def give_back_pinned() -> None:
    """Let torch give the pinned memory back that it keeps for later."""
    import torch

    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
