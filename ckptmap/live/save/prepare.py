"""Import beforehand what a save imports when it is first needed.

The first save would hold up training for it: 300 modules, about half a second of CPU on each rank, as much as the
copies of several hundred megabytes take.
"""

from __future__ import annotations

from ckptmap import registry
from ckptmap.live.save.write_dcp import WRITER


def prepare() -> None:
    """Import the writer, the forms of live weights, the families of optimizers and the library of digests."""
    import xxhash  # noqa: F401

    registry.writer(WRITER)
    registry.live_forms()
    registry.optimizer_families()
