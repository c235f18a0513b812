"""Parsing makes a tree of small values that hold no cycles: the collector only slows it down.

Measured on a header of 100,000 tensors: 0.21 s paused, 0.75 s not.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """No cycle collection inside; nests, and leaves it off where it was off.

    What was made inside goes to the oldest generation unvisited: else the first allocation after
    it would have the collector walk all of it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # a caller's frozen objects stay frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
