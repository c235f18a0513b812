"""Heartbeats: each rank tells the others, through torch's store, that it is alive and how far it is.

A thread of each rank writes the rank's beat (a counter and its progress) and reads the beats of
others: rank 0 reads all, the others only that of rank 0, so that the traffic grows with the number
of ranks and not with its square. While a rank moves bytes, only that work raises its counter: a
rank that hangs on a dead disk is lost too, although its thread still runs. A rank of this machine
whose process has ended is noticed at the next beat, any other rank after the time-out.

Keys in the store:
    owner/R    the process of rank R
    beat/R     its counter, barriers reached, barriers passed, bytes moved
    failed     set by a rank that has failed
    left/R     the last words of rank R: its error, or `{}`

Only the thread calls the store. If the store hangs, the rest of the process goes on, and notices
that the thread's last round is too long ago.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from ckptmap.core.formatting import first_line
from ckptmap.core.json_text import parse_json
from ckptmap.errors import Interrupted, RunError
from ckptmap.storage.locks import Owner

BEAT_S = 0.5
"""Seconds between two beats; a quarter of the time-out where that is less."""
POLL_S = 0.01
"""Seconds to the first look while a caller waits; the pause doubles with each look, up to a beat."""

CLOSE_S = 2.0
"""Seconds to wait for the thread at the end; only a store that hangs delays it."""


class Store(Protocol):
    """The methods of torch.distributed.Store that are used; `get` only for keys that are set."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class Stopped(Interrupted):
    """Another rank has failed or is lost; rank 0 shows which one and why."""

    exit_code = RunError.exit_code

    def __init__(self) -> None:
        super().__init__("CKM307", "stopped: another rank failed")


@dataclass(slots=True)
class _Beat:
    """The last beat of a rank, and the time by this process's clock when it was first seen.

    stage    barriers that the rank has reached
    held     barriers that it knows to be open
    """

    text: bytes
    since: float
    stage: int = 0
    held: int = 0
    nbytes: int = 0


class Heartbeat:
    """The heartbeat of one rank.

    Call `announce` before the ranks have met, and `start` after that.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.working = False
        """Whether only calls of `advance` count as signs of life."""
        self.lost: dict[int, str] = {}
        """Rank -> how it was noticed that the rank is gone, for ranks without last words."""
        self.left: dict[int, bytes] = {}
        """Rank -> its last words; rank 0 reads those of all ranks, the others those of rank 0."""
        self.others: Sequence[int] = range(1, world_size) if rank == 0 else (0,)
        self._store = store
        self._beat_s = min(BEAT_S, timeout / 4)
        self._changed, self._wake = threading.Condition(), threading.Event()
        self._count = self._nbytes = self._told = 0
        self._stage = self._held = 0
        self._failed = self._closed = False
        self._words: str | None = None
        self._said = False
        self._seen = time.monotonic()
        self._beats = {other: _Beat(b"", self._seen) for other in self.others}
        self._near: dict[int, Owner] = {}
        self._thread = threading.Thread(target=self._run, name="ckptmap-beat", daemon=True)

    def announce(self) -> None:
        self._store.set(f"owner/{self.rank}", json.dumps(asdict(Owner.this())))
        self._send()

    def start(self) -> None:
        self._seen = time.monotonic()
        for other in self.others:
            self._beats[other].since = self._seen
            owner = Owner(**parse_json(self._store.get(f"owner/{other}")))
            # All ranks are alive now: an owner that is not found here runs in another PID namespace.
            if not owner.is_gone:
                self._near[other] = owner
        self._thread.start()

    # ------------------------------------------------------------------ for the threads that work

    def advance(self, nbytes: int) -> int:
        """Count `nbytes` of work as a sign of life.

        Returns, on rank 0, the bytes that other ranks have moved since the last call; 0 elsewhere.
        """
        self._count += 1
        self._nbytes += nbytes
        theirs = sum(beat.nbytes for beat in self._beats.values()) if self.rank == 0 else 0
        new, self._told = theirs - self._told, theirs
        return new

    def check(self) -> None:
        """Raise Stopped if a rank has failed or is lost, or if this one cannot reach the others."""
        if self._failed or self.lost or self.is_cut_off:
            raise Stopped

    @property
    def is_cut_off(self) -> bool:
        """Whether this rank has not reached the store for the time-out: others count it as lost."""
        return time.monotonic() - self._seen > self.timeout

    def meet(self) -> None:
        """Wait until every rank has called this, however long ranks that are alive take.

        Raises Stopped as `check` does.
        """
        self._stage += 1
        self._wake.set()
        with self._changed:
            while self._held < self._stage:
                self.check()
                self._changed.wait(self._beat_s)

    def fail(self) -> None:
        """Tell the other ranks to stop. The caller calls `leave` next."""
        self._failed = True
        self._wake.set()

    def hear(self, others: Sequence[int], grace: float) -> None:
        """Wait, at most `grace` seconds, for the last words of those `others` that are not lost."""
        self._wait(lambda: all(o in self.left or o in self.lost for o in others), grace)

    def leave(self, words: str) -> None:
        """Publish the last words of this rank."""
        self._words = words
        self._wake.set()
        self._wait(lambda: self._said, 2 * self._beat_s)

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        with self._changed:
            while not (done() or self.is_cut_off) and time.monotonic() < until:
                if not self._thread.is_alive():
                    return
                self._changed.wait(POLL_S)

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        pause = POLL_S
        while not self._closed:
            try:
                self._round()
            except Exception as error:  # torch raises RuntimeError and kinds of its own
                if not self._closed:
                    self.lost.setdefault(0, f"its store is gone ({first_line(error)})")
                return
            waiting = self._held < self._stage or self._failed
            pause = min(2 * pause, self._beat_s) if waiting else self._beat_s
            if self._wake.wait(pause):
                self._wake.clear()
                pause = POLL_S

    def _round(self) -> None:
        if not self.working:
            self._count += 1
        if self._words is not None and not self._said:
            self._store.set(f"left/{self.rank}", self._words)
            self._said = True
        if self._failed:
            self._store.set("failed", "")
        self._send()
        self._failed = self._failed or self._store.check(["failed"])
        beats = self._store.multi_get([f"beat/{other}" for other in self.others])
        for other, text in zip(self.others, beats, strict=True):
            self._observe(other, text)
        self._hold()
        self._seen = time.monotonic()
        with self._changed:
            self._changed.notify_all()

    def _send(self) -> None:
        beat = (self._count, self._stage, self._held, self._nbytes)
        self._store.set(f"beat/{self.rank}", " ".join(map(str, beat)))

    def _observe(self, other: int, text: bytes) -> None:
        beat, now = self._beats[other], time.monotonic()
        if text != beat.text:
            _, stage, held, nbytes = map(int, text.split())
            self._beats[other] = _Beat(text, now, stage, held, nbytes)
        if other in self.left or other in self.lost:
            return
        gone = other in self._near and self._near[other].is_gone
        late = now - beat.since > self.timeout and text == beat.text
        if (gone or late or self._failed or self._words is not None) and self._has_left(other):
            return
        if gone:
            self.lost[other] = "its process ended without a word"
        elif late:
            self.lost[other] = f"gave no sign of life for {self.timeout:g} s"
        if other in self.lost:
            self._failed = True
            self._store.set("failed", "")

    def _has_left(self, other: int) -> bool:
        key = f"left/{other}"
        if not self._store.check([key]):
            return False
        self.left[other] = self._store.get(key)
        return True

    def _hold(self) -> None:
        """Update the barriers that are open: rank 0 opens one when all ranks have reached it."""
        beats = self._beats.values()
        held = min([self._stage, *(b.stage for b in beats)]) if self.rank == 0 else self._held
        if self.rank:
            held = self._beats[0].held
        if held != self._held:
            self._held = held
            if self.rank == 0:
                self._send()
