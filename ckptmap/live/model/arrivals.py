"""Which ranks have come to a collective, and out of it: each rank counts its own in torch's store.

gloo tells that a collective failed, and not which rank was missing. The counts tell: a rank that died,
or never called the function, has a lower one.

    NAME/come/R    collectives that rank R has come to
    NAME/left/R    collectives that it has left; `3 failed`: the third by an error
    NAME/owner/R   its process
    NAME/said      what one rank tells the others outside of a collective
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ckptmap.core.json_text import parse_json
from ckptmap.storage.locks import Owner

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ckptmap.execution.heartbeat import Store

PATIENCE_S = 3.0
"""Seconds that a rank is given to come once a collective has failed: others fail a moment later."""
POLL_S = 0.05
FAILED = "failed"


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
        if self.count == 1:
            self._set(self._key("owner", self.rank), json.dumps(asdict(Owner.this())))
        self._set(self._key("come", self.rank), str(self.count))

    def leave(self, failed: bool) -> None:
        """Tell that this rank has left the collective."""
        self._set(
            self._key("left", self.rank), f"{self.count} {FAILED}" if failed else f"{self.count}"
        )

    def say(self, text: str) -> None:
        """Tell the others something that holds until the next collectives of this group."""
        self._set(f"ckptmap/{self.name}/said", f"{self.count} {text}")

    def heard(self, since: int) -> str:
        """Return what a rank has said since the collective of that number; "" for nothing."""
        key = f"ckptmap/{self.name}/said"
        try:
            count, _, text = (
                self.store.get(key).decode().partition(" ")
                if self.store.check([key])
                else ("0", "", "")
            )
        except RuntimeError:
            return ""
        return text if int(count) >= since else ""

    def missing(self) -> list[int]:
        """Return the ranks that did not come to the last collective, after a short wait for them. One that
        an error has kept from it is none of them: it was missing nobody's."""
        return self._waited(
            lambda rank: (
                self._number("come", rank)[0] >= self.count or self._number("left", rank)[1]
            )
        )

    def lost(self) -> tuple[list[int], bool]:
        """Return the ranks that have not left the last collective, after a short wait for them, and
        whether it is known that their processes have ended."""
        inside = self._waited(lambda rank: self._number("left", rank)[0] >= self.count)
        gone = [rank for rank in inside if self._is_gone(rank)]
        return (gone, True) if gone else (inside, False)

    def _waited(self, is_settled: Callable[[int], bool]) -> list[int]:
        until = time.monotonic() + PATIENCE_S
        absent = [rank for rank in self.ranks if rank != self.rank]
        while absent:
            try:
                absent = [rank for rank in absent if not is_settled(rank)]
            except RuntimeError:
                return []  # the store is gone: nobody can tell
            if time.monotonic() > until:
                break
            time.sleep(POLL_S)
        return absent

    def _number(self, what: str, rank: int) -> tuple[int, bool]:
        """Return a count of a rank, and whether it failed there."""
        key = self._key(what, rank)
        if not self.store.check([key]):
            return 0, False
        number, _, failed = self.store.get(key).decode().partition(" ")
        return int(number), bool(failed)

    def _is_gone(self, rank: int) -> bool:
        """Return whether the process of a rank on this machine has ended."""
        try:
            return Owner(**parse_json(self.store.get(self._key("owner", rank)))).is_gone
        except (RuntimeError, TypeError, ValueError):
            return False

    def _set(self, key: str, value: str) -> None:
        # Where the rank that holds the store is gone the collective will fail, too.
        with contextlib.suppress(RuntimeError):
            self.store.set(key, value)

    def _key(self, what: str, rank: int) -> str:
        return f"ckptmap/{self.name}/{what}/{rank}"


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
