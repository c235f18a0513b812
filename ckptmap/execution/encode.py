"""Encode one tensor into its output slots, or compare a replica with the tensor that it repeats.

Tensors whose bytes do not change are not encoded: see `copy`. Every byte is read once and written
once. The digest of a slot (and its CRC-32, where the container stores one) is computed in the same
pass, in row-major order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, starmap
from math import prod
from typing import TYPE_CHECKING

from ckptmap.core.printable import advised
from ckptmap.core.quantized_codes import CoarseScales, CodeGrid, CountsFlips
from ckptmap.errors import Interrupted, RunError, SourceError
from ckptmap.execution import cuda_ring
from ckptmap.execution.copy import Context, buffer_nbytes, recorded
from ckptmap.execution.smaller_feeds import TensorProgress, with_smaller_feeds
from ckptmap.planning.file_plan import Compare, Encode, SlotRef
from ckptmap.planning.kept_codes import writes_keeping_codes
from ckptmap.protocols import Encoder, LooksFirst, Refusal, Write
from ckptmap.protocols.encodings import DecodesOnHost
from ckptmap.protocols.offers import offers
from ckptmap.quantization.blockwise.chunks import smaller
from ckptmap.quantization.blockwise.group_checks import NOT_FINITE
from ckptmap.storage.box_reader import row_major_boxes
from ckptmap.storage.device_copies import fill_tensor
from ckptmap.storage.direct_io import Buffer, Stream
from ckptmap.storage.journal import Written
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.replicas import require_same
from ckptmap.storage.tensor_bytes import tensor_bytes
from ckptmap.tensors import Box, TensorInfo, contiguous_strides
from ckptmap.typed_options import as_given

if TYPE_CHECKING:
    import torch


PART_BUFFER = 1 << 20
"""Bytes buffered for each part (codes, scales, ...) of an encoded tensor before a write."""
FEED_NBYTES = 2 << 20
"""Bytes of values encoded at once, of the input or the output, whichever is larger. With fewer,
threads spend their time on the interpreter lock; more do not fit in the cache."""
ELEMENT_NBYTES = 16
"""Bytes of memory for each element that a CPU encodes at once: the values, temporaries and results."""
RECODED = 1 << 19
"""Elements whose codes are moved at once."""


def encode(context: Context, step: Encode, buffer: Buffer) -> Sequence[Written]:
    """Write one logical tensor in its new encoding, from its kept codes or its decoded values.

    Returns the records of the slots that were written. Errors name the tensor. Where the device runs
    out of memory, the tensor is encoded again with smaller feeds.
    """
    progress = TensorProgress(context.advance)
    again = replace(context, advance=progress.advance)
    return with_smaller_feeds(
        context.feed_size, context.device, lambda: _encode(again, step, buffer),
        fqn=step.tensor.fqn, again=progress.again,
    )  # fmt: skip


def _encode(context: Context, step: Encode, buffer: Buffer) -> Sequence[Written]:
    try:
        if step.keeps is not None:
            return _recode(context, step, step.keeps, buffer)
        device = _device(context, step)
        encoder = step.encoding.encoder(step.tensor.info, device)
        parts = _encoded_parts(step)
        alone = encoder.splittable and list(parts) == [""]
        if alone and parts[""].shape == step.tensor.info.shape:
            return _encode_slots(context, step, encoder, device, parts[""].itemsize, buffer)
        return _encode_parts(context, step, encoder, device, parts, buffer)
    except Interrupted:
        raise
    except CoarseScales as error:
        raise error.of(step.tensor.fqn) from error
    except RunError as error:
        name = step.tensor.fqn
        hint = error.hint.replace(as_given("--no-encode"), advised(no_encode=name))
        raise type(error)(error.code, f"{name}: {error.message}", hint) from error
    except SourceError as error:
        if error.hint != NOT_FINITE or len(step.tensor.parts) < 2:
            raise
        hint = f"{NOT_FINITE}, or keep its codes as they are, {advised(no_encode=step.tensor.fqn)}"
        raise type(error)(error.code, error.message, hint) from error


def _encoded_parts(step: Encode) -> Mapping[str, TensorInfo]:
    """Return the parts that the step writes; others of the encoding are copied."""
    parts = step.encoding.parts(step.tensor.info)
    assert not isinstance(parts, Refusal), f"{step.tensor.fqn}: refused: {parts.reason}"
    return {part: info for part, info in parts.items() if part in step.targets}


def _device(context: Context, step: Encode) -> str:
    """Return where the values are computed.

    Dense values that become dense ones ("dense rearranged" are read so) stay on the CPU: there and back
    by the link takes longer than a cast. So do those that only the CPU computes.
    """
    if offers(step.tensor.encoding_, DecodesOnHost):
        return "cpu"
    is_dense = step.tensor.encoding in ("dense", "dense rearranged")
    return "cpu" if is_dense and step.encoding.name == "dense" else context.device


def _encode_slots(
    context: Context, step: Encode, encoder: Encoder, device: str, itemsize: int, buffer: Buffer
) -> Sequence[Written]:
    """Write slot by slot, each encoded alone: for casts and for decoding to a dense tensor."""
    written = []
    widest = max(itemsize, step.tensor.info.itemsize)
    for target in step.targets[""]:
        slot = context.slot(target)
        with context.outputs.file(target.file) as output:
            stream = Stream(output, slot.offset, buffer, context.sums(target))
            feeds = _values(context, step.tensor, slot.box, encoder.step, device, widest)
            writes = chain.from_iterable(starmap(encoder.feed, feeds))
            for write in cuda_ring.landed(writes, device):
                nbytes = _append(stream, write)
                context.advance(nbytes, step.tensor.fqn)
            sums = stream.finish()
        written.append(recorded(context, target, sums.digest, sums.crc32))
    assert not list(encoder.finish()), "a splittable encoder with one part has nothing to add"
    return written


def _encode_parts(
    context: Context,
    step: Encode,
    encoder: Encoder,
    device: str,
    parts: Mapping[str, TensorInfo],
    buffer: Buffer,
) -> Sequence[Written]:
    """Feed the whole tensor in row-major order; write each part to the slots that tile it."""
    streams = _part_streams(context, step, parts, buffer)
    whole = Box.whole(step.tensor.info.shape)
    widest = step.tensor.info.itemsize
    if isinstance(encoder, LooksFirst):
        for _, values in _values(context, step.tensor, whole, encoder.step, device, widest):
            encoder.look(values)
    feeds = _values(context, step.tensor, whole, encoder.step, device, widest)
    writes = chain.from_iterable(starmap(encoder.feed, feeds))
    for write in cuda_ring.landed(writes, device):
        context.advance(streams[write.part].append(write), step.tensor.fqn)
    for write in encoder.finish():
        context.advance(streams[write.part].append(write), step.tensor.fqn)
    if offers(encoder, CountsFlips) and encoder.sign_flips:
        raise CoarseScales.count(encoder.sign_flips)
    return [item for stream in streams.values() for item in stream.finish()]


def _part_streams(
    context: Context, step: Encode, parts: Mapping[str, TensorInfo], buffer: Buffer
) -> dict[str, _PartStream]:
    """Return a stream for each part, each with its share of the thread's buffer."""
    largest = [max(context.slot(target).nbytes for target in step.targets[name]) for name in parts]
    buffers = buffer.parts([min(PART_BUFFER, nbytes) for nbytes in largest])
    return {
        name: _PartStream(context, info, step.targets[name], held)
        for (name, info), held in zip(parts.items(), buffers, strict=True)
    }


def _recode(context: Context, step: Encode, grid: CodeGrid, buffer: Buffer) -> Sequence[Written]:
    """Write the tensor with its codes unchanged and its scales encoded anew."""
    parts = _encoded_parts(step)
    streams = _part_streams(context, step, parts, buffer)
    limit = max(1, min(RECODED, context.budget // 8))
    for write in writes_keeping_codes(step.tensor, step.encoding, grid, limit):
        context.advance(streams[write.part].append(write), step.tensor.fqn)
    return [item for stream in streams.values() for item in stream.finish()]


class _PartStream:
    """Writes the row-major bytes of one part to the slots that tile it along its first dim."""

    def __init__(
        self, context: Context, info: TensorInfo, targets: Sequence[SlotRef], buffer: Buffer
    ) -> None:
        self._context, self._info = context, info
        self._targets = sorted(targets, key=lambda target: context.slot(target).box.offsets[:1])
        for target in targets:
            box = context.slot(target).box
            whole_rows = Box((*box.offsets[:1], *(0,) * len(info.shape[1:])), box.sizes)
            assert box == whole_rows and box.sizes[1:] == info.shape[1:], "a part is cut by rows"
        self._buffer = buffer
        self._at = 0
        self._stream: Stream | None = None
        self._done: list[Written] = []

    def append(self, write: Write) -> int:
        """Write values that follow those of the call before; return their bytes."""
        start = write.box.offsets[0] if write.box.offsets else 0
        assert start * self._info.itemsize == self._at, f"{write.part}: writes must follow"
        values = write.values.detach().cpu().contiguous()
        data = tensor_bytes(values)
        self._at += data.nbytes
        while data.nbytes:
            data = data[self._put(data) :]
        return values.nbytes

    def _put(self, data: memoryview) -> int:
        """Write what fits into the current slot; return the bytes that it took."""
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
                self._done.append(recorded(self._context, target, sums.digest, sums.crc32))
                self._stream = None
        return min(left, data.nbytes)

    def finish(self) -> Sequence[Written]:
        """Return the records of the slots in order, empty slots included.

        Called when all bytes were appended.
        """
        while len(self._done) < len(self._targets):
            target = self._targets[len(self._done)]
            assert not self._context.slot(target).nbytes, f"{target} was not filled"
            sums = self._context.sums(target)
            self._done.append(recorded(self._context, target, sums.digest, sums.crc32))
        return self._done


def _append(stream: Stream, write: Write) -> int:
    values = write.values.detach().cpu().contiguous()  # a name keeps the memory of the view alive
    stream.append(tensor_bytes(values))
    return values.nbytes


def _values(
    context: Context, tensor: LazyTensor, box: Box, step: int, device: str, widest: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (flat offset, 1-D values on the device) of a box in row-major order.

    Each has a multiple of `step` elements, except the last, and about FEED_NBYTES on a CPU where the
    budget allows it; `widest` is the size of an element, before or after. The offset is that of the
    first element in the whole tensor, which is exact where the box is contiguous in it.
    """
    most = min(FEED_NBYTES // widest, context.budget // 2 // ELEMENT_NBYTES)
    budget = context.budget - buffer_nbytes(context.budget)
    limit = max(step, smaller(cuda_ring.feed_numel(device, budget, widest, most)))
    feeds = cuda_ring.Feeds(device, limit + step, tensor.torch_dtype)
    strides = contiguous_strides(tensor.shape, 1)
    offset = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    count = 0
    for part in _readable(tensor, box, limit):
        place = feeds.room(count, part.numel).view(part.sizes)
        if tensor.encoding == "dense":  # the stored bytes are the values: read them in place
            fill_tensor(context.files, tensor.parts[""], part, place, feeds.free)
        else:
            tensor.read_into(part, place)
        count += part.numel
        ready = count - count % step
        if ready:
            yield offset, feeds.values(ready)
            feeds.keep(ready, count)
            offset, count = offset + ready, count - ready
    if count:
        yield offset, feeds.values(count)


def _readable(tensor: LazyTensor, box: Box, limit: int) -> Iterator[Box]:
    """Yield boxes that tile `box` in row-major order, each of at most `limit` elements.

    Yields `box` itself where the stored parts cannot be cut for smaller boxes. An encoded source
    reads whole rows for a few columns, so a row counts with all of its columns.
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
    """Raise RunError CKM310 if a replica differs from the tensor that it repeats."""
    replica, tensor = step.replica, step.tensor
    crc32 = next((chunk.crc32 for chunk in tensor.chunks if chunk.box == replica.box), None)
    require_same(
        context.files, step.key, tensor, replica, crc32,
        hint=step.hint, alive=lambda: context.advance(0, step.key),
    )  # fmt: skip
