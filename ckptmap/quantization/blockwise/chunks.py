"""How many elements encoders and decoders compute at once, and constant tensors on each device.

A CPU wants chunks whose temporaries stay in its cache. A device wants few kernels: launching one takes
the host about 5 us, in which the link of an H200 (50 GB/s) brings 250 KB. So on a device a chunk is as
large as what is sent at once, 4M elements, and an encoder or decoder launches at most 10 to 18 kernels
for it (`tests/quantization/test_kernel_counts.py` counts them).

Is a kernel of our own needed? The ops of torch move this many bytes of device memory for each bfloat16
element that becomes NF4, besides 64 KiB tables that stay in the cache:

    magnitude   read 2, write 2        absmax      read 2           quotient  read 2, write 2
    index       read 2, write 4        code        read 4, write 1  pack      read 1, write 0.5

22.5 bytes, 4.7 ps at the 4.8 TB/s of an H200, while the link takes 40 ps for the 2 bytes of the element.
Encoding from float32, and as bitsandbytes does, moves up to 45 bytes, 9.4 ps against 80 and 40 ps;
decoding to bfloat16 moves 12 to 21 bytes, up to 4.4 ps, against the 40 ps of its result. Kernels that
reach a third of the memory's rate still hide behind the link, so torch's ops are all there is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICE_NUMEL = 1 << 22
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
