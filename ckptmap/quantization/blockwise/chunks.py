"""How many elements encoders and decoders compute at once, and constant tensors on each device.

A CPU wants chunks whose temporaries stay in its cache. A device wants few kernels: launching one from
Python takes the host 10 to 20 us, in which the link of an H200 (55 GB/s) brings a megabyte. So on a device
a chunk is as large as what is sent at once, 16M elements, and an encoder or decoder launches at most 10 to
18 kernels for it (`tests/quantization/test_kernel_counts.py` counts them): 150 to 350 us, while the link
brings 16M bfloat16 in 610 us. With 4M elements NF4 was encoded at half of the link's rate, with 16M at 0.94
of it (`benchmarks/RESULTS_PARTS.md`). Two feeds and their temporaries take up to 400 MB of the device.

Is a kernel of our own needed, in Triton for one? Kernels run while the next values come, and results go
back on the kernels' stream, so for each element this must hold on an H200 (4.8 TB/s of memory, a link of
50 GB/s in each direction):

    bytes of memory that the kernels move / 4.8 TB/s + bytes of the result / 50 GB/s
                                                      <= bytes of the source / 50 GB/s

                                  kernels move         take       result back   the link takes
    bfloat16 -> NF4                      22.6 B      4.7 ps             10 ps            40 ps
    bfloat16 -> bitsandbytes 4-bit       34.9 B      7.3 ps             10 ps            40 ps
    bfloat16 -> int8, float8          33 - 52 B     7 - 11 ps           20 ps            40 ps
    float32  -> any of them         41 - 60 B     9 - 13 ps      10 - 20 ps            80 ps
    any 4 or 8 bits -> bfloat16       11 - 27 B     2 - 6 ps            40 ps       10 - 20 ps
    packed 4-bit    -> bfloat16       29 - 48 B     6 - 10 ps           40 ps            10 ps

So torch's ops hide behind the link even if they reach a third of the memory's rate (0.6 of it, from bfloat16
to 8 bits), and where a decoder does not hide, one that took no time would gain 5 to 27 %. The bytes are
counted in `tests/quantization/test_kernel_counts.py`, the times measured by `make gpu` (step `rates`,
rows `kernel`, whose goal is 1).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICE_NUMEL = 1 << 24
"""Elements that are computed at once on a device, and sent to it at once."""

_smaller = threading.local()
_constants: dict[tuple[Hashable, torch.device], torch.Tensor] = {}


def chunk_numel(device: torch.device | str, on_cpu: int) -> int:
    """Return how many elements to compute at once: `on_cpu` on a CPU, DEVICE_NUMEL elsewhere."""
    import torch

    return smaller(on_cpu if torch.device(device).type == "cpu" else DEVICE_NUMEL)


def smaller(numel: int) -> int:
    """Return the elements to compute at once where memory is short: see `smaller_chunks`."""
    return max(1, numel >> getattr(_smaller, "halvings", 0))


@contextmanager
def smaller_chunks(halvings: int) -> Iterator[None]:
    """Halve chunks and feeds of this thread so many times in the block."""
    before = getattr(_smaller, "halvings", 0)
    _smaller.halvings = halvings
    try:
        yield
    finally:
        _smaller.halvings = before


def sent(values: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor of the CPU on a device.

    The copy has ended when this returns, because its memory is pageable: so any stream may use it.
    """
    import torch

    at = torch.device(device)
    if at.type == "cpu":
        return values
    there = torch.empty(values.shape, dtype=values.dtype, device=at)
    return (
        there.copy_(values) if type(values) is torch.Tensor else there
    )  # a fake one has no values


def sent_behind(values: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor of the CPU on a device, for kernels that this thread launches from now on.

    It goes by way of pinned memory, so the host waits neither for the copy nor for the kernels before
    it. A device that copies no pinned memory gets it as `sent` sends it.
    """
    import torch

    # Here: recognizing tensors needs no pinned memory, nor the threads that its module imports.
    from ckptmap.storage.pinned_memory import copies_pinned, host_memory

    at = torch.device(device)
    if not copies_pinned(at):
        return sent(values, at)
    here = host_memory(values.shape, values.dtype).copy_(values)
    return here.to(at, non_blocking=True)  # torch keeps `here` until the copy has ended


def constant(
    name: Hashable, device: torch.device | str, make: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Return a tensor that never changes, which `make` makes on the CPU, and each device keeps.

    So it has the same bits everywhere. To make it for each box would wait for the device each time.
    """
    import torch

    key = name, torch.empty(0, device=device).device  # "cuda" with its index
    held = _constants.get(key)
    if held is None:
        held = sent(make(), key[1])
        if type(held) is torch.Tensor:  # a fake one must not outlive its mode
            _constants[key] = held
    return held
