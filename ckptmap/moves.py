"""How the bytes of one unit of work move: a span of small slots, a large slot, a tensor to be
encoded, a replica to be compared.

Every byte is read once and written once; the digest of a slot (and its CRC-32, where the container
stores one) is taken on the way, in row-major order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, starmap
from math import prod
from typing import TYPE_CHECKING

from ckptmap.errors import Interrupted, RunError, SourceError
from ckptmap.files import Files
from ckptmap.gather import Run, fill, row_major_boxes, run_of
from ckptmap.journal import Written
from ckptmap.lazy import LazyTensor, tensor_bytes
from ckptmap.protocols import Encoder, Refusal, Slot, Write
from ckptmap.sink import Buffer, Outputs, Stream, Sums, digest_of
from ckptmap.steps import Compare, Encode, FilePlan, Target
from ckptmap.tensors import Box, StoredTensor, TensorInfo, contiguous_strides

if TYPE_CHECKING:
    import torch

MAX_GAP = 4096
"""Bytes between two runs that still make one read, or between two slots that make one span."""
PART_BUFFER = 1 << 20
"""Bytes held of each part of an encoded tensor before they are written."""
ELEMENT_NBYTES = 48
"""Bytes that one element costs while it is encoded: values in and out, and temporaries."""
MAX_ELEMENTS = 1 << 19
"""Elements encoded at once: they stay in the cache."""
COMPARE_NBYTES = 1 << 20
"""Bytes of a tensor and of its replica held at once."""
MAX_BUFFERS = 1000
"""Buffers of one read: below the kernel's 1024."""

_JUNK = memoryview(bytearray(MAX_GAP))


@dataclass(frozen=True)
class Context:
    """What every unit works with. `advance(nbytes, key)` reports, and raises to stop the unit."""

    plan: Sequence[FilePlan]
    files: Files
    outputs: Outputs
    budget: int
    """Bytes of buffers of one thread."""
    device: str
    advance: Callable[[int, str], None]

    def slot(self, target: Target) -> Slot:
        return self.plan[target.file].out.slots[target.slot]

    def source(self, target: Target) -> StoredTensor:
        source = self.plan[target.file].sources[target.slot]
        assert source is not None, f"slot {target} is written by an Encode step"
        return source

    def sums(self, target: Target) -> Sums:
        return Sums(self.plan[target.file].out.needs_crc)


def key_of(slot: Slot) -> str:
    """A slot's name in messages and progress."""
    return ".".join(map(str, slot.path))


# --------------------------------------------------------------------------------- copies


def copy_large(context: Context, target: Target, buffer: Buffer) -> Sequence[Written]:
    """One slot, streamed through the buffer in row-major order."""
    slot, source = context.slot(target), context.source(target)
    key, run = key_of(slot), run_of(source, slot.box)
    assert slot.nbytes == slot.box.numel * source.info.itemsize, f"{key}: {slot.nbytes} bytes"
    with context.outputs.file(target.file) as output:
        stream = Stream(output, slot.offset, buffer, context.sums(target))
        for nbytes, bring in _portions(context.files, source, slot.box, run, stream.room):
            place = stream.take(nbytes)
            bring(place)
            stream.push(place)
            context.advance(nbytes, key)
        sums = stream.finish()
    return [_written(context, target, sums.digest, sums.crc32)]


def _portions(
    files: Files, stored: StoredTensor, box: Box, run: Run | None, limit: int
) -> Iterator[tuple[int, Callable[[memoryview], None]]]:
    """(nbytes, what fills them) of a box in row-major order, each at most `limit` bytes."""
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
    """Neighbouring small slots: few reads, one write. Gaps are zeroed; sealing fills them."""
    item = context.plan[file]
    slots = item.out.slots[first:stop]
    base, end = slots[0].offset, slots[-1].offset + slots[-1].nbytes
    span = buffer.at(base, end - base)
    gaps = _zero_gaps(slots, base, span)
    places = [span[slot.offset - base :][: slot.nbytes] for slot in slots]
    runs: list[tuple[Run, memoryview]] = []
    for index, (slot, place) in enumerate(zip(slots, places, strict=True), first):
        source = context.source(Target(file, index))
        run = run_of(source, slot.box)
        if run is None:
            fill(context.files, source, slot.box, place)
        else:
            assert run.nbytes == slot.nbytes, f"{key_of(slot)}: slot of {slot.nbytes} bytes"
            runs.append((run, place))
    _read_runs(context.files, runs)
    with context.outputs.file(file) as output:
        output.write_at(base, span, direct=not gaps)
    context.advance(end - base, key_of(slots[-1]))
    crcs = map(zlib.crc32, places) if item.out.needs_crc else [0] * len(places)
    return [
        _written(context, Target(file, index), digest_of(place), crc)
        for index, (place, crc) in enumerate(zip(places, crcs, strict=True), first)
    ]


def _zero_gaps(slots: Sequence[Slot], base: int, span: memoryview) -> bool:
    """Clear the bytes between slots; True where there are any."""
    found = False
    for before, after in pairwise(slots):
        start = before.offset + before.nbytes
        if after.offset > start:
            span[start - base : after.offset - base] = bytes(after.offset - start)
            found = True
    return found


def _read_runs(files: Files, runs: Sequence[tuple[Run, memoryview]]) -> None:
    """Bring runs to their places; neighbours in one file are one read."""
    buffers: list[memoryview] = []
    file, begin, cursor = "", 0, 0
    for run, place in runs:
        gap = run.offset - cursor
        near = run.file == file and 0 <= gap <= MAX_GAP and len(buffers) < MAX_BUFFERS
        if buffers and not near:
            files.read_into(file, begin, buffers)
            buffers = []
        if not buffers:
            file, begin = run.file, run.offset
        elif gap:
            buffers.append(_JUNK[:gap])
        buffers.append(place)
        cursor = run.offset + run.nbytes
    if buffers:
        files.read_into(file, begin, buffers)


def _written(context: Context, target: Target, digest: str, crc: int) -> Written:
    """The record of a written slot, held against the source's own CRC-32 where both cover it."""
    out, source = context.plan[target.file].out, context.plan[target.file].sources[target.slot]
    if out.needs_crc and source is not None and len(source.chunks) == 1:
        chunk = source.chunks[0]
        if chunk.crc32 not in (None, crc) and chunk.box == out.slots[target.slot].box:
            raise SourceError(
                "CKM113",
                f"{chunk.region.file}: {key_of(out.slots[target.slot])}: bytes are damaged: "
                f"expected CRC-32 {chunk.crc32:08x}, found {crc:08x}",
                "copy the checkpoint again from where it was made",
            )
    return Written(target.file, target.slot, digest, crc)


# ------------------------------------------------------------------------------- encodings


def encode(context: Context, step: Encode, buffer: Buffer) -> Sequence[Written]:
    """Decode one logical tensor and write it anew; errors name the tensor."""
    try:
        encoder = step.encoding.encoder(step.tensor.info, context.device)
        parts = step.encoding.parts(step.tensor.info)
        assert not isinstance(parts, Refusal), f"{step.tensor.fqn}: refused: {parts.reason}"
        alone = encoder.splittable and list(parts) == [""]
        if alone and parts[""].shape == step.tensor.info.shape:
            return _encode_slots(context, step, encoder, buffer)
        return _encode_parts(context, step, encoder, parts)
    except Interrupted:
        raise
    except RunError as error:
        name = step.tensor.fqn
        raise type(error)(error.code, f"{name}: {error.message}", error.hint) from error


def _encode_slots(
    context: Context, step: Encode, encoder: Encoder, buffer: Buffer
) -> Sequence[Written]:
    """Slot by slot, box by box, each encoded alone: casts and plain decoding."""
    written = []
    for target in step.targets[""]:
        slot = context.slot(target)
        with context.outputs.file(target.file) as output:
            stream = Stream(output, slot.offset, buffer, context.sums(target))
            for offset, values in _values(context, step.tensor, slot.box, encoder.step):
                for write in encoder.feed(offset, values):
                    nbytes = _append(stream, write)
                    context.advance(nbytes, step.tensor.fqn)
            sums = stream.finish()
        written.append(_written(context, target, sums.digest, sums.crc32))
    assert not list(encoder.finish()), "a splittable encoder with one part has nothing to add"
    return written


def _encode_parts(
    context: Context, step: Encode, encoder: Encoder, parts: Mapping[str, TensorInfo]
) -> Sequence[Written]:
    """The whole tensor in row-major steps; each part is a stream over the slots that tile it."""
    streams = {name: _PartStream(context, info, step.targets[name]) for name, info in parts.items()}
    whole = Box.whole(step.tensor.info.shape)
    feeds = _values(context, step.tensor, whole, encoder.step)
    for write in chain.from_iterable(starmap(encoder.feed, feeds)):
        context.advance(streams[write.part].append(write), step.tensor.fqn)
    for write in encoder.finish():
        context.advance(streams[write.part].append(write), step.tensor.fqn)
    return [item for stream in streams.values() for item in stream.finish()]


class _PartStream:
    """Row-major bytes of one part, spread over the slots that tile it along its first dim."""

    def __init__(self, context: Context, info: TensorInfo, targets: Sequence[Target]) -> None:
        self._context, self._info = context, info
        self._targets = sorted(targets, key=lambda target: context.slot(target).box.offsets[:1])
        for target in targets:
            box = context.slot(target).box
            whole_rows = Box((*box.offsets[:1], *(0,) * len(info.shape[1:])), box.sizes)
            assert box == whole_rows and box.sizes[1:] == info.shape[1:], "a part is cut by rows"
        largest = max(context.slot(target).nbytes for target in targets)
        self._buffer = Buffer(min(PART_BUFFER, largest))
        self._at = 0
        self._stream: Stream | None = None
        self._done: list[Written] = []

    def append(self, write: Write) -> int:
        """Take a write that follows the one before; bytes taken."""
        start = write.box.offsets[0] if write.box.offsets else 0
        assert start * self._info.itemsize == self._at, f"{write.part}: writes must follow"
        values = write.values.detach().cpu().contiguous()
        data = tensor_bytes(values)
        self._at += data.nbytes
        while data.nbytes:
            data = data[self._put(data) :]
        return values.nbytes

    def _put(self, data: memoryview) -> int:
        """Bytes that went to the current slot."""
        target = self._targets[len(self._done)]
        slot = self._context.slot(target)
        with self._context.outputs.file(target.file) as output:
            if self._stream is None:
                sums = self._context.sums(target)
                self._stream = Stream(output, slot.offset, self._buffer, sums)
            left = slot.offset + slot.nbytes - self._stream.position
            self._stream.append(data[:left])
            if data.nbytes >= left:
                sums = self._stream.finish()
                self._done.append(_written(self._context, target, sums.digest, sums.crc32))
                self._stream = None
        return min(left, data.nbytes)

    def finish(self) -> Sequence[Written]:
        """Slots in order, once all bytes have come; empty slots have none."""
        while len(self._done) < len(self._targets):
            target = self._targets[len(self._done)]
            assert not self._context.slot(target).nbytes, f"{target} was not filled"
            sums = self._context.sums(target)
            self._done.append(_written(self._context, target, sums.digest, sums.crc32))
        return self._done


def _append(stream: Stream, write: Write) -> int:
    values = write.values.detach().cpu().contiguous()  # outlives the view of its memory
    stream.append(tensor_bytes(values))
    return values.nbytes


def _values(
    context: Context, tensor: LazyTensor, box: Box, step: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """(flat offset, 1-D values) of a box in row-major order, each a multiple of `step` elements
    but the last. The offset is exact where the box is flat-contiguous in the tensor."""
    import torch

    limit = max(step, min(MAX_ELEMENTS, context.budget // 2 // ELEMENT_NBYTES))
    held = torch.empty(limit + step, dtype=tensor.torch_dtype)
    strides = contiguous_strides(tensor.shape, 1)
    offset = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    count = 0
    for part in _readable(tensor, box, limit):
        if count + part.numel > held.numel():  # one that could not be cut smaller
            held = torch.cat([held[:count], held.new_empty(part.numel)])
        place = held[count : count + part.numel].view(part.sizes)
        if tensor.encoding == "dense":  # the stored bytes are the values: no copy between
            fill(context.files, tensor.parts[""], part, tensor_bytes(place))
        else:
            tensor.read_into(part, place)
        count += part.numel
        ready = count - count % step
        if ready:
            yield offset, held[:ready].to(context.device)
            held[: count - ready] = held[ready:count].clone()
            offset, count = offset + ready, count - ready
    if count:
        yield offset, held[:count].to(context.device)


def _readable(tensor: LazyTensor, box: Box, limit: int) -> Iterator[Box]:
    """Row-major parts of a box that all stored parts can be cut for; else the box itself.

    An encoded source reads whole rows for a few columns, so rows count in full.
    """
    if tensor.encoding != "dense" and box.numel:
        rows = prod(tensor.shape[1:]) // prod(box.sizes[1:])
        limit = max(1, limit // max(1, rows))
    for part in row_major_boxes(box, limit):
        cuts = [tensor.encoding_.part_box(tensor.info, name, part) for name in tensor.parts]
        if None in cuts:
            assert part.offsets == box.offsets, "cut in some places only"
            yield box
            return
        yield part


# ----------------------------------------------------------------------------- comparisons


def compare(context: Context, step: Compare) -> None:
    """Raise RunError CKM310 where a replica differs: by CRC-32 where both sides have one for
    exactly this box, else byte by byte."""
    replica, tensor = step.replica, step.tensor
    for chunk in tensor.chunks:
        if chunk.box == replica.box and None not in (chunk.crc32, replica.crc32):
            if chunk.crc32 != replica.crc32:
                raise _differs(step, chunk.region.file)
            return
    other = StoredTensor(tensor.info, [replica])
    itemsize = tensor.info.itemsize
    for box in row_major_boxes(replica.box, COMPARE_NBYTES // itemsize):
        ours, theirs = bytearray(box.numel * itemsize), bytearray(box.numel * itemsize)
        fill(context.files, tensor, box, memoryview(ours))
        fill(context.files, other, box, memoryview(theirs))
        if ours != theirs:
            raise _differs(step, next(region.file for _, region in tensor.pieces(box)))
        context.advance(0, step.key)


def _differs(step: Compare, file: str) -> RunError:
    return RunError(
        "CKM310",
        f"{step.key}: the replica at {list(step.replica.box.offsets)} in "
        f"{step.replica.region.file} differs from {file}, expected the same bytes",
        "the ranks did not hold the same values: find out which is right, or drop the key",
    )
