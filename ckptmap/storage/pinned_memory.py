"""Host memory for the copies that a save or a conversion makes: pinned for copies to and from a device, so that
these need not block the host, and pageable for copies of what is on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.core.formatting import human
from ckptmap.storage.registered_memory import registered_memory

if TYPE_CHECKING:
    import torch

_refusals: list[str] = []
"""Why the system refused to pin memory; it is warned of once."""
_ALIGN = 64
_kept: dict[bool, Sequence[torch.Tensor]] = {}
"""The slabs of the last save, pinned (True) or not, where no save uses them."""


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return new host memory, pinned where the system allows it, else pageable.

    A copy to pageable memory gives the same bytes, and blocks the host. The first refusal is a
    RuntimeWarning.
    """
    import torch

    try:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        # After host memory is really used up, this raises, too.
        memory = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        _refusals.append(str(error).partition("\n")[0])
        if len(_refusals) == 1:
            warnings.warn(
                f"{human(memory.nbytes)} of host memory could not be pinned ({_refusals[0]}):"
                " pageable memory is used, and copies from and to the device are slower",
                RuntimeWarning,
                stacklevel=2,
            )
        return memory


def lasting_memory(nbytes: int) -> torch.Tensor:
    """Return new host memory, u8, for many copies: pinned as `host_memory` is, and made faster where it is large."""
    import torch

    registered = registered_memory(nbytes)
    return host_memory((nbytes,), torch.uint8) if registered is None else registered


def copies_pinned(device: torch.device) -> bool:
    """Return whether copies between pinned memory and the device need not block the host."""
    import torch

    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "Stream")


@dataclass(frozen=True)
class Slabs:
    """Host memory for many tensors at once, kept from one save to the next.

    To pin memory for each tensor would block a save for seconds; pageable memory costs a page fault for each
    4 KiB when it is new. The allocator of pinned memory rounds up to powers of two, so the slabs have
    such sizes.

    places  the memory of each tensor, u8
    """

    slabs: Sequence[torch.Tensor]
    places: Sequence[torch.Tensor]
    pinned: bool

    @classmethod
    def take(cls, sizes: Sequence[int], pinned: bool) -> Slabs:
        """Return places of `sizes` bytes each: in the slabs that were given back, if these fit."""
        if not sizes:
            return cls((), (), pinned)
        wanted, where = slab_layout(sizes)
        slabs = _kept.pop(pinned, ())
        if [slab.numel() for slab in slabs] != wanted:
            slabs = ()  # they are freed before others are taken
            new = lasting_memory if pinned else _pageable
            slabs = [new(nbytes) for nbytes in wanted]
        places = [
            slabs[slab].narrow(0, offset, nbytes)
            for (slab, offset), nbytes in zip(where, sizes, strict=True)
        ]
        return cls(slabs, places, pinned)

    def give_back(self) -> None:
        """Keep the slabs for those who take some next; the values in them are no longer needed."""
        if self.slabs:
            _kept[self.pinned] = self.slabs


def _pageable(nbytes: int) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def slab_layout(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the bytes of each slab, powers of two, and the slab and offset of each size in order.

    Large sizes come first. Each slab is the largest that what is left fills, or just large enough for
    one size that is larger.
    """
    padded = [-(-nbytes // _ALIGN) * _ALIGN for nbytes in sizes]
    slabs: list[int] = []
    where = [(0, 0)] * len(sizes)
    left, used = sum(padded), 0
    for at in sorted(range(len(sizes)), key=padded.__getitem__, reverse=True):
        nbytes = padded[at]
        if not slabs or used + nbytes > slabs[-1]:
            fills = 1 << (max(left, _ALIGN).bit_length() - 1)
            slabs.append(max(fills, 1 << max(nbytes - 1, 0).bit_length()))
            used = 0
        where[at] = len(slabs) - 1, used
        used, left = used + nbytes, left - nbytes
    return slabs, where
