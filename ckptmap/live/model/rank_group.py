"""The ranks of a live run as one group, which exchanges small Python objects over gloo.

Each purpose has a process group of its own, so that a save in the background cannot come between
the collectives of a training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ckptmap.errors import CkptmapError, RunError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_GROUPS: dict[str, tuple[object, ProcessGroup]] = {}
"""Purpose -> (torch's default group, our group); a new default group gets a new one of ours."""


@dataclass(frozen=True)
class RankGroup:
    """This rank and all others; a group of one where torch.distributed is not initialized."""

    rank: int = 0
    world: int = 1
    group: ProcessGroup | None = None

    @classmethod
    def join(cls, purpose: str) -> RankGroup:
        """Return the group for a purpose. All ranks make the first call together."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        default = dist.group.WORLD
        known = _GROUPS.get(purpose)
        if known is None or known[0] is not default:
            known = _GROUPS[purpose] = (default, dist.new_group(backend="gloo"))
        return cls(dist.get_rank(), dist.get_world_size(), known[1])

    def all(self, value: T) -> list[T]:
        """Return the value of every rank, in order of rank."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        found = [value] * self.world
        dist.all_gather_object(found, value, group=self.group)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on every rank what one rank raised inside the context: the error itself on that
        rank, a RunError that names the rank on the others."""
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
    """Return rank and size of torch's default group; (0, 1) without one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
