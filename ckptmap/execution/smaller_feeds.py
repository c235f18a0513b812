"""Encode or load a tensor again with smaller feeds where the device ran out of memory.

    feeds of 16M elements -> out of memory -> the tensor again, 8M at a time -> ... -> 4K, or an error

A feed's size changes no bit of the result, and all of the tensor is written again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptmap.core.devices import current_device
from ckptmap.core.formatting import first_line
from ckptmap.errors import RunError
from ckptmap.quantization.blockwise.chunks import DEVICE_NUMEL, smaller_chunks
from ckptmap.storage.resource_limits import SHORT

MOST_HALVINGS = 12
"""From 16M elements to 4K, with which a device is hardly used."""
OF_A_RUN = (
    "end what uses the device, give --threads 1 and a smaller --max-memory, or --device cpu; then"
    " run the same command again"
)
OF_A_LOAD = "end what uses the device, or pass a smaller max_memory; then load all of it again"

T = TypeVar("T")


@dataclass
class FeedSize:
    """How often feeds were halved; the threads of a run share it, as they share the device's memory."""

    halvings: int = 0


class TensorProgress:
    """Reports the bytes of a tensor once, though the tensor may be encoded several times."""

    def __init__(self, advance: Callable[[int, str], None]) -> None:
        self._advance = advance
        self._reported = self._done = 0

    def advance(self, nbytes: int, key: str) -> None:
        """Report bytes of this attempt, except those that an earlier one has reported."""
        self._done += nbytes
        new = max(0, self._done - self._reported)
        self._reported += new
        self._advance(new, key)

    def again(self) -> None:
        """State that the tensor begins anew."""
        self._done = 0


def with_smaller_feeds(
    size: FeedSize,
    device: str | None,
    attempt: Callable[[], T],
    *,
    fqn: str = "",
    again: Callable[[], None] | None = None,
    hint: str = OF_A_RUN,
) -> T:
    """Return what `attempt` returns, which is called again with smaller feeds while memory runs out.

    device  None: whichever runs out of memory
    again   called before each further attempt

    Raises RunError CKM313 where the smallest feed is too much, too.
    """
    import torch

    while True:
        halvings = size.halvings
        try:
            with smaller_chunks(halvings):
                return attempt()
        except torch.OutOfMemoryError as error:
            if halvings >= MOST_HALVINGS:
                raise _too_little(device or current_device(), error, fqn, hint) from error
        # The error is gone by now, and with it the memory that its frames held.
        size.halvings = max(size.halvings, halvings + 1)
        if again is not None:
            again()
        give_back(device or current_device())


def _too_little(device: str, error: Exception, fqn: str, hint: str) -> RunError:
    """Return the error of a device whose memory is too small for the smallest feed."""
    numel = DEVICE_NUMEL >> MOST_HALVINGS
    what = f"{fqn}: {device}" if fqn else device
    return RunError(
        SHORT,
        f"{what} ran out of memory, with {numel} elements at a time too: {first_line(error)}",
        hint,
    )


def give_back(device: str) -> None:
    """Return to the device what torch keeps for later allocations: another thread may need it."""
    import torch

    if torch.device(device).type in ("cpu", "meta"):
        return
    module = torch.get_device_module(torch.device(device))
    if hasattr(module, "empty_cache"):
        module.empty_cache()
