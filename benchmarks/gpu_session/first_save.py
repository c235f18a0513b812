"""The first saves of a CheckpointManager, with pinned memory made ahead, beside a first save that makes its own.

Training goes on while the memory is made: a step then is compared with one alone. A CUDA graph is captured meanwhile,
which a call of CUDA in another thread would end if it were made in the wrong mode.
"""

from __future__ import annotations

import mmap
import shutil
import threading
import time
from typing import Any

from benchmarks.gpu_session.models import copied, different, state_of, train
from benchmarks.gpu_session.save_load import trained, training_s
from benchmarks.gpu_session.session import StepRun
from benchmarks.gpu_session.timing import clocked, link_s_per_byte, synchronize

WIDTH, LAYERS = 8192, 8
"""2.1 GB of weights, 6.4 GB with both moments."""


def run(step: StepRun) -> None:
    import ckptmap
    from ckptmap.storage import pinned_memory

    width, layers = (64, 2) if step.is_tiny else (WIDTH, _fitting(step))
    down = link_s_per_byte(step.device, 1 << 16 if step.is_tiny else 1 << 30, up=False)
    model, optimizer, nbytes = trained(step, layers, width)
    plain_s = training_s(step, model, optimizer)
    with step.result.attempt("ways to make memory"):
        ways_to_make(step)
    if step.on_cuda:
        with step.result.attempt("a graph is captured while memory is made"):
            capture_while_made(step)
    with step.result.attempt("a save that makes its memory"):
        pinned_memory.give_back_pinned()
        handle = ckptmap.save(step.work / "plain", model, optimizer, step=1)
        _blocked(step, "a first save that makes its memory", handle.blocked_s, nbytes * down)
        handle.wait()
        pinned_memory.give_back_pinned()
        shutil.rmtree(step.work / "plain")
    with step.result.attempt("saves of a manager"):
        saves(step, model, optimizer, nbytes * down, plain_s)


def saves(step: StepRun, model: Any, optimizer: Any, copy_s: float, plain_s: float) -> None:
    import ckptmap
    from ckptmap.storage import pinned_memory

    with ckptmap.CheckpointManager(step.work / "runs", every=100, keep=1) as manager:
        start = time.perf_counter()
        manager.save(1, model, optimizer)
        step.result.figure("a step that is not due, which begins to make memory: blocked",
                           time.perf_counter() - start, "s")  # fmt: skip
        making, slowest, steps = list(pinned_memory._reserving), 0.0, 0
        while steps < 3 or (steps < 400 and any(thread.is_alive() for thread in making)):
            began = time.perf_counter()
            train(model, optimizer, 20 + steps, 21 + steps, step.device)
            synchronize(step.device)
            slowest, steps = max(slowest, time.perf_counter() - began), steps + 1
        for thread in making:
            thread.join()
        step.result.figure("memory made ahead: ready after", time.perf_counter() - start, "s")
        step.result.figure("memory made ahead: slowest step of training meanwhile", slowest, "s",
                           ratio=slowest / plain_s, of="one alone")  # fmt: skip
        kept = sum(slab.numel() for slab in pinned_memory._kept.get(True, ()))
        step.result.figure("memory made ahead: pinned", kept / 2**30, "GiB")
        if step.on_cuda:
            step.result.check("pinned memory was made ahead", kept > 0, f"{kept} bytes")
        for number, turn in ((100, "first"), (200, "second")):
            wanted = copied(state_of(model, optimizer))
            synchronize(step.device)
            manager.save(number, model, optimizer)
            _blocked(step, f"{turn} save of a manager", manager.blocked_s[number], copy_s)
            train(model, optimizer, 500 + number, 501 + number, step.device)
            manager.wait()
        path = manager.latest()
    step.result.check("pinned memory is given back at the close", True not in pinned_memory._kept)
    ckptmap.load(str(path), model, optimizer)
    wrong = different(wanted, state_of(model, optimizer))
    step.result.check(f"the second save: {len(wanted)} tensors", not wrong, str(wrong[:6]) if wrong else "")  # fmt: skip


def _blocked(step: StepRun, what: str, seconds: float, copy_s: float) -> None:
    step.result.figure(f"{what}: blocked", seconds, "s", ratio=seconds / copy_s, of="a copy of all bytes to pinned memory")  # fmt: skip


def _fitting(step: StepRun) -> int:
    """Return how many layers there is room for, with two copies in pinned memory and two checkpoints."""
    import os

    layer = 3 * 4 * WIDTH * WIDTH
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 6
    return max(1, min(LAYERS, host // layer, shutil.disk_usage(step.work).free // 3 // layer))


def ways_to_make(step: StepRun) -> None:
    """Report how long it takes to touch and to register new memory: pages that a forked process would share, as now,
    and private ones, which may be huge, and which CUDA must not be told of unless no fork copies them."""
    import torch

    from ckptmap.storage import registered_memory

    nbytes = 32 << 20 if step.is_tiny else 4 << 30
    ways = {
        "shared pages": mmap.MAP_SHARED,
        "private pages, huge where the system has them": mmap.MAP_PRIVATE,
    }
    for what, flags in ways.items():
        memory = mmap.mmap(-1, nbytes, flags=flags | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(mmap.MADV_DONTFORK)
        values = torch.frombuffer(memory, dtype=torch.uint8)
        for threads in (registered_memory.MOST_THREADS, 4):
            took = clocked(lambda n=threads, v=values: registered_memory._touch(v, n))
            step.result.figure(f"{what}: touched by {threads} threads", nbytes / took / 1e9, "GB/s")
            memory.madvise(mmap.MADV_DONTNEED if flags == mmap.MAP_PRIVATE else mmap.MADV_REMOVE)
        if step.on_cuda:
            registered_memory._touch(values, registered_memory.MOST_THREADS)
            for done, call in (("registered", register), ("given back", unregister)):
                took = clocked(lambda call=call, v=values: call(v))
                step.result.figure(f"{what}: {done}", nbytes / took / 1e9, "GB/s")
        del values
        memory.close()


def register(values: Any) -> None:
    import torch

    cudart: Any = torch.cuda.cudart()
    assert not int(cudart.cudaHostRegister(values.data_ptr(), values.numel(), 1))


def unregister(values: Any) -> None:
    import torch

    cudart: Any = torch.cuda.cudart()
    assert not int(cudart.cudaHostUnregister(values.data_ptr()))


def capture_while_made(step: StepRun) -> None:
    """Capture graphs, in torch's mode, until another thread has made and given back pinned memory."""
    import torch

    from ckptmap.storage.registered_memory import registered_memory

    made: list[bool] = []

    def make() -> None:
        for _ in range(4):
            made.append(registered_memory(256 << 20) is not None)

    values = torch.ones(1024, device=step.device)
    torch.cuda.synchronize()
    thread, count = threading.Thread(target=make), 0
    thread.start()
    while thread.is_alive() or not count:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(200):
                values.add_(1)
        graph.replay()
        count += 1
    thread.join()
    torch.cuda.synchronize()
    wanted = 1 + 200 * count
    step.result.check("graphs captured while memory is made", made == [True] * 4 and values[0].item() == wanted,
                      f"{count} graphs, memory {made}, {values[0].item()} of {wanted}")  # fmt: skip
