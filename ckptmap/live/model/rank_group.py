"""The ranks of a live run as one group, which exchanges small Python objects over gloo.

Each purpose has a process group of its own, so that a save in the background cannot come between
the collectives of a training step. Where a rank dies, or does not come in time, the others raise an
error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from ckptmap.core.formatting import first_line
from ckptmap.core.json_text import parse_json
from ckptmap.errors import CkptmapError, RunError
from ckptmap.live.model.arrivals import Arrivals, default_timeout
from ckptmap.storage.tensor_bytes import tensor_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_GROUPS: dict[tuple[str, float | None], tuple[object, RankGroup]] = {}
"""Purpose and timeout -> (torch's default group, our group); a new default group gets new ones."""


_HEAD, _SHORT = 8, 4088
"""Bytes of a length, and those of a text that are sent with it: 4 KiB together."""

UNTOUCHED = "{} is as it was"
"""What becomes of a destination where ranks are lost before it is published."""


_GLOO = re.compile(r"\[\S+\.cc:\d+\] |\. This is typically caused by .*")
"""Matches what gloo adds to its errors: a line of its source, and advice that ours gives better."""


class LostRanks(RunError):
    """Ranks that died, or that did not come to a collective in time."""


@dataclass(frozen=True)
class RankGroup:
    """This rank and all others; a group of one where torch.distributed is not initialized.

    rank, world  number of this rank in the group, and of all ranks in it
    """

    rank: int = 0
    world: int = 1
    group: ProcessGroup | None = None
    arrivals: Arrivals | None = None

    @classmethod
    def join(cls, purpose: str, timeout: float | None = None) -> RankGroup:
        """Return the group of all ranks for a purpose. All ranks make the first call together.

        timeout  seconds that a rank waits for the others; default: as torch's default group does

        Raises RunError CKM307 where some ranks do not come."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        default = dist.group.WORLD
        known = _GROUPS.get((purpose, timeout))
        if known is None or known[0] is not default:
            made = cls._made(purpose, range(dist.get_world_size()), timeout)
            known = _GROUPS[purpose, timeout] = (default, made)
        return known[1]

    @classmethod
    def of(cls, group: ProcessGroup, timeout: float | None = None) -> RankGroup:
        """Return the ranks of a process group: over the group itself, or, with a timeout, over one of
        gloo that has it."""
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(group)
        name = f"load/{group.group_name}"
        if timeout is None:
            return cls(group.rank(), group.size(), group, Arrivals.of(name, ranks))
        key = (name, timeout)
        known = _GROUPS.get(key)
        if known is None or known[0] is not group:
            known = _GROUPS[key] = (group, cls._made(name, ranks, timeout))
        return known[1]

    @classmethod
    def _made(cls, name: str, ranks: Sequence[int], timeout: float | None) -> RankGroup:
        import torch.distributed as dist

        limit = default_timeout() if timeout is None else timedelta(seconds=timeout)
        whole = len(ranks) == dist.get_world_size()
        arrivals = Arrivals.of(name if timeout is None else f"{name}/{timeout:g}", ranks)
        waiting = cls(list(ranks).index(dist.get_rank()), len(ranks), None, arrivals)
        with waiting.named_if_lost():
            group = dist.new_group(
                None if whole else list(ranks),
                timeout=limit,
                backend="gloo",
                use_local_synchronization=not whole,
            )
        return cls(waiting.rank, waiting.world, group, arrivals)

    def all(self, value: T) -> list[T]:
        """Return the value of every rank, in order of rank. Raises RunError CKM307 where a rank died
        or did not come in time."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        self._backend()
        found = [value] * self.world
        with self.named_if_lost():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def any(self, flag: bool) -> bool:
        """Return whether a rank says so: over gloo one collective of a byte, where `all` takes two. Raises
        RunError CKM307 as `all` does."""
        if self.world == 1:
            return flag
        import torch
        import torch.distributed as dist

        if self._backend() != "gloo":
            return any(self.all(flag))
        mine = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        found = torch.zeros(self.world, dtype=torch.uint8, device="cpu")
        with self.named_if_lost():
            places = [found[rank : rank + 1] for rank in range(self.world)]
            dist.all_gather(places, mine, group=self.group)
        return bool(found.any())

    def told(self, make: Callable[[], T]) -> list[T]:
        """Return what `make` returns on every rank, in order of rank: values of JSON, lists for tuples. Raises as
        `together` does where it fails on one. It is one collective where the values are small, in place of the
        three of `together` and `all`."""
        error, text = None, b""
        try:
            text = json.dumps([None, value := make()]).encode()
        except LostRanks:
            raise  # there is nobody to tell
        except Exception as caught:
            error, text = caught, json.dumps([_said(caught), None]).encode()
        if self.world == 1:
            if error is not None:
                raise error
            return [value]
        try:
            answers = [parse_json(one) for one in self._gathered(text)]
        except LostRanks as lost:
            raise lost if error is None else error from lost
        _raise_said(error, [said for said, _ in answers])
        return [value for _, value in answers]

    def _gathered(self, text: bytes) -> list[bytes]:
        """Return the bytes of every rank, in order of rank: over gloo one collective where all are short."""
        if self._backend() != "gloo":
            return self.all(text)
        first = self._of_one_size(
            len(text).to_bytes(_HEAD, "little") + text[:_SHORT], _HEAD + _SHORT
        )
        sizes = [int.from_bytes(one[:_HEAD], "little") for one in first]
        parts = [one[_HEAD:] for one in first]
        if max(sizes) > _SHORT:
            rest = self._of_one_size(text[_SHORT:], max(sizes) - _SHORT)
            parts = [head + tail for head, tail in zip(parts, rest, strict=True)]
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def _of_one_size(self, data: bytes, size: int) -> list[bytes]:
        """Return the bytes of every rank, which are filled with zeros to `size`."""
        import torch
        import torch.distributed as dist

        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        found = torch.empty(self.world * size, dtype=torch.uint8, device="cpu")
        with self.named_if_lost():
            places = [found[at : at + size] for at in range(0, found.numel(), size)]
            dist.all_gather(places, mine, group=self.group)
        everything = bytes(tensor_bytes(found))
        return [everything[start : start + size] for start in range(0, len(everything), size)]

    def _backend(self) -> str:
        """Return the backend of the group. Raises RunError CKM307 where the program has destroyed it meanwhile."""
        import torch.distributed as dist

        try:
            return str(dist.get_backend(self.group))
        except ValueError as error:
            raise LostRanks(
                "CKM307",
                "the process group was destroyed before a save in the background had ended",
                "call wait() of the handle, or close() of the manager, before dist.destroy_process_group()",
            ) from error

    @contextmanager
    def named_if_lost(self) -> Iterator[None]:
        """Raise RunError CKM307, with the ranks that did not come, in place of an error of gloo in the
        context, which is one collective."""
        if self.arrivals is not None:
            self.arrivals.arrive()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self._backend()
            what = "a rank did not come to a collective of all ranks, or was lost in it"
            if self.arrivals is not None:
                self.arrivals.leave(failed=True)
                what = self._what_happened(self.arrivals) or what
            raise LostRanks(
                "CKM307",
                f"{what}: {_short(error)}",
                "read the log of that rank: it died, or it did not call the same function",
            ) from error
        if self.arrivals is not None:
            self.arrivals.leave(failed=False)

    def _what_happened(self, arrivals: Arrivals) -> str:
        """Return which ranks a failed collective misses, as a phrase; empty: nobody can tell."""
        if absent := arrivals.missing():
            return f"{self._named(absent)} did not come to a collective of all ranks"
        inside, have_ended = arrivals.lost()
        if not inside:
            return ""
        if have_ended:
            return f"{self._named(inside)} died in a collective of all ranks"
        return f"{self._named(inside)} did not come out of a collective of all ranks"

    def _named(self, ranks: Sequence[int]) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self.world}"

    def say(self, text: str) -> None:
        """Tell the other ranks something that they may ask for where a later collective fails."""
        if self.arrivals is not None:
            self.arrivals.say(text)

    @contextmanager
    def said_if_lost(self, outcomes: Mapping[str, str]) -> Iterator[None]:
        """Add to an error that names lost ranks the outcome of what a rank has said in the context by
        `say`; that of "" where none has said anything."""
        arrivals = self.arrivals
        since = 0 if arrivals is None else arrivals.count
        try:
            yield
        except LostRanks as error:
            heard = "" if arrivals is None else arrivals.heard(since)
            error.message += f"; {outcomes.get(heard, outcomes[''])}"
            raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on every rank what one rank raised inside the context: the error itself on that
        rank, a RunError that names the rank on the others."""
        error: BaseException | None = None
        try:
            yield
        except LostRanks:
            raise  # there is nobody to tell
        except Exception as caught:
            error = caught
        said = None if error is None else _said(error)
        try:
            if not self.any(said is not None):
                return
            answers = self.all(said)
        except LostRanks as lost:
            raise lost if error is None else error from lost
        _raise_said(error, answers)


def _said(error: BaseException) -> tuple[str, str, str]:
    """Return what the other ranks are told of an error: its code, text and hint."""
    if isinstance(error, CkptmapError):
        return error.code, error.message, error.hint
    code = getattr(error, "code", "CKM306")
    return str(code), f"{type(error).__name__}: {error}", ""


def _raise_said(error: BaseException | None, answers: Sequence[Sequence[str] | None]) -> None:
    """Raise the error of this rank, else a RunError of the first rank that has said one; none: nothing."""
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer is not None:
            code, message, hint = answer
            raise RunError(code, f"[rank {rank}] {message}", hint)


@contextmanager
def said_if_lost(text: str) -> Iterator[None]:
    """Add to an error that names lost ranks what has become of the checkpoint or the model."""
    try:
        yield
    except LostRanks as error:
        error.message += f"; {text}"
        raise


def rank_and_world() -> tuple[int, int]:
    """Return rank and size of torch's default group; (0, 1) without one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _short(error: BaseException) -> str:
    return _GLOO.sub("", first_line(error))
