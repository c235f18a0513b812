"""Reads boxes of a checkpoint's tensors into live tensors, through buffers of bounded size.

A tensor on a device is filled through the pinned blocks of the thread: the next box is read while the copy
of this one runs (see `storage.device_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ckptmap.execution.smaller_feeds import OF_A_LOAD, FeedSize, with_smaller_feeds
from ckptmap.live.model.load_report import Meter
from ckptmap.live.model.reader_memory import ReaderMemory
from ckptmap.live.model.reader_threads import ReaderThreads, count_for, that_pay
from ckptmap.live.model.value_range import Casts, check_together
from ckptmap.quantization.blockwise.chunks import smaller
from ckptmap.storage import device_copies
from ckptmap.storage.box_reader import row_major_boxes
from ckptmap.storage.files import Files
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.pinned_memory import copies_pinned
from ckptmap.storage.tensor_bytes import tensor_bytes
from ckptmap.tensors import Box, StoredTensor

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

DECODE_COPIES = 4
"""Buffers of the size of a decoded box that decoding holds at once: codes, scales, values, result."""


class TensorReader:
    """Fills tensors on any device, with at most `max_memory` bytes of host buffers at a time.

    devices  those of the tensors that `run_all` fills, the CPU left out
    """

    def __init__(self, files: Files, max_memory: int, devices: Sequence[torch.device] = ()) -> None:
        self.files = files
        self.max_memory = max_memory
        self.meter = Meter()
        self.devices = devices
        self.threads = count_for(devices, max_memory)
        self._directions = max(1, sum(map(copies_pinned, devices)))
        self._pinned: ReaderMemory | None = None
        self._pool: ReaderThreads | None = None
        self._feed_size = FeedSize()
        self._later: list[Casts] | None = None
        """The casts of one `run_all`, which the device is asked of at its end."""

    def run(self, step: Callable[[TensorReader], T]) -> T:
        """Run a step that fills one tensor; again with smaller buffers where a device runs out of memory.

        A step may be run again: it overwrites what an attempt has left. Raises RunError CKM313 where the
        smallest buffers are too much.
        """
        return with_smaller_feeds(self._feed_size, None, lambda: step(self), hint=OF_A_LOAD)

    def run_all(
        self, steps: Sequence[Callable[[TensorReader], T]], nbytes: Iterable[int]
    ) -> Iterator[T]:
        """Run steps that fill different tensors; yield what each returns, in their order.

        Threads run them side by side where the tensors are on a device. Raises as `run` does; steps after the
        one that failed may have run by then, or in part. What a cast on a device has lost is raised at the end.

        nbytes  the bytes that each fills, taken only where there are several threads
        """
        sizes = list(nbytes) if self.threads > 1 else []
        count = that_pay(self.threads, sizes, self._can_share)
        is_alone = self._pool is None and count == 1
        each = copy(self) if is_alone else self._share()
        each._later = []
        if is_alone:
            yield from map(each.run, steps)
        else:
            yield from self._threads(count, each).in_order(
                [partial(each.run, step) for step in steps], sizes
            )
        check_together(each._later)

    def _threads(self, count: int, each: TensorReader) -> ReaderThreads:
        if self._pool is None:
            memory = self._pinned or ReaderMemory(self.devices, count, each.block_nbytes)
            self._pinned = memory
            self._pool = ReaderThreads(min(count, memory.count), self.devices, memory)
        return self._pool

    def prepare(self, nbytes: Iterable[int]) -> None:
        """Begin to make the memory of the threads that `run_all` will need for tensors of `nbytes` each, while the
        caller goes on. `close` gives it back."""
        if self.threads > 1 and self._pinned is None:
            count = that_pay(self.threads, list(nbytes), shared=True)
            if count > 1:
                self._pinned = ReaderMemory(self.devices, count, self._share().block_nbytes)

    def close(self) -> None:
        """End the threads that `run_all` has started, and give their memory back. Returns when they have ended."""
        pool, memory, self._pool, self._pinned = self._pool, self._pinned, None, None
        if pool is not None:
            pool.close()
        elif memory is not None:
            memory.give_back()

    @property
    def block_nbytes(self) -> int:
        """The bytes of a pinned block: those of all devices are within `max_memory` together."""
        return device_copies.block_nbytes(self.max_memory, self._directions)

    @property
    def _can_share(self) -> bool:
        """Do threads help each other? Not where digests are compared that must be computed in order."""
        return not self.files.sums.has_ordered

    def _share(self) -> TensorReader:
        """Return a reader for each of the threads, with its share of the memory and the same counts."""
        each = copy(self)
        each.max_memory = max(1, self.max_memory // self.threads)
        return each

    def dense(self, source: LazyTensor, box: Box, out: torch.Tensor) -> None:
        """Read `box` of a dense tensor into `out` (box.sizes, any floating or the same dtype)."""
        self._stored(source.parts[""], box, out, source.fqn)

    def rounded(self, source: LazyTensor, box: Box, out: torch.Tensor, seed: int) -> None:
        """Read `box` of a float32 tensor into `out` in bfloat16, rounded stochastically, so that the
        mean error is zero. The bits of a box depend on the seed alone."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        numel = min(box.numel, max(1, self.max_memory // (3 * 4)))
        with self.meter.hold(3 * numel * 4, torch.device("cpu")):
            for part in row_major_boxes(box, numel):
                values = torch.empty(part.sizes, dtype=torch.float32)
                self.decoded(source, part, values)
                view = window(out, part.relative_to(box.offsets))
                view.copy_(stochastic(values, generator))

    def part(self, source: LazyTensor, name: str, box: Box, device: torch.device) -> torch.Tensor:
        """Return a box of one stored part, `qdata` for one, as a new tensor in its stored dtype."""
        import torch

        stored = source.parts[name]
        out = torch.empty(box.sizes, dtype=getattr(torch, stored.info.dtype), device=device)
        self._stored(stored, box, out, source.fqn)
        return out

    def _stored(self, stored: StoredTensor, box: Box, out: torch.Tensor, name: str) -> None:
        """Read straight into `out` where its bytes are those of the file, else through a buffer on its
        device that is cast."""
        import torch

        dtype: torch.dtype = getattr(torch, stored.info.dtype)
        pinned = device_copies.bound_blocks(out.device, self.max_memory, self._directions)
        if out.dtype == dtype and is_as_it_lies(out):
            with self.meter.hold(pinned, torch.device("cpu")):
                device_copies.fill_tensor(self.files, stored, box, out)
            return
        casts = Casts(name, dtype, out.dtype, self._later)
        itemsize = stored.info.itemsize * (DECODE_COPIES if casts.looks else 1)
        numel = min(box.numel, smaller(max(1, self.max_memory // itemsize)))
        with self.meter.hold(numel * itemsize, out.device):
            staging = torch.empty(numel, dtype=dtype, device=out.device)
            for part in row_major_boxes(box, numel):
                values = staging[: part.numel].view(part.sizes)
                device_copies.fill_tensor(self.files, stored, part, values)
                casts.copy(window(out, part.relative_to(box.offsets)), values)
            casts.check()

    def decoded(self, source: LazyTensor, box: Box, out: torch.Tensor) -> None:
        """Read `box` of a tensor of any encoding into `out`: decode on its device, then cast."""
        import torch

        itemsize = source.info.itemsize
        most = smaller(max(1, self.max_memory // (DECODE_COPIES * itemsize)))
        casts = Casts(source.fqn, source.torch_dtype, out.dtype, self._later)
        device_copies.bound_blocks(out.device, self.max_memory, self._directions)
        for part in row_major_boxes(box, most):
            with self.meter.hold(DECODE_COPIES * part.numel * itemsize, out.device):
                values = torch.empty(part.sizes, dtype=source.torch_dtype, device=out.device)
                source.read_into(part, values)
                casts.copy(window(out, part.relative_to(box.offsets)), values)
        casts.check()

    def codes(self, source: LazyTensor, box: Box, out: torch.Tensor) -> None:
        """Read `box` of a tensor's quantization codes into `out` (box.sizes), unpacked on its device."""
        device_copies.bound_blocks(out.device, self.max_memory, self._directions)
        most = smaller(max(1, self.max_memory // (2 * out.element_size())))
        for part in row_major_boxes(box, most):
            with self.meter.hold(2 * part.numel * out.element_size(), out.device):
                source.read_codes(part, window(out, part.relative_to(box.offsets)))

    def same(self, first: LazyTensor, other: LazyTensor, box: Box) -> bool:
        """Return whether the box has the same decoded bits in two tensors of one shape and dtype."""
        import torch

        most = max(1, self.max_memory // (2 * DECODE_COPIES * first.info.itemsize))
        for part in row_major_boxes(box, most):
            a, b = (t.read(part.offsets, part.sizes).view(-1) for t in (first, other))
            if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                return False
        return True


def is_as_it_lies(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory is its values in row-major order. The memory of a conjugate
    or negative view is not: torch changes the sign when it reads it."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def window(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the box of a tensor as a view; a 0-d tensor has one box."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        # Not every tensor subclass supports a narrow to all of itself.
        if offset or size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def stochastic(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round float32 to bfloat16: up with the probability (dropped 16 bits) / 2^16, else down.

    Source: `_fp32_to_bf16_sr` of torchao; here on the CPU, with a generator of its own. Infinities
    and NaN are kept.
    """
    import torch

    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, generator=generator)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def as_bytes(values: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, not copied where the tensor is so on the CPU."""
    if values.device.type == "cpu" and is_as_it_lies(values):
        return tensor_bytes(values)
    return tensor_bytes(values.detach().cpu().contiguous().resolve_conj().resolve_neg())
