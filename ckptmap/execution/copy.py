"""Copy tensor bytes that do not change: a span of small slots at once, or a stream of large slots.

A slot is the place of one chunk in an output file. Every byte is read once and written once. The
digest of a slot (and its CRC-32, where the container stores one) is computed in the same pass, in
row-major order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, repeat

from ckptmap.core.bool_check import check_bools
from ckptmap.core.slot_columns import Slots
from ckptmap.errors import SourceError
from ckptmap.execution.smaller_feeds import FeedSize
from ckptmap.planning.file_plan import FilePlan, SlotRef
from ckptmap.protocols import OutFile, Slot
from ckptmap.storage.box_reader import Run, fill, row_major_boxes, run_of
from ckptmap.storage.crc32 import crc32
from ckptmap.storage.direct_io import ALIGN, Buffer, OutputFile, Outputs, Stream, Sums
from ckptmap.storage.files import Files
from ckptmap.storage.journal import Written
from ckptmap.storage.source_sums import GAP
from ckptmap.tensors import Box, Extent, StoredTensor

MAX_GAP = 4096
"""The most bytes between two runs that are read at once, or between two slots of one span."""
KERNEL_NBYTES = 64 << 20
"""Bytes that the kernel copies in one call: between two calls the run can be stopped."""
MAX_BUFFER = 8 << 20
"""Bytes of one thread's copy buffer; a larger one does not make direct writes faster."""
MAX_BUFFERS = 1000
"""The most buffers of one read: the kernel's limit is 1,024."""


def buffer_nbytes(budget: int) -> int:
    """Return the bytes of a thread's copy buffer; the rest of its budget holds values to encode."""
    return max(4 * ALIGN, min(MAX_BUFFER, budget // 2))


@dataclass(frozen=True)
class Context:
    """The plan, files and limits that every unit of work uses.

    `advance(nbytes, key)` reports progress, and raises to stop the unit.
    """

    plan: Sequence[FilePlan]
    files: Files
    outputs: Outputs
    budget: int
    """The most bytes that the buffers of one thread may take."""
    device: str
    advance: Callable[[int, str], None]
    digests: bool = True
    """Whether digests are computed."""
    joined: list[tuple[int, int, int]] = field(default_factory=list)
    """(file, first slot, end of the slots) of each span that was written with the bytes between
    its slots."""
    feed_size: FeedSize = field(default_factory=FeedSize)

    def slot(self, target: SlotRef) -> Slot:
        return self.plan[target.file].out.slots[target.slot]

    def source(self, target: SlotRef) -> StoredTensor:
        source = self.plan[target.file].sources[target.slot]
        assert source is not None, f"slot {target} is written by an Encode step"
        return source

    def sums(self, target: SlotRef) -> Sums:
        return Sums(self.plan[target.file].out.needs_crc, self.digests)


def key_of(slot: Slot) -> str:
    """Return the name of a slot in messages and progress: its path, joined with dots."""
    return ".".join(map(str, slot.path))


# --------------------------------------------------------------------------------- copies


def copy_stream(
    context: Context, file: int, first: int, stop: int, buffer: Buffer
) -> Sequence[Written]:
    """Copy slots that have no bytes between them, through the buffer, in row-major order."""
    slots, written = context.plan[file].out.slots, []
    with context.outputs.file(file) as output:
        sums = context.sums(SlotRef(file, first))
        stream = Stream(output, slots[first].offset, buffer, sums)
        for index in range(first, stop):
            target = SlotRef(file, index)
            sums = stream.sums = context.sums(target)
            _stream(context, target, output, stream)
            written.append(recorded(context, target, sums.digest, sums.crc32))
        stream.finish()
    return written


def _stream(context: Context, target: SlotRef, output: OutputFile, stream: Stream) -> None:
    """Copy one slot, inside the kernel where `_may_copy` allows it."""
    slot, source = context.slot(target), context.source(target)
    key, run = key_of(slot), run_of(source, slot.box)
    assert slot.nbytes == slot.box.numel * source.info.itemsize, f"{key}: {slot.nbytes} bytes"
    if run is not None and _may_copy(context, target, run):
        done = _copied(context, output, run, slot)
        if done:
            stream.skip(done)
        run = Run(run.file, run.offset + done, run.nbytes - done)
    limit = stream.room if run is None else stream.wanted
    bools = target.slot in context.plan[target.file].bools
    for nbytes, bring in _portions(context.files, source, slot.box, run, limit):
        place = stream.take(nbytes)
        bring(place)
        if bools:
            check_bools(source, slot, stream.position - slot.offset, place)
        stream.push(place)
        context.advance(nbytes, key)


def _copied(context: Context, output: OutputFile, run: Run, slot: Slot) -> int:
    """Copy a run inside the kernel; return the bytes copied from its start: mostly all, or none."""
    done = 0
    with context.files.descriptor(run.file) as fd:
        while done < run.nbytes:
            step = min(KERNEL_NBYTES, run.nbytes - done)
            count = output.copy_from(fd, run.offset + done, slot.offset + done, step)
            if not count:
                break
            done += count
            context.advance(count, key_of(slot))
    return done


def _may_copy(context: Context, target: SlotRef, run: Run) -> bool:
    """Return whether the kernel may copy a run.

    It may if nothing is computed from the bytes, and if both places have the same offset within a
    block: otherwise the kernel's copy costs twice as much as reading and writing.
    """
    out = context.plan[target.file].out
    alike = run.offset % ALIGN == out.slots[target.slot].offset % ALIGN
    looked_at = context.digests or out.needs_crc or target.slot in context.plan[target.file].bools
    return alike and not looked_at and not context.files.sums.states(*run)


def _portions(
    files: Files, stored: StoredTensor, box: Box, run: Run | None, limit: int
) -> Iterator[tuple[int, Callable[[memoryview], None]]]:
    """Yield (nbytes, function that fills them) of a box in row-major order, each up to `limit`."""
    if run is not None:
        for at in range(0, run.nbytes, limit):
            nbytes = min(limit, run.nbytes - at)
            yield nbytes, partial(_read, files, Run(run.file, run.offset + at, nbytes))
        return
    itemsize = stored.info.itemsize
    for part in row_major_boxes(box, limit // itemsize):
        yield part.numel * itemsize, partial(fill, files, stored, part)


def _read(files: Files, run: Run, place: memoryview) -> None:
    files.read_into(run.file, run.offset, [place])


def copy_span(
    context: Context, file: int, first: int, stop: int, buffer: Buffer
) -> Sequence[Written]:
    """Copy neighbouring small slots with few reads and one write.

    The container's bytes between them are written too; where they are not known yet, zeros are
    written and `finish_files.seal` fills them in.
    """
    from xxhash import xxh3_64_hexdigest as digest_of

    item = context.plan[file]
    slots = item.slots[first:stop]
    base, end = slots.offsets[0], slots.offsets[-1] + slots.sizes[-1]
    span = buffer.at(base, end - base)
    places = [
        span[at - base : at - base + n] for at, n in zip(slots.offsets, slots.sizes, strict=True)
    ]
    _bring(context.files, item, first, places)
    for index in item.bools.intersection(range(first, stop)) if item.bools else ():
        source = item.origins[index]
        assert source is not None, "it is copied"
        check_bools(source, item.slots[index], 0, places[index - first])
    crcs = list(map(crc32, places)) if item.out.needs_crc else [0] * len(places)
    gaps = _fill_gaps(item.out, first, slots, crcs, span)
    with context.outputs.file(file) as output:
        output.write_at(base, span, direct=item.out.between is not None or not gaps)
    if item.out.between is not None:
        context.joined.append((file, first, stop))
    context.advance(end - base, key_of(slots[-1]))
    if item.out.needs_crc:
        _check_crcs(item, first, crcs)
    digests = map(digest_of, places) if context.digests else repeat("", len(places))
    return list(map(Written, repeat(file), range(first, stop), digests, crcs))


def _fill_gaps(
    out: OutFile, first: int, slots: Slots, crcs: Sequence[int], span: memoryview
) -> bool:
    """Write the container's bytes, or zeros, between the slots; return whether there are gaps."""
    has_gaps, between = False, out.between
    base = end = slots.offsets[0]
    for index, at, nbytes in zip(count(first - 1), slots.offsets, slots.sizes, strict=False):
        if at > end:
            has_gaps = True
            gap = between(index, crcs[index - first]) if between is not None else bytes(at - end)
            span[end - base : at - base] = gap
        end = at + nbytes
    return has_gaps


def _bring(files: Files, item: FilePlan, first: int, places: Sequence[memoryview]) -> None:
    """Read the bytes of the slots from `first` on into `places`; neighbours in one file are read
    at once."""
    origins, stop = item.origins, first + len(places)
    homes, starts = origins.files[first:stop], origins.offsets[first:stop]
    buffers: list[memoryview] = []
    file, begin, cursor, has_gaps = "", 0, 0, False
    for index, home, start, place in zip(count(first), homes, starts, places, strict=False):
        nbytes = place.nbytes
        if not home:
            run = _run_of(files, item, index, place)
            if run is None:
                continue
            home, start, _ = run
        gap = start - cursor
        if buffers and not (home == file and 0 <= gap <= MAX_GAP and len(buffers) < MAX_BUFFERS):
            files.read_into(file, begin, buffers, has_gaps)
            buffers, has_gaps = [], False
        if not buffers:
            file, begin = home, start
        elif gap:
            buffers.append(GAP[:gap])
            has_gaps = True
        buffers.append(place)
        cursor = start + nbytes
    if buffers:
        files.read_into(file, begin, buffers, has_gaps)


def _run_of(files: Files, item: FilePlan, index: int, place: memoryview) -> Run | None:
    """Return the one run of a file that holds a slot's bytes.

    If there is none, read the bytes into `place` and return None.
    """
    slot, source = item.out.slots[index], item.origins[index]
    assert source is not None, f"{key_of(slot)}: is written by an Encode step"
    run = run_of(source, slot.box)
    if run is None:
        fill(files, source, slot.box, place)
    else:
        assert run.nbytes == slot.nbytes, f"{key_of(slot)}: slot of {slot.nbytes} bytes"
    return run


def recorded(context: Context, target: SlotRef, digest: str, crc: int) -> Written:
    """Return the record of a written slot. Raises SourceError CKM105 if its CRC-32 is wrong."""
    item = context.plan[target.file]
    if item.out.needs_crc:
        _check_crc(item.out.slots[target.slot], item.sources[target.slot], crc)
    return Written(target.file, target.slot, digest, crc)


def _check_crcs(item: FilePlan, first: int, crcs: Sequence[int]) -> None:
    """Compare the CRC-32 of each slot from `first` on with the one that the source states."""
    origins, stop = item.origins, first + len(crcs)
    stated, homes = origins.crcs[first:stop], origins.files[first:stop]
    for index, home, known, crc in zip(count(first), homes, stated, crcs, strict=False):
        if not home or (known is not None and known != crc):
            _check_crc(item.out.slots[index], origins[index], crc)


def _check_crc(slot: Slot, source: StoredTensor | None, crc: int) -> None:
    """Raise SourceError CKM105 if a slot's CRC-32 is not the one that the source states.

    Does nothing where the source states none for exactly these bytes.
    """
    if source is None or slot.box.sizes != source.info.shape:
        return
    place = source.place
    extent = place if type(place) is Extent else source.extent
    if extent is not None and extent.crc32 not in (None, crc):
        raise SourceError(
            "CKM105",
            f"{extent.file}: {key_of(slot)}: bytes are damaged: "
            f"expected CRC-32 {extent.crc32:08x}, found {crc:08x}",
            "copy the checkpoint again from where it was made",
        )
