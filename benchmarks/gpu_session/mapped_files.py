"""Send files to a device from the page cache itself: their pages are mapped, registered with CUDA and copied from.

No byte is copied by the CPU. What it costs is to register pages and to let them go; a checksum would read them there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.timing import clocked

READ_ONLY, PORTABLE = 8, 1
"""Flags of cudaHostRegister."""


def mapped_s(files: Sequence[Path], device: str, threads: int, nbytes: int) -> float:
    """Return the seconds in which threads register `nbytes` at a time, send them, and let them go."""
    from concurrent.futures import ThreadPoolExecutor

    with ExitStack() as closing:
        spans = iter([span for file in files for span in _spans(file, nbytes)])
        pool = closing.enter_context(ThreadPoolExecutor(threads))

        def run() -> None:
            for done in [pool.submit(_send, spans, device, nbytes) for _ in range(threads)]:
                done.result()

        return clocked(run, device)


def _spans(file: Path, nbytes: int) -> Iterator[Any]:
    """Yield the pages of a file as tensors; the mapping lives as long as one of them."""
    import torch

    with file.open("r+b") as opened:
        size = os.fstat(opened.fileno()).st_size
        mapped = torch.frombuffer(mmap.mmap(opened.fileno(), size), dtype=torch.uint8)
    for start in range(0, size, nbytes):
        yield mapped[start : start + nbytes]


def _send(spans: Iterator[Any], device: str, nbytes: int) -> None:
    """Send spans until there are no more; `next` of a list's iterator is safe between threads."""
    import torch

    on_cuda = device.startswith("cuda")
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream() if on_cuda else None
    cudart: Any = torch.cuda.cudart() if on_cuda else None
    before: list[tuple[Any, Any]] = []

    def let_go() -> None:
        for span, end in before:
            end.synchronize()
            cudart.cudaHostUnregister(span.data_ptr())
        before.clear()

    with torch.cuda.stream(stream):
        for span in spans:
            if cudart is not None:
                error = int(cudart.cudaHostRegister(span.data_ptr(), span.numel(), READ_ONLY | PORTABLE))  # fmt: skip
                if error and (error := int(cudart.cudaHostRegister(span.data_ptr(), span.numel(), PORTABLE))):  # fmt: skip
                    raise RuntimeError(f"pages of a file: cudaHostRegister answers {error}")
            there[: span.numel()].copy_(span, non_blocking=True)
            if stream is not None:
                end = stream.record_event()
                let_go()  # the span before: its copy went on while this one was registered
                before.append((span, end))
        let_go()
