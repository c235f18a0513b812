"""The ranks of one conversion: processes that exchange data and errors over gloo, on any device.

    torchrun --nproc-per-node N -m ckptmap convert ...

`join()` returns `GlooRanks` if the environment says that torchrun started several processes, else
`Ranks`, which is a single process and imports no torch. Use the result as a context around
everything that may fail. An error that leaves the context is sent to the other ranks. Rank 0 then
raises the error to show, with the rank that it comes from; all others raise ShownElsewhere.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import signal
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ckptmap import errors
from ckptmap.core.devices import indexed
from ckptmap.core.formatting import first_line
from ckptmap.core.json_text import parse_json
from ckptmap.errors import CkptmapError, DestinationError, Interrupted, PlanError, RunError
from ckptmap.execution.heartbeat import Heartbeat, Stopped
from ckptmap.storage.process_guards import ending_signals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ALONE", "Ranks", "join"]  # fmt: skip

TIMEOUT_S = 120.0
"""Seconds without a sign of life after which a rank counts as lost."""
GRACE_S = 5.0
"""Seconds that rank 0 waits for the errors of ranks that are alive."""
_joined = itertools.count()


class ShownElsewhere(CkptmapError):
    """This rank stops because of a failure that another rank shows."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("", "stopped: another rank shows why")
        self.exit_code = exit_code


class Ranks:
    """A single process. `GlooRanks` has the same methods for several."""

    rank = 0
    world_size = 1
    local_world_size = 1
    """Ranks on this machine: they share its cores."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in rank order. Waits for all ranks that are alive."""
        return [data]

    def barrier(self) -> None:
        self.gather(b"")

    def of_lead(self, data: bytes) -> bytes:
        """Return the data of rank 0 on every rank."""
        return self.gather(data if self.rank == 0 else b"")[0]

    def agree(self, digest: str) -> None:
        """Raise PlanError CKM209, on every rank, if the ranks' plan digests differ."""
        by_digest: dict[str, list[str]] = {}
        for rank, other in enumerate(self.gather(digest.encode())):
            by_digest.setdefault(other.decode(), []).append(str(rank))
        if len(by_digest) > 1:
            plans = "; ".join(f"{d[:12]} on rank {', '.join(r)}" for d, r in by_digest.items())
            raise PlanError(
                "CKM209",
                f"the ranks plan different conversions, expected one plan, found {plans}",
                "every rank must see the same source files and run the same ckptmap",
            )

    def advance(self, nbytes: int) -> int:
        """Report bytes that were just moved, or 0 as a sign of life.

        Returns, on rank 0, the bytes that other ranks moved since the last call; 0 elsewhere.
        Raises Stopped if another rank has failed.
        """
        return 0

    def check(self) -> None:
        """Raise Stopped if another rank has failed, or if this one counts as lost."""

    def cause(self, error: BaseException) -> BaseException | None:
        """Return, on rank 0, the error that ends the run, which may be another rank's, once no other rank
        works any more; None where one may still work. `error` is the one that this rank leaves with."""
        return error if self.world_size == 1 else None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count only calls of `advance` as signs of life in the block: a stuck rank makes none."""
        yield

    def device(self, name: str) -> str:
        """Return the device of this rank with its index: for `cuda` the current GPU of this thread, and
        of several ranks the GPU with the number of the local rank."""
        return indexed(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the ranks; an error is sent to them (a single process has nothing to do)."""


ALONE = Ranks()


def join(timeout: float = TIMEOUT_S, env: Mapping[str, str] = os.environ) -> Ranks:
    """Join the other ranks that torchrun started; return `ALONE` if it started none.

    Raises, if they do not meet within `timeout` seconds, RunError CKM307 on rank 0 and
    ShownElsewhere on the others.
    """
    several = env.get("WORLD_SIZE", "1") not in ("", "1")
    if several and "RANK" in env and "MASTER_ADDR" in env:
        return GlooRanks(timeout, env)
    return ALONE


class GlooRanks(Ranks):
    """Several processes, with their own gloo process group, and heartbeats through torch's store."""

    def __init__(self, timeout: float, env: Mapping[str, str]) -> None:
        self.rank, self.world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
        self.local_world_size = int(env.get("LOCAL_WORLD_SIZE", "1"))
        self._local_rank = int(env.get("LOCAL_RANK", "0"))
        self._verdict: BaseException | None = None
        self._last_words = "{}"
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # our own error reports a lost rank
        try:
            self._group, self._owned, self._beats = self._meet(timeout)
        except (RuntimeError, ValueError, OSError) as error:
            raise self._never_met(timeout, error) from error
        self._beats.start()
        # A thread inside torch while the interpreter shuts down would abort the process.
        atexit.register(self._beats.close)

    def _meet(self, timeout: float) -> tuple[ProcessGroup | None, bool, Heartbeat]:
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.rendezvous import rendezvous

        limit = timedelta(seconds=timeout)
        store, _, _ = next(rendezvous("env://", timeout=limit))
        store = PrefixStore(f"ckptmap/{next(_joined)}", store)
        beats = Heartbeat(store, self.rank, self.world_size, timeout)
        beats.announce()
        if dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=limit)
            dist.barrier(group=group)
            return group, False, beats
        dist.init_process_group(
            "gloo", store=PrefixStore("gloo", store), rank=self.rank,
            world_size=self.world_size, timeout=limit,
        )  # fmt: skip
        dist.barrier()
        return None, True, beats

    def _never_met(self, timeout: float, error: Exception) -> CkptmapError:
        if self.rank:
            return ShownElsewhere(RunError.exit_code)
        return RunError(
            "CKM307",
            f"the {self.world_size} ranks did not meet within {timeout:g} s: {first_line(error)}",
            "check that every rank starts and can reach MASTER_ADDR, or allow more --rank-timeout",
        )

    def gather(self, data: bytes) -> list[bytes]:
        import torch.distributed as dist

        self._beats.meet()
        gathered: list[bytes] = [b""] * self.world_size
        try:
            dist.all_gather_object(gathered, data, group=self._group)
        except RuntimeError as error:  # gloo raises it for a rank that is gone or too late
            raise Stopped from error
        return gathered

    def advance(self, nbytes: int) -> int:
        self.check()
        return self._beats.advance(nbytes)

    def check(self) -> None:
        self._beats.check()

    def cause(self, error: BaseException) -> BaseException | None:
        if self.rank:
            return None
        with _undisturbed():
            verdict = self._lead_failed(error)
        have_stopped = self._beats.left.keys() >= {*self._beats.others}
        return verdict if have_stopped else None

    @contextmanager
    def working(self) -> Iterator[None]:
        self._beats.working = True
        try:
            yield
        finally:
            self._beats.working = False

    def device(self, name: str) -> str:
        return indexed(name, self._local_rank)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            with _undisturbed():
                verdict = self._lead_failed(error) if self.rank == 0 else self._failed(error)
                if getattr(error, "keeps_work", False) and isinstance(verdict, CkptmapError):
                    verdict.keep_work()  # it was judged before that was known
                    self._last_words = _own_words(verdict)
            if verdict is not error:
                raise verdict from error
            return
        self._beats.leave("{}")
        self._beats.hear(self._beats.others if self.rank == 0 else (), GRACE_S)
        self._beats.close()
        if self._owned:
            import torch.distributed as dist

            dist.destroy_process_group()

    def _lead_failed(self, error: BaseException) -> BaseException:
        """Wait, on rank 0, for the errors of the others; return the one to raise. A second call gives the same."""
        if self._verdict is None:
            self._last_words = _own_words(error)
            # The others wait for this error, so that torchrun does not end rank 0 before it shows it.
            atexit.register(lambda: self._beats.leave(self._last_words))
            self._beats.fail()
            self._beats.hear(self._beats.others, GRACE_S)
            self._verdict = self._judged(error, self._last_words)
            self._last_words = _own_words(self._verdict)  # they end with its exit code
        return self._verdict

    def _judged(self, error: BaseException, own: str) -> BaseException:
        """Return the error to raise: that of the first rank which has one of its own."""
        beats = self._beats
        words = {0: parse_json(own)} | {r: parse_json(text) for r, text in beats.left.items()}
        causes = {
            rank: said
            for rank, said in sorted(words.items())
            if said.get("kind") not in (None, "Interrupted")
        }
        if causes:
            rank, said = next(iter(causes.items()))
            alike = len(causes) == self.world_size and len({s["message"] for s in causes.values()})
            refused = rank == 0 and isinstance(error, DestinationError)
            return error if alike == 1 or refused else _error(said, f"[rank {rank}] ")
        if beats.lost:
            return _lost(*min(beats.lost.items()))
        if beats.is_cut_off:
            return _lost(0, "could not reach the other ranks")
        interrupted = [said for said in words.values() if said.get("kind")]
        return error if not isinstance(error, Stopped) else _error(*interrupted[:1] or [{}])

    def _failed(self, error: BaseException) -> BaseException:
        """Send the error of this rank to rank 0, which shows it; return the error to raise here.

        Rank 1 reports rank 0 if that one is lost.
        """
        beats, own = self._beats, _own_words(error)
        beats.fail()
        beats.leave(own)
        beats.hear((0,), 2 * GRACE_S)
        if self.rank == 1 and 0 not in beats.left:
            return _lost(0, beats.lost.get(0, f"gave no sign of life for {beats.timeout:g} s"))
        shown = parse_json(beats.left.get(0, b"{}")) or parse_json(own)
        return ShownElsewhere(shown.get("exit", RunError.exit_code))


def _own_words(error: BaseException) -> str:
    """Return an error as JSON; `{}` if it only follows from the failure of another rank."""
    if isinstance(error, Stopped):
        return "{}"
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted("CKM307", "interrupted", "run the same command to continue")
    if not isinstance(error, CkptmapError):
        text = "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        hint = f"please report it with this traceback:\n{text}"
        error = RunError("", message.splitlines()[0], hint)
    return json.dumps(
        {
            "kind": _kind(error), "code": error.code, "message": error.message,
            "hint": error.hint, "exit": error.exit_code,
        }
    )  # fmt: skip


def _kind(error: CkptmapError) -> str:
    """Return the name of the error's class, or of the nearest above it that the other ranks know by its name."""
    return next(one.__name__ for one in type(error).mro() if one.__module__ == errors.__name__)


def _error(said: Mapping[str, Any], prefix: str = "") -> CkptmapError:
    """Return the error that another rank has sent."""
    kind = getattr(errors, said.get("kind", ""), RunError)
    message = prefix + said.get("message", "stopped: another rank failed")
    error: CkptmapError = kind(said.get("code", "CKM307"), message, said.get("hint", ""))
    error.exit_code = said.get("exit", error.exit_code)
    return error


def _lost(rank: int, how: str) -> RunError:
    return RunError(
        "CKM307",
        f"[rank {rank}] {how}; the destination is as it was",
        "check that machine, then run the same command again to continue",
    )


def _undisturbed() -> AbstractContextManager[None]:
    """Ignore signals that end a run inside: torchrun sends SIGTERM once a rank fails, before the error is
    shown, and a shell its own SIGHUP after that of the terminal."""
    return ending_signals(signal.SIG_IGN, lambda old: False)
