"""What a load can reach at most: threads that read files into pinned blocks and send these, and nothing else.

No plan, no checksums, no tensors to fill: each thread reads a block (preadv) while its other one is on its way to
the device. `load` works so, too, so what it takes longer is its own cost, and the rest is that of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.timing import clocked, host_buffer

THREADS, BLOCK = 16, 8 << 20
"""As many as `load` has with its default memory on a device, and blocks of the same size."""
DEPTH = 2


def bare_loop_s(
    files: Sequence[Path], device: str, threads: int = THREADS, block: int = BLOCK
) -> float:
    """Return the seconds that it takes to read files, each of them whole, and to send their bytes to the device."""
    from concurrent.futures import ThreadPoolExecutor

    with ExitStack() as closing:
        fds = [os.open(file, os.O_RDONLY) for file in files]
        for fd in fds:
            closing.callback(os.close, fd)
        spans = iter([span for fd in fds for span in _spans(fd, block)])
        pool = closing.enter_context(ThreadPoolExecutor(threads))
        lanes = [_Lane(device, block) for _ in range(threads)]

        def run() -> None:
            for done in [pool.submit(lane.run, spans) for lane in lanes]:
                done.result()

        return clocked(run, device)


def _spans(fd: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield (file, offset, bytes) of a file's blocks."""
    size = os.fstat(fd).st_size
    for start in range(0, size, block):
        yield fd, start, min(block, size - start)


class _Lane:
    """The blocks of one thread, their memory on the device, and its stream."""

    def __init__(self, device: str, block: int) -> None:
        import torch

        self.on_cuda = device.startswith("cuda")
        self.here = [host_buffer(block, self.on_cuda) for _ in range(DEPTH)]
        self.there = [torch.empty(block, dtype=torch.uint8, device=device) for _ in range(DEPTH)]
        self.stream = torch.cuda.Stream() if self.on_cuda else None
        self.ends: list[Any] = [None] * DEPTH

    def run(self, spans: Iterator[tuple[int, int, int]]) -> None:
        """Read and send blocks until there are no more; `next` of an iterator is safe between threads."""
        import torch

        with torch.cuda.stream(self.stream):
            for count, (fd, offset, nbytes) in enumerate(spans):
                turn = count % DEPTH
                if self.ends[turn] is not None:
                    self.ends[turn].synchronize()
                os.preadv(fd, [memoryview(self.here[turn].numpy())[:nbytes]], offset)
                self.there[turn].copy_(self.here[turn], non_blocking=True)
                if self.stream is not None:
                    self.ends[turn] = self.stream.record_event()
