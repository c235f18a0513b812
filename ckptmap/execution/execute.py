"""Execute a plan: read the source bytes and write the output files, by threads, with a journal.

The work is split into units. A unit copies a span of small slots, copies a stream of large slots,
encodes one tensor, or compares one replica. (A slot is the place of one chunk in an output file.)
Several ranks split the units among them and then exchange the records of what they wrote.

Every byte is read once and written once. The digest of a slot (and its CRC-32, where the container
stores one) is computed in the same pass, in row-major order, so one slot cannot be split over
threads: threads work on different units. Torch is imported only where values change. It is then
limited to one thread of its own, because Python threads over units use the cores better.

With a device other than the CPU, values go to the device through a ring of pinned memory, and
results come back while later boxes are computed: see `cuda_ring`.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.quantized_codes import CoarseScales
from ckptmap.core.sizes import MIN_MEMORY
from ckptmap.errors import Interrupted, RunError, SourceError
from ckptmap.execution.check_source import named, settle, tensors_read
from ckptmap.execution.copy import Context, buffer_nbytes, copy_span, copy_stream, key_of
from ckptmap.execution.copy_units import SMALL, spans, streams
from ckptmap.execution.encode import compare, encode
from ckptmap.execution.fetch_sources import batches, read_by_compare, read_by_copies, read_by_encode
from ckptmap.execution.finish_files import seal
from ckptmap.execution.heartbeat import Stopped
from ckptmap.execution.phases import Phases
from ckptmap.execution.ranks import ALONE, Ranks
from ckptmap.execution.split_by_rank import Share, split
from ckptmap.execution.written_slots import Executed, WrittenSlots
from ckptmap.planning.file_plan import Compare, Encode, FilePlan
from ckptmap.planning.options import RunOptions
from ckptmap.protocols import Slot
from ckptmap.protocols.progress import CONVERTING, COPYING, HASHING
from ckptmap.storage.direct_io import Buffer, Outputs, Sums
from ckptmap.storage.file_records import DamagedRecord
from ckptmap.storage.files import Files
from ckptmap.storage.journal import Journal, Written
from ckptmap.storage.process_guards import one_torch_thread, stopped_by_signals

SPAN = 4 << 20
"""Bytes of small slots in one unit."""
STREAM = 64 << 20
"""Bytes of consecutive large slots in one unit. The page where two units meet is written by both,
through the page cache, and such a write waits for those of other threads: so units are large."""
PARTS = 16
"""The least number of streams in a plan: threads share them, and a run that is continued keeps
those that were finished."""
_TOTAL = struct.Struct("<Q")
"""The head of a rank's report: the bytes that it kept from an earlier run."""


def execute(
    plan: Sequence[FilePlan],
    encodes: Sequence[Encode],
    compares: Sequence[Compare],
    files: Files,
    out_dir: Path,
    journal: Journal,
    how: RunOptions,
    *,
    direct: bool = True,
    manifest: Callable[[Executed], bytes] | None = None,
    ranks: Ranks = ALONE,
) -> Executed:
    """Write all files of a plan into `out_dir`, complete but not synced to disk by rank 0.

    how         limits and progress; without digests no unit is journaled
    direct      write large slots past the page cache, where the filesystem supports it
    manifest    makes the bytes of the manifest; rank 0 calls it once, when all slots are written
    ranks       each rank writes its share and gets the whole result; rank 0 finishes the files

    Raises RunError (CKM306 write failed, 308 source changed, 309 overflow, 310 replica differs),
    SourceError CKM105, DestinationError CKM303, Interrupted CKM307. After any of them
    the same call continues where the journal ends.
    """
    threads = how.threads or min(4, (os.cpu_count() or 1) // ranks.local_world_size)
    threads = max(1, min(threads, how.memory // MIN_MEMORY))
    digests = how.digest != "none"
    share = split(plan, encodes, compares, ranks.world_size)[ranks.rank]
    paths = [out_dir / item.out.name for item in plan]
    outputs = _reserved(plan, paths, direct, ranks)
    run = _Run(plan, outputs, paths, journal, phases := Phases.of(how.progress), ranks, digests)
    budget = how.memory // threads
    context = Context(plan, files, outputs, budget, how.device, run.advance, digests)
    staging = out_dir.parent / f"source-{ranks.rank}" if how.low_disk else None
    try:
        with ExitStack() as held, stopped_by_signals(run.stop):
            phases.begin(CONVERTING if encodes else COPYING, sum(sum(f.slots.sizes) for f in plan))
            if share.encodes:
                run.bring_torch = partial(held.enter_context, one_torch_thread(True))
            with ranks.working():
                units = _units(context, share, run.has_torch)
                for some in batches(files, units, journal.entries, staging):
                    run.all(some, threads, buffer_nbytes(budget))
            if ranks.rank:
                _hand_over(outputs, [paths[file] for file in share.files] if how.sync else [])
            done = run.result()
            phases.begin(HASHING)
            again = tensors_read(plan, encodes) if done.continued_nbytes else ()
            check = settle(files, ranks, resumed=again, whole=how.check_source == "full")
            done = replace(done, source=check)
            if ranks.rank == 0:
                seal(plan, outputs, done, manifest, context.joined)
            run.check()
    except KeyboardInterrupt as error:
        raise _interrupted() from error
    except DamagedRecord as error:
        raise named(error, plan, encodes) from error
    finally:
        outputs.close()
    return done


@dataclass(frozen=True, slots=True)
class _Unit:
    """Work that writes some slots; a unit with the name "" is not journaled, and so never skipped."""

    name: str
    do: Callable[[Buffer], Sequence[Written]]
    reads: Callable[[], Iterable[str]]
    """Returns the source files that the unit reads."""


class _Stopped(Exception):
    """Another thread failed, or the user asked to stop."""


class _Run:
    """The state that the threads of one execution share."""

    def __init__(
        self,
        plan: Sequence[FilePlan],
        outputs: Outputs,
        paths: Sequence[Path],
        journal: Journal,
        phases: Phases,
        ranks: Ranks,
        digests: bool,
    ) -> None:
        self.digests = digests
        self.plan, self.outputs, self.paths, self.journal = plan, outputs, paths, journal
        self.phases, self.ranks = phases, ranks
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._progress_lock = threading.Lock()
        self._errors: list[BaseException] = []
        self.coarse: list[CoarseScales] = []
        self._sizes = [item.slots.sizes for item in plan]
        self._tally = WrittenSlots([len(sizes) for sizes in self._sizes])
        self._continued_nbytes = 0
        self.bring_torch: Callable[[], object] | None = None
        """Imports torch. That takes as long as copying a gigabyte, so threads copy meanwhile."""
        self.has_torch = threading.Event()

    def all(self, units: Iterator[_Unit], threads: int, buffer_nbytes: int) -> None:
        """Run every unit of work; the first error stops the other threads and is raised.

        CoarseScales errors are collected over all encodings and raised together.
        """
        with ThreadPoolExecutor(threads, thread_name_prefix="ckptmap") as pool:
            try:
                workers = [pool.submit(self._work, units, buffer_nbytes) for _ in range(threads)]
                self._bring_torch()
                wait(workers)
            except BaseException:
                self.stop.set()  # leaving the block waits for the workers,
                self.has_torch.set()  # and those that were started may wait for torch
                raise
        if self._errors:
            raise self._errors[0]
        if self.coarse:
            raise CoarseScales.together(self.coarse)
        self.check()

    def _bring_torch(self) -> None:
        try:
            if self.bring_torch is not None and not self.has_torch.is_set():
                self.phases.mention_torch()
                with paused_gc():  # the import is a tenth faster
                    self.bring_torch()
        except BaseException:
            # Before the threads go on: torch is imported in part only, and would crash.
            self.stop.set()
            raise
        finally:
            self.has_torch.set()

    def check(self) -> None:
        """Raise Interrupted CKM307 if the run was asked to stop."""
        if self.stop.is_set():
            raise _interrupted()

    def _work(self, units: Iterator[_Unit], buffer_nbytes: int) -> None:
        try:
            buffer = Buffer(buffer_nbytes)
            while not self.stop.is_set():
                with self._lock:
                    unit = next(units, None)
                if unit is None or (self.coarse and not unit.name.startswith("encode:")):
                    return
                try:
                    self._do(unit, buffer)
                except CoarseScales as error:  # the next plan needs the names of all such tensors
                    self.coarse.append(error)
        except _Stopped:
            return
        except BaseException as error:
            self._errors.append(error)
            self.stop.set()

    def _do(self, unit: _Unit, buffer: Buffer) -> None:
        journaled = self.journal.entries.get(unit.name) if self.digests else None
        kept = journaled is not None and all(self._holds(slot, buffer) for slot in journaled)
        written = journaled if journaled is not None and kept else unit.do(buffer)
        if unit.name and not kept and self.digests:  # without digests no entry could be verified
            self.journal.add(unit.name, written)
        with self._lock:
            self._tally.add(written)
            if kept:
                self._continued_nbytes += sum(
                    self._sizes[file][slot] for file, slot, _, _ in written
                )

    def _holds(self, written: Written, buffer: Buffer) -> bool:
        """Return whether the slot's bytes, read back, have the digest that the journal records."""
        if not (0 <= written.file < len(self.plan)):
            return False
        if not (0 <= written.slot < len(self.plan[written.file].out.slots)):
            return False
        slot = self.slot(written.file, written.slot)
        sums, reader = Sums(wants_crc=False), Files(max_open=1)
        try:
            for at in range(0, slot.nbytes, buffer.nbytes):
                place = buffer.at(0, min(buffer.nbytes, slot.nbytes - at))
                reader.read_into(str(self.paths[written.file]), slot.offset + at, [place])
                sums.update(place)
                self.advance(0, "")
        except Stopped:
            raise
        except (SourceError, RunError):
            return False
        finally:
            reader.close()
        if sums.digest == written.digest:
            self.advance(slot.nbytes, key_of(slot))
            return True
        return False

    def slot(self, file: int, slot: int) -> Slot:
        return self.plan[file].out.slots[slot]

    def advance(self, nbytes: int, key: str) -> None:
        """Report `nbytes` of progress; raise if another thread or another rank has failed."""
        if self.stop.is_set():
            raise _Stopped
        with self._progress_lock:
            nbytes += self.ranks.advance(nbytes)
            if nbytes:
                self.phases.advance(nbytes, key)

    def result(self) -> Executed:
        """Return what all ranks have written. Waits for every rank."""
        if self.ranks.world_size > 1:
            # Cleared, because `gather` returns this rank's report together with the others'.
            mine = _TOTAL.pack(self._continued_nbytes) + self._tally.report()
            self._tally.clear()
            self._continued_nbytes = 0
            for report in self.ranks.gather(mine):
                self._continued_nbytes += _TOTAL.unpack_from(report)[0]
                self._tally.merge(report[_TOTAL.size :])
        return self._tally.result(self.digests, self._continued_nbytes)


# --------------------------------------------------------------------------------- units


def _units(context: Context, share: Share, has_torch: threading.Event) -> Iterator[_Unit]:
    """Yield the units of a rank: comparisons, encodings, copies.

    Comparisons come first, because they can refuse the source. Encodings take longest, so they come
    as soon as torch is imported; until then copies are yielded.
    """
    for replica in share.compares:
        yield _Unit("", partial(_compared, context, replica), partial(read_by_compare, replica))
    copies = _copies(context, share)
    while share.encodes and not has_torch.is_set() and (unit := next(copies, None)) is not None:
        yield unit
    for name, step in share.encodes:
        do = partial(_encoded, has_torch, context, step)
        yield _Unit(name, do, partial(read_by_encode, step))
    yield from copies


def _copies(context: Context, share: Share) -> Iterator[_Unit]:
    stream = min(STREAM, sum(item.out.nbytes for item in context.plan) // PARTS)
    if context.files.mounts:  # a longer unit would need more remote files on disk at a time
        stream = 0
    for file, item in enumerate(context.plan):
        limit = min(SPAN, buffer_nbytes(context.budget))
        cut = spans(item, limit, share.slots[file])
        for first, stop, streamed in streams(item, cut, min(SMALL, limit), stream):
            copy = copy_stream if streamed else copy_span
            do = partial(copy, context, file, first, stop)
            reads = partial(read_by_copies, item, first, stop)
            yield _Unit(f"copy:{file}:{first}-{stop}", do, reads)


def _encoded(
    has_torch: threading.Event, context: Context, step: Encode, buffer: Buffer
) -> Sequence[Written]:
    has_torch.wait()
    context.advance(0, "")  # raises if torch could not be imported
    return encode(context, step, buffer)


def _compared(context: Context, step: Compare, buffer: Buffer) -> Sequence[Written]:
    compare(context, step)
    return ()


# ----------------------------------------------------------------------------- around them


def _reserved(
    plan: Sequence[FilePlan],
    paths: Sequence[Path],
    direct: bool,
    ranks: Ranks,
) -> Outputs:
    """Return the output files; rank 0 creates and reserves them before another rank opens them."""
    if ranks.rank:
        ranks.barrier()
    outputs = Outputs(paths, [item.out.nbytes for item in plan], direct)
    if ranks.rank == 0:
        ranks.barrier()
    return outputs


def _hand_over(outputs: Outputs, paths: Sequence[Path]) -> None:
    """Close the outputs and sync `paths`, for rank 0 to continue with them.

    Rank 0 can neither see nor sync bytes that another machine still holds in its page cache.
    """
    outputs.close()
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise RunError(
                "CKM306",
                f"{path}: cannot be synced: {error.strerror}",
                "repair the disk or its mount, then run the same command again to continue",
            ) from error


def _interrupted() -> Interrupted:
    return Interrupted(
        "CKM307", "interrupted; the destination is as it was", "run the same command to continue"
    )
