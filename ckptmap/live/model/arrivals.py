"""Which ranks have come to a collective: each rank counts its own in the store of torch.distributed.

gloo tells that a collective failed, and not which rank was missing. The counts tell: a rank that died,
or never called the function, has a lower one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ckptmap.execution.heartbeat import Store

PATIENCE_S = 3.0
"""Seconds that a rank is given to come once a collective has failed: others fail a moment later."""
POLL_S = 0.05


@dataclass
class Arrivals:
    """The collectives that the ranks of one group have come to.

    name   of the group: a prefix of its keys in the store
    ranks  of the group, by their numbers in torch's default group
    """

    store: Store
    name: str
    rank: int
    ranks: Sequence[int]
    count: int = field(default=0, init=False)

    @classmethod
    def of(cls, name: str, ranks: Sequence[int]) -> Arrivals | None:
        """Return the arrivals of a group of ranks, or None where torch has no store for them."""
        import torch.distributed as dist

        try:
            shared: Any = dist.distributed_c10d._get_default_store()
            store: Store = shared.clone()  # a thread that waits on the shared connection holds it
        except (RuntimeError, ValueError, AttributeError, NotImplementedError):
            return None
        return cls(store, name, dist.get_rank(), ranks)

    def arrive(self) -> None:
        """Tell that this rank has come to its next collective."""
        self.count += 1
        try:
            self.store.set(self._key(self.rank), str(self.count))
        except RuntimeError:
            return  # the rank that holds the store is gone: the collective will fail, too

    def missing(self) -> list[int]:
        """Return the ranks that did not come to the last collective, after a short wait for them."""
        until = time.monotonic() + PATIENCE_S
        absent = [rank for rank in self.ranks if rank != self.rank]
        while absent:
            try:
                absent = [rank for rank in absent if not self._came(rank)]
            except RuntimeError:
                return absent
            if time.monotonic() > until:
                break
            time.sleep(POLL_S)
        return absent

    def _came(self, rank: int) -> bool:
        key = self._key(rank)
        return self.store.check([key]) and int(self.store.get(key)) >= self.count

    def _key(self, rank: int) -> str:
        return f"ckptmap/{self.name}/{rank}"


def default_timeout() -> timedelta | None:
    """Return the timeout of torch's default group, or None where it does not tell."""
    import torch
    import torch.distributed as dist

    group: ProcessGroup | None = dist.group.WORLD
    if group is None:
        return None
    for device in ("cpu", torch.accelerator.current_accelerator() or "cpu"):
        try:
            options = group._get_backend(torch.device(device)).options
        except (RuntimeError, AttributeError):
            continue
        timeout: timedelta = options._timeout
        return timeout
    return None
