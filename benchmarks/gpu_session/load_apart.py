"""Take `load` apart: how long each phase takes, and what other numbers of threads, blocks and ways would bring.

All loads fill the same model from the same files, by turns, so that one table says what to choose. The figure of a
way is its best round; the link is measured in the same process.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_session.bare_loop import bare_loop_s
from benchmarks.gpu_session.mapped_files import mapped_s
from benchmarks.gpu_session.models import copied, different, stack, state_of
from benchmarks.gpu_session.session import StepRun
from benchmarks.gpu_session.timing import clocked, link_s_per_byte

WIDTH, LAYERS = 8192, 24
"""6.4 GB of float32 weights."""
TURNS = 2
GOAL = 0.6
MIB = 1 << 20


class Way(NamedTuple):
    """A way to load: what is asked of `load`, and (module, name, value) of what is set otherwise meanwhile."""

    name: str
    asked: Mapping[str, Any]
    sets: tuple[tuple[Any, str, Any], ...] = ()


def ways() -> list[Way]:
    from ckptmap.live.model import reader_threads
    from ckptmap.storage import device_copies

    def in_file_order(
        threads: Any, jobs: Any, nbytes: Any = (), own: Any = reader_threads.ReaderThreads.in_order
    ) -> Any:
        return own(threads, jobs)

    none: dict[str, Any] = {"verify": "none"}
    return [
        Way("as it is, verify='none'", none),
        Way("as it is, verify='stored'", {"verify": "stored"}),
        Way("4 threads", none, ((reader_threads, "MOST", 4),)),
        Way("8 threads", none, ((reader_threads, "MOST", 8),)),
        Way("blocks of 1 MiB", none, ((device_copies, "BLOCK_NBYTES", MIB),)),
        Way("blocks of 2 MiB, verify='stored'", {"verify": "stored"}, ((device_copies, "BLOCK_NBYTES", 2 * MIB),)),
        Way("blocks of 4 MiB", none, ((device_copies, "BLOCK_NBYTES", 4 * MIB),)),
        Way("blocks of 16 MiB (512 MiB in all)", none | {"max_memory": 512 * MIB}),
        Way("blocks of 16 MiB, 8 threads", none, (
            (reader_threads, "MOST", 8), (reader_threads, "LEAST_NBYTES", 32 * MIB),
        )),
        Way("in file order", none, ((reader_threads.ReaderThreads, "in_order", in_file_order),)),
        Way("without help", none, ((device_copies, "SHARED", 1 << 40),)),
    ]  # fmt: skip


def run(step: StepRun) -> None:
    import ckptmap

    width, layers = (64, 2) if step.is_tiny else (WIDTH, _fitting(step))
    up = link_s_per_byte(step.device, 1 << 16 if step.is_tiny else 1 << 30)
    model, path = stack(layers, width, step.device), step.work / "saved"
    wanted = copied(state_of(model))
    nbytes = sum(tensor.nbytes for tensor in wanted.values())
    step.result.figure("model", nbytes / 1e9, "GB")
    ckptmap.save(path, model, background=False)
    ckptmap.load(path, model, verify="stored")  # with its imports
    with step.result.attempt("phases"):
        for verify in ("none", "stored"):
            phases(step, path, model, verify)
    best: dict[str, float] = {}
    files = [file for file in path.iterdir() if file.suffix == ".distcp"]
    for turn in range(TURNS):
        for way in ways():
            with step.result.attempt(way.name):
                took = load_by(step, way, path, model, None if turn else wanted)
                best[f"load, {way.name}"] = min(took, best.get(f"load, {way.name}", took))
        for name, bare in bare_ways().items():
            with step.result.attempt(name):
                took = bare(files, step.device)
                best[name] = min(took, best.get(name, took))
    for name, took in best.items():
        step.result.figure(name, nbytes / took / 1e9, "GB/s", ratio=nbytes * up / took,
                           of="the pinned link", goal=GOAL if "as it is" in name else None)  # fmt: skip


def _fitting(step: StepRun) -> int:
    """Return how many layers there is room for: live and wanted on the device, a file and its copy on the host."""
    import os

    import torch

    layer = 4 * WIDTH * WIDTH
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    free = torch.cuda.mem_get_info()[0] // 3 if step.on_cuda else host
    return max(1, min(LAYERS, host // layer, free // layer, shutil.disk_usage(step.work).free // 2 // layer))  # fmt: skip


def load_by(
    step: StepRun, way: Way, path: Path, model: Any, wanted: Mapping[str, Any] | None
) -> float:
    """Return the seconds of a load; check its values where `wanted` has them."""
    import torch

    import ckptmap

    if wanted is not None:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    with ExitStack() as sets:
        for module, name, value in way.sets:
            sets.enter_context(set_to(module, name, value))
        took = clocked(lambda: ckptmap.load(path, model, **way.asked), step.device)
    if wanted is not None:
        wrong = different(wanted, state_of(model))
        step.result.check(f"{way.name}: {len(wanted)} tensors", not wrong, str(wrong[:6]) if wrong else "")  # fmt: skip
    return took


@contextmanager
def set_to(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def bare_ways() -> dict[str, Callable[[list[Path], str], float]]:
    """Return loops that read and send the same files with nothing around: by threads and blocks, and from pages of
    the files that CUDA registers."""
    made: dict[str, Callable[[list[Path], str], float]] = {}
    for threads, mib in ((4, 16), (8, 8), (8, 16), (16, 1), (16, 2), (16, 4), (16, 8), (16, 16)):
        name = f"bare loop, {threads} threads, blocks of {mib} MiB"
        made[name] = lambda files, device, t=threads, b=mib: bare_loop_s(files, device, t, b * MIB)
    for threads in (4, 16):
        name = f"pages of the files registered, 64 MiB at a time, {threads} threads"
        made[name] = lambda files, device, t=threads: mapped_s(files, device, t, 64 * MIB)
    return made


# ------------------------------------------------------------------------------- phases


class Clock:
    """Seconds of calls, by what they are, summed up over all threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.threads: dict[str, set[int]] = defaultdict(set)
        self.counts: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                took = time.perf_counter() - start
                with self._lock:
                    self.seconds[what] += took
                    self.counts[what] += 1
                    self.threads[what].add(threading.get_ident())

        return run


def phases(step: StepRun, path: Path, model: Any, verify: str) -> None:
    """Report how long each phase of one load took: of the calling thread, and of all reading threads together."""
    import ckptmap
    from ckptmap.live.load import load as load_module
    from ckptmap.live.model import reader_memory
    from ckptmap.storage import device_copies
    from ckptmap.storage.files import Files
    from ckptmap.storage.source_sums import SourceSums

    clock = Clock()
    timed: list[tuple[str, Any, str]] = [
        ("plan", load_module, "_plan"),
        ("fill all tensors", load_module.PlannedLoad, "run"),
        ("wait for pinned memory", reader_memory.ReaderMemory, "blocks"),
        ("end of copies, begin to give back", reader_memory.ReaderMemory, "give_back"),
        ("pinned memory made, beside the plan", device_copies, "one_memory"),
        ("pinned memory given back, after load", reader_memory, "_drop"),
        ("read", Files, "read_unchecked"),
        ("compare checksums", SourceSums, "saw"),
        ("wait for a block", device_copies.Blocks, "take"),
        ("begin a copy", device_copies.Lanes, "upload"),
    ]
    with ExitStack() as sets:
        for what, owner, name in timed:
            sets.enter_context(set_to(owner, name, clock.timed(what, getattr(owner, name))))
        took = clocked(lambda: ckptmap.load(path, model, verify=verify), step.device)
        while reader_memory._giving_back:
            reader_memory._giving_back.pop().join()
    title = f"phases, verify={verify!r}"
    step.result.figure(f"{title}: whole", took, "s")
    for what, _, _ in timed:
        if what in clock.seconds:
            threads, count = len(clock.threads[what]), clock.counts[what]
            each = f"{what}, {count} calls in {threads} threads, a thread" if threads > 1 else what
            step.result.figure(f"{title}: {each}", clock.seconds[what] / threads, "s",
                               ratio=clock.seconds[what] / threads / took, of="the whole")  # fmt: skip
