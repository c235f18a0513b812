"""What the ranks of a live run tell each other: small objects, on the CPU, apart from training.

A group of its own, so that a save in the background cannot come between the collectives of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptmap.errors import CkptmapError, RunError

T = TypeVar("T")

_GROUPS: dict[str, tuple[Any, Any]] = {}
"""Purpose -> (torch's default group, ours beside it); made anew when torch's is."""


@dataclass(frozen=True)
class RankGroup:
    """This rank among all; alone where torch.distributed is not in use."""

    rank: int = 0
    world: int = 1
    group: Any = None

    @classmethod
    def join(cls, purpose: str) -> RankGroup:
        """Every rank calls it, the first time together."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        default = dist.group.WORLD
        known = _GROUPS.get(purpose)
        if known is None or known[0] is not default:
            known = _GROUPS[purpose] = (default, dist.new_group(backend="gloo"))
        return cls(dist.get_rank(), dist.get_world_size(), known[1])

    def all(self, value: T) -> list[T]:
        """What each rank has, by rank."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.group)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on every rank what any rank raised within: its own error there, a RunError that
        names that rank elsewhere."""
        error: BaseException | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        said = None
        if error is not None:
            known = isinstance(error, CkptmapError)
            said = (
                getattr(error, "code", "CKM306"),
                error.message
                if isinstance(error, CkptmapError)
                else f"{type(error).__name__}: {error}",
                getattr(error, "hint", "") if known else "",
            )
        answers = self.all(said)
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if answer is not None:
                code, message, hint = answer
                raise RunError(code, f"[rank {rank}] {message}", hint)


def rank_and_world() -> tuple[int, int]:
    """Of torch's default group; (0, 1) without one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
