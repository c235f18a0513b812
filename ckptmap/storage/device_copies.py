"""Copy between files and a device through pinned memory, while the next bytes are read and values computed.

    file -> pinned block of the thread -> device (side stream) -> kernels (current stream)
                                       -> pinned block of the thread (current stream) -> file

The host never waits for the whole device: it waits for the copy out of one block before it fills that block
again. A thread has one `Lanes` for each device, with its streams and blocks, and uses it for every tensor.

Nearly every call of torch gives up Python's global lock and takes it back. With 16 threads that read, each
of these calls waits for the others: 12 a block kept a GPU's link at a quarter of its rate (see "On a
GPU" in `benchmarks/RESULTS_PARTS.md`). So the loop over blocks in `fill_tensor` makes as few as it can.

safetensors 0.9 (a release candidate in November 2026) brings `safe_open.prefetch`, which reads a file into
memory of a GPU by threads of its own. It is not used: what it reads passes no code that compares checksums,
the device memory that it takes has no bound, and a tensor comes whole or as planned ahead. `make gpu` (step
`save`) measures it beside `load` where it is installed.

Blocks have exactly 2^n bytes, because the allocator of pinned memory rounds up to that: a block of one byte
more would take twice the memory.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptmap.core.rearranged_tensors import ZEROS
from ckptmap.storage.box_reader import Run, fill, row_major_boxes, run_of
from ckptmap.storage.crew import Crew
from ckptmap.storage.files import Files
from ckptmap.storage.pinned_memory import copies_pinned, lasting_memory
from ckptmap.storage.tensor_bytes import tensor_bytes
from ckptmap.tensors import Box, StoredTensor

if TYPE_CHECKING:
    import torch

DEPTH = 2
"""Blocks in each direction, and results that may be on their way back at a time."""
BLOCK_NBYTES = 16 << 20
"""Bytes of a block, unless a caller asks for other ones: a GPU's link is at its full rate from 4 MiB on."""
SHARED = 4
"""Blocks from which on a run is shared by several threads."""
_ALIGN = 64

_threads = threading.local()


class Blocks:
    """DEPTH blocks of pinned memory that copies use in turn; small ones share a block.

    memory  what they are made of, DEPTH * nbytes bytes, u8; None: new memory for each
    """

    def __init__(self, nbytes: int, memory: torch.Tensor | None = None) -> None:
        self.nbytes = nbytes
        self.turn = 0
        lent = None if memory is None else memory.view(DEPTH, nbytes)
        self._blocks = [lasting_memory(nbytes) if lent is None else lent[n] for n in range(DEPTH)]
        self._bytes: list[memoryview | None] = [None] * DEPTH
        self._taken = (0, 0)
        self._ends: list[Any] = [None] * DEPTH
        self._used = 0

    def next_turn(self, nbytes: int) -> int:
        """Return the number of the block that `take` will use."""
        return self.turn if self._used + nbytes <= self.nbytes else (self.turn + 1) % DEPTH

    def take(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of a block, u8; the copies that used the block before have ended."""
        assert nbytes <= self.nbytes, f"{nbytes} bytes of a block of {self.nbytes}"
        turn = self.next_turn(nbytes)
        if turn != self.turn:
            self.turn, self._used = turn, 0
            end = self._ends[turn]
            if end is not None and not end.query():
                end.synchronize()
        whole, start = self._blocks[turn], self._used
        self._used += -(-nbytes // _ALIGN) * _ALIGN
        self._taken = (start, nbytes)
        return whole if nbytes == self.nbytes else whole.narrow(0, start, nbytes)

    @property
    def taken(self) -> memoryview:
        """The bytes of what was taken last."""
        whole = self._bytes[self.turn]
        if whole is None:
            whole = self._bytes[self.turn] = tensor_bytes(self._blocks[self.turn])
        start, nbytes = self._taken
        return whole if nbytes == self.nbytes else whole[start : start + nbytes]

    def wait(self) -> None:
        """Wait until all copies that use the blocks have ended."""
        for end in self._ends:
            if end is not None:
                end.synchronize()

    @property
    def end(self) -> Any:
        """The event at whose end what was taken before in this block may be overwritten; None: there is none."""
        return self._ends[self.turn]

    def used_until(self, end: object) -> None:
        """State the event at whose end what was taken last may be overwritten."""
        self._ends[self.turn] = end


class Lanes:
    """Two streams of a device: the current one runs kernels, a side stream uploads values.

    crew  the threads that may help this one to fill a large tensor; None: there are none
    """

    crew: Crew | None = None

    def __init__(self, device: str | torch.device) -> None:
        import torch

        self.device = torch.device(device)
        self._streams: Any = torch.get_device_module(self.device)
        self._side = self._streams.Stream(device=self.device)
        self._blocks: dict[str, Blocks] = {}
        self.block_nbytes = BLOCK_NBYTES

    def blocks(self, direction: str) -> Blocks:
        """Return the blocks for "up" or "down", of `block_nbytes` each."""
        held = self._blocks.get(direction)
        if held is None or held.nbytes != self.block_nbytes:
            held = self._blocks[direction] = Blocks(self.block_nbytes)
        return held

    def lend(self, direction: str, blocks: Blocks) -> None:
        """Use these blocks for a direction, as long as blocks of their size are asked for."""
        self._blocks[direction] = blocks

    @contextmanager
    def uploading(self, free: object) -> Iterator[None]:
        """Let `upload` inside the `with` block copy after the event `free`.

        Kernels that are launched after the block wait for its copies. No kernel and no new tensor of the
        device may be inside it.
        """
        current = self._streams.current_stream(self.device)
        self._side.wait_event(free)
        with self._streams.stream(self._side):
            try:
                yield
            finally:
                current.wait_stream(self._side)

    def upload(self, there: torch.Tensor, here: torch.Tensor, again: Any = None) -> object:
        """Copy `here` to the device, inside `uploading`; return the event of the copy's end.

        again  an event of an earlier copy: who waits for it waits for this copy, too
        """
        there.copy_(here, non_blocking=True)
        gone = self._streams.Event() if again is None else again
        gone.record(self._side)
        return gone

    def download(self, here: torch.Tensor, there: torch.Tensor) -> object:
        """Copy `there` to the host after the kernels launched so far; return the event of its end.

        The copy is on the stream of the kernels, so later kernels may reuse the device memory.
        """
        here.copy_(there, non_blocking=True)
        return self.mark()

    def mark(self) -> object:
        """Return the event of the end of all work launched so far on the current stream."""
        event = self._streams.Event()
        event.record(self._streams.current_stream(self.device))
        return event


def lanes(device: str | torch.device) -> Lanes | None:
    """Return this thread's streams and blocks of a device; None where a device, or the CPU, has none."""
    import torch

    at = torch.device(device)
    if not copies_pinned(at):
        return None
    module: Any = torch.get_device_module(at)
    if ":" not in str(at):
        at = torch.device(at.type, module.current_device())
    held: dict[torch.device, Lanes] = _threads.__dict__.setdefault("lanes", {})
    if at not in held:
        held[at] = Lanes(at)
    return held[at]


def bound_blocks(device: str | torch.device, budget: int, directions: int = 2) -> int:
    """Make the blocks of this thread fit `budget` bytes, those of both `directions` together; 1: nothing
    comes back.

    Return the bytes of those for one direction, 0 where values need none.
    """
    way = lanes(device)
    if way is None:
        return 0
    way.block_nbytes = block_nbytes(budget, directions)
    return DEPTH * way.block_nbytes


def block_nbytes(budget: int, directions: int) -> int:
    """Return the bytes of a block, where those of `directions` fit `budget` bytes together."""
    most = max(4096, budget // (directions * DEPTH))
    return min(BLOCK_NBYTES, 1 << (most.bit_length() - 1))


def one_memory(count: int, nbytes: int) -> tuple[torch.Tensor, list[Blocks]]:
    """Return a memory, and blocks of `nbytes` each for `count` threads that are made of it.

    To register it at once takes a sixth of the time that it takes piece by piece.
    """
    memory = lasting_memory(count * DEPTH * nbytes)
    return memory, [Blocks(nbytes, one) for one in memory.view(count, DEPTH * nbytes).unbind()]


class HoldsValues(StoredTensor):
    """A stored tensor whose values are tensors in memory, perhaps on a device."""

    __slots__ = ()

    @abstractmethod
    def copy_into(self, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (box.sizes, any device) with a box of the values, without a way through the host."""


def fill_tensor(
    files: Files, stored: StoredTensor, box: Box, out: torch.Tensor, free: object = None
) -> None:
    """Fill `out` (box.sizes, the stored dtype, row-major, on any device) with `box` of a stored tensor.

    On a device with streams the copies may go on when this returns; kernels that are launched later
    wait for them. `free` is the event after which `out` may be overwritten, by default the end of
    what is launched now. Raises as `fill` does.
    """
    import torch

    if isinstance(stored, HoldsValues):
        stored.copy_into(box, out)
        return
    way = lanes(out.device)
    if way is None and out.device.type == "cpu":
        fill(files, stored, box, tensor_bytes(out))
        return
    if way is None:
        _copy_blocks(files, stored, box, out)
        return
    flat = out.view(-1).view(torch.uint8)
    free = way.mark() if free is None else free
    run = run_of(stored, box)
    if run is not None and run.file != ZEROS and run.nbytes:
        _send_run(files, run, flat, way, free)
    else:
        _send_parts(files, stored, box, flat, way, free)


def _copy_blocks(files: Files, stored: StoredTensor, box: Box, out: torch.Tensor) -> None:
    """Fill a tensor of a device without streams, a block of pageable memory at a time."""
    import torch

    parts = row_major_boxes(box, BLOCK_NBYTES // stored.info.itemsize) if box.numel else ()
    flat, at = out.view(-1), 0
    for part in parts:
        here = torch.empty(part.numel, dtype=out.dtype, device="cpu")
        fill(files, stored, part, tensor_bytes(here))
        flat.narrow(0, at, part.numel).copy_(here)
        at += part.numel


def _send_parts(
    files: Files, stored: StoredTensor, box: Box, flat: torch.Tensor, way: Lanes, free: object
) -> None:
    """Fill `flat` with a box that lies in several places."""
    blocks, itemsize = way.blocks("up"), stored.info.itemsize
    parts = [part for part in row_major_boxes(box, blocks.nbytes // itemsize) if part.numel]
    places = flat.split_with_sizes([part.numel * itemsize for part in parts])
    with way.uploading(free):
        for part, there in zip(parts, places, strict=True):
            here = blocks.take(there.nbytes)
            fill(files, stored, part, blocks.taken)
            blocks.used_until(way.upload(there, here, blocks.end))


def _send_run(files: Files, run: Run, flat: torch.Tensor, way: Lanes, free: object) -> None:
    """Fill `flat` with a run of bytes of one file, a block at a time; other threads of the crew may take blocks of
    a long one."""
    import torch

    step = way.blocks("up").nbytes
    places = torch.split(flat, step)
    pieces = deque(range(len(places)))
    if way.crew is None or len(places) < SHARED or files.sums.needs_order(*run):
        _send_blocks(files, run, places, pieces, way, free)
        return

    def work() -> None:
        mine = lanes(way.device)
        assert mine is not None, "a crew has streams on the device"
        mine.block_nbytes = step
        _send_blocks(files, run, places, pieces, mine, free)

    way.crew.run(pieces, work)


def _send_blocks(
    files: Files, run: Run, places: Sequence[torch.Tensor], pieces: deque[int], way: Lanes, free: object
) -> None:  # fmt: skip
    """Bring pieces of a run to their places, as long as there are any."""
    blocks = way.blocks("up")
    with way.uploading(free):
        while pieces:
            try:
                number = pieces.popleft()
            except IndexError:  # another thread has taken the last one
                return
            there = places[number]
            here = blocks.take(there.nbytes)
            files.read_into(run.file, run.offset + number * blocks.nbytes, [blocks.taken])
            blocks.used_until(way.upload(there, here, blocks.end))
