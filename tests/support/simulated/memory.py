"""Memory of the device and pinned memory: who has read and written which bytes, and what is wrong with the order."""

from __future__ import annotations

import hashlib
import threading
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.simulated.streams import HOST, LOCK, MODULE, NAME, Clock, Stream

POISON = 0xCB
"""In new memory, and in memory to which a copy is under way."""
SHOWN_FRAMES = 5

RACES: list[str] = []
"""What was found."""


class Access(NamedTuple):
    """One thing of a stream reads or writes a view; `at` is where it was launched."""

    view: torch.Tensor
    writes: bool
    stream: str
    count: int
    at: str


class Held:
    """One allocation of the device: the CPU's memory behind it, and the stream that takes it again when it is free."""

    def __init__(self, real: torch.Tensor, storage: torch.UntypedStorage, stream: Stream) -> None:
        self.real, self.stream, self.at = real, stream, place()
        self.alive = StorageWeakRef(storage)
        self.accesses: list[Access] = []


class Copy(NamedTuple):
    """A copy between the device and pinned memory that the host has not waited for."""

    view: torch.Tensor
    digest: str
    values: torch.Tensor | None
    access: Access


_held: dict[int, Held] = {}
_known_reals: dict[int, int] = {}
_freed: list[Held] = []
_pinned: dict[int, tuple[StorageWeakRef, list[Access]]] = {}
_under_way: list[Copy] = []


def race(text: str) -> None:
    """Note what is wrong."""
    RACES.append(f"{text} [{threading.current_thread().name}, at {place()}]")


def place() -> str:
    """Return where ckptmap, or the run that uses it, is: innermost first."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if "ckptmap/" in frame.filename or "simulated/runs" in frame.filename
    ]
    return " < ".join(f"{f.filename[-40:]}:{f.lineno}" for f in reversed(frames[-SHOWN_FRAMES:]))


# ------------------------------------------------------------------------------- tensors


def is_here(value: object) -> bool:
    """Return whether a value is a tensor of the device."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU's tensor behind one of the device: a view of the same memory."""
    held = _held[tensor.untyped_storage()._cdata]
    made = torch.empty(0, dtype=tensor.dtype).set_(
        held.real.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    return torch._neg_view(made) if tensor.is_neg() else made


def place_on_device(values: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Return the tensor of the device that has the CPU's memory of `values`, which are new."""
    with LOCK:
        _take_again(stream)
        base = torch._C._acc.create_empty_tensor([0], values.dtype)
        storage = base.untyped_storage()
        _held[storage._cdata] = Held(values, storage, stream)
        _known_reals[values.untyped_storage()._cdata] = storage._cdata
        return as_view(base, values)


def storage_of(values: torch.Tensor) -> int | None:
    """Return the storage of the device whose memory these values of the CPU are; None: they are new."""
    return _known_reals.get(values.untyped_storage()._cdata)


def as_view(base: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the storage of `base` that lies there as `values` lie in their own."""
    if base.dtype != values.dtype:
        flat = torch._C._dynamo.guards._reinterpret_tensor(base, [0], [1], -base.storage_offset())
        base = flat.view(values.dtype)
    offset = values.storage_offset() - base.storage_offset()
    made: torch.Tensor = torch._C._dynamo.guards._reinterpret_tensor(
        base, values.shape, values.stride(), offset
    )
    return made


def _take_again(stream: Stream) -> None:
    """Let a stream take its free memory again: whatever uses it on another stream must be over for this one."""
    for key in [key for key, held in _held.items() if held.alive.expired()]:
        held = _held.pop(key)
        _known_reals.pop(held.real.untyped_storage()._cdata, None)
        _freed.append(held)
    now = Clock(stream.clock)
    now.join(HOST.clock)
    for held in [one for one in _freed if one.stream is stream]:
        _freed.remove(held)
        for one in held.accesses:
            if not now.knows(one.stream, one.count):
                race(
                    f"memory made at {held.at} is taken again, which {one.stream} uses at {one.at}"
                )


# ------------------------------------------------------------------------------- accesses


def accesses(tensor: torch.Tensor) -> list[Access] | None:
    """Return the accesses to the memory of a tensor; None: it is pageable memory."""
    if is_here(tensor):
        return _held[tensor.untyped_storage()._cdata].accesses
    found = _pinned.get(tensor.untyped_storage()._cdata)
    return None if found is None or found[0].expired() else found[1]


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Make the memory of a tensor of the CPU count as pinned."""
    storage = tensor.untyped_storage()
    _pinned[storage._cdata] = StorageWeakRef(storage), []
    return tensor


def launch(
    reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], what: str
) -> tuple[Stream, int, str]:
    """Launch what reads and writes tensors on the current stream; return it, its number there, and where."""
    with LOCK:
        stream = MODULE.current_stream()
        count, at = stream.advance(), place()
        for some, is_write in ((reads, False), (writes, True)):
            for tensor in some:
                known = accesses(tensor)
                if known is not None:
                    view = real(tensor) if is_here(tensor) else tensor
                    _add(known, Access(view, is_write, stream.name, count, at), stream.clock, what)
        return stream, count, at


def _add(known: list[Access], new: Access, clock: Clock, what: str) -> None:
    low, high = _span(new.view)
    kept = []
    for old in known:
        is_over = clock.knows(old.stream, old.count)
        if (new.writes or old.writes) and not is_over and _overlap(old.view, new.view):
            verbs = [("reads", "writes")[one.writes] for one in (new, old)]
            race(f"{what}: {new.stream} {verbs[0]} what {old.stream} {verbs[1]} at {old.at}")
        start, end = _span(old.view)
        is_inside = low <= start and end <= high and new.view.is_contiguous()
        again = not new.writes and not old.writes and old.stream == new.stream
        if not (is_inside and is_over and (new.writes or again)):
            kept.append(old)
    known[:] = [*kept, new]


def _span(view: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a view in its storage, and the one after its last."""
    start = view.storage_offset() * view.element_size()
    if not view.numel():
        return start, start
    steps = sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    return start, start + (steps + 1) * view.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    low, high = zip(_span(one), _span(other), strict=True)
    if max(low) >= min(high):
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    seen = torch.zeros(max(high), dtype=torch.uint8)
    _bytes_in(seen, one).fill_(1)
    return bool(_bytes_in(seen, other).any())


def _bytes_in(memory: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return the bytes that a view has in its storage, of another memory that is laid out like it."""
    size = view.element_size()
    strides = [step * size for step in view.stride()]
    return memory.as_strided((*view.shape, size), (*strides, 1), view.storage_offset() * size)


# ------------------------------------------------------------------------------- the host


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of contiguous values, u8."""
    return values.reshape(-1).view(torch.uint8)


def copy_begins(view: torch.Tensor, values: torch.Tensor | None, access: Access) -> None:
    """Note a copy that the host has not waited for: of `values` to `view`, or from `view` where they are None."""
    if values is not None:
        bytes_of(view).fill_(POISON)
    _under_way.append(Copy(view, _digest(view), values, access))


def _digest(view: torch.Tensor) -> str:
    return hashlib.sha1(bytes_of(view).numpy().tobytes()).hexdigest()


def _arrive() -> None:
    """Let the copies arrive that the host has waited for, in their order: one may come to the place of another."""
    known = [copy for copy in _under_way if HOST.clock.knows(copy.access.stream, copy.access.count)]
    for copy in known:
        _under_way[:] = [one for one in _under_way if one is not copy]
        if _digest(copy.view) != copy.digest:
            way = "from" if copy.values is None else "to"
            race(f"the host wrote to memory while a copy {way} it was under way: {copy.access.at}")
    for copy in known:
        if copy.values is not None:
            copy.view.copy_(copy.values)


HOST.waited.append(_arrive)
HOST.place = place


def no_copy_is_under_way(memory: torch.Tensor) -> None:
    """In place of `let_go`, which must be called when all copies of a memory have ended."""
    with LOCK:
        for copy in _under_way:
            if copy.view.untyped_storage()._cdata == memory.untyped_storage()._cdata:
                race(f"memory is given back while a copy is under way: {copy.access.at}")


def settle() -> None:
    """Wait for everything, so that all is looked at."""
    MODULE.synchronize()
    with LOCK:
        for stream in MODULE.streams:
            _take_again(stream)
