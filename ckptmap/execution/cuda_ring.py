"""Bring values to a device and results back, while other values are read and encoded.

    file -> buffer of the device (see `device_copies`) -> encoded (current stream)
                                      -> pinned result (current stream) -> written to the file

While one box is encoded, the next one is read and copied: there are DEPTH buffers, and as many results
may be on their way back. On the CPU there is one buffer, and the encoder reads it directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptmap.protocols import Write
from ckptmap.quantization.blockwise.chunks import DEVICE_NUMEL
from ckptmap.storage import device_copies
from ckptmap.storage.device_copies import DEPTH, Lanes
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch


FEED_BLOCKS = 4
"""Blocks of pinned memory by which the values of one feed come."""


class Feeds:
    """Buffers of values in row-major order, on the device that encodes them.

    Fill `room`, take `values`, then call `keep`, which moves the values that were not taken to the
    start of the next buffer.
    """

    def __init__(self, device: str, numel: int, dtype: torch.dtype) -> None:
        import torch

        self._way = device_copies.lanes(device)
        count = 1 if self._way is None else DEPTH
        self._buffers = [torch.empty(numel, dtype=dtype, device=device) for _ in range(count)]
        # Earlier kernels may still use the allocator's memory.
        self._free = [None if self._way is None else self._way.mark()] * count
        self._turn = 0

    @property
    def free(self) -> object:
        """The event after which `room` may be filled; None: it is free."""
        return self._free[self._turn]

    def room(self, count: int, numel: int) -> torch.Tensor:
        """Return the place of `numel` values after the first `count`, which stay."""
        buffer = self._buffers[self._turn]
        if count + numel > buffer.numel():
            wide = self._buffers[self._turn] = buffer.new_empty(count + numel)
            wide.narrow(0, 0, count).copy_(buffer.narrow(0, 0, count))
            self._free[self._turn] = self._way and self._way.mark()
            buffer = wide
        return buffer.narrow(0, count, numel)

    def values(self, count: int) -> torch.Tensor:
        """Return the first `count` values, which are valid until `keep`."""
        return self._buffers[self._turn].narrow(0, 0, count)

    def keep(self, taken: int, count: int) -> None:
        """Turn to the next buffer, with the values from `taken` to `count` at its start.

        The kernels that read the values are launched by now.
        """
        at, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        left = self._buffers[at].narrow(0, taken, count - taken)
        if left.numel():
            left = left.clone() if at == self._turn else left
            self.room(0, left.numel()).copy_(left)
        self._free[at] = self._way and self._way.mark()


def feed_numel(device: str, budget: int, widest: int, on_cpu: int) -> int:
    """Return how many elements to feed at once; `widest` is the most bytes of one, before or after.

    On a device the values of a feed come in FEED_BLOCKS blocks at most, one after the other, and so do its
    results. `on_cpu` is the answer for a CPU, and for a device without streams.
    """
    device_copies.bound_blocks(device, budget)
    way = device_copies.lanes(device)
    return on_cpu if way is None else min(DEVICE_NUMEL, FEED_BLOCKS * way.block_nbytes // widest)


class _Coming(NamedTuple):
    """A result on its way back: what to write, the event of its arrival, and the block that it comes to."""

    write: Write
    arrival: Any
    block: int


def landed(writes: Iterable[Write], device: str) -> Iterator[Write]:
    """Yield the writes in order with their values on the CPU, valid until the next one is asked for.

    Up to DEPTH results are copied back while the encoder computes later ones. One that is larger than
    a block comes back in several writes, so that no pinned memory is taken beside the blocks.
    """
    way = device_copies.lanes(device)
    if way is None:
        yield from writes
        return
    coming = deque[_Coming]()
    try:
        yield from _landed(way, writes, coming)
    finally:  # after an error, the next attempt finds no copy under way to the blocks
        for result in coming:
            result.arrival.synchronize()


def _landed(way: Lanes, writes: Iterable[Write], coming: deque[_Coming]) -> Iterator[Write]:
    for write in writes:  # whoever makes the first one has bounded the blocks
        blocks = way.blocks("down")
        if write.values.device.type != way.device.type or not write.values.numel():
            yield from _arrived(coming, 0)
            yield write
            continue
        for part in _in_blocks(write, blocks.nbytes):
            turn = blocks.next_turn(part.values.nbytes)
            if turn != blocks.turn:  # what the block holds is written before it is used again
                yield from _arrived(coming, sum(result.block != turn for result in coming))
            coming.append(_sent_back(way, part))
            yield from _arrived(coming, DEPTH)
    yield from _arrived(coming, 0)


def _in_blocks(write: Write, nbytes: int) -> Iterator[Write]:
    """Yield the write in runs of at most `nbytes` each; its values are flat."""
    values = write.values.detach().contiguous()
    start, step = write.box.offsets[0], nbytes // values.element_size()
    if values.numel() <= step:
        yield Write(write.part, write.box, values)
        return
    for at in range(0, values.numel(), step):
        part = values.narrow(0, at, min(step, values.numel() - at))
        yield Write(write.part, Box((start + at,), (part.numel(),)), part)


def _sent_back(way: Lanes, write: Write) -> _Coming:
    blocks, values = way.blocks("down"), write.values
    here = blocks.take(values.nbytes).view(values.dtype).view(values.shape)
    arrival = way.download(here, values)
    return _Coming(Write(write.part, write.box, here), arrival, blocks.turn)


def _arrived(coming: deque[_Coming], leave: int) -> Iterator[Write]:
    """Yield the first results, all but `leave` of them."""
    while len(coming) > leave:
        write, arrival, _ = coming.popleft()
        arrival.synchronize()
        yield write
