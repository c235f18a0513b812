"""A limit of the bytes a second that a save in the background writes, so that training keeps its share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

BLOCKS_A_SECOND = 10
"""A limited write is done in blocks of a tenth of a second: longer ones would come in bursts."""


@dataclass
class Pace:
    """Waits between the blocks of a write, so that no more than `nbytes_a_second` are written.

    nbytes_a_second  None: no limit, and one block
    """

    nbytes_a_second: int | None = None
    _due: float = field(default=0.0, init=False)
    """The time, of `time.monotonic`, at which the next block may be written."""

    def blocks(self, data: memoryview) -> Iterator[memoryview]:
        """Yield the bytes in blocks, each when it is time for it."""
        if self.nbytes_a_second is None:
            yield data
            return
        step = max(1, self.nbytes_a_second // BLOCKS_A_SECOND)
        for start in range(0, data.nbytes, step):
            block = data[start : start + step]
            now = time.monotonic()
            if self._due > now:
                time.sleep(self._due - now)
            self._due = max(self._due, now) + block.nbytes / self.nbytes_a_second
            yield block
