"""Errors that all ranks of a model raise together, so that none waits in a later collective."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptmap.errors import CkptmapError, LoadError
from ckptmap.live.model.find_targets import reshard
from ckptmap.live.model.live_tensor import is_dtensor
from ckptmap.live.model.process_groups import wrapped_groups
from ckptmap.live.model.rank_group import LostRanks, RankGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Seen = dict[str, dict[str, int]]
"""Subject -> fact -> a rank that states the fact."""


def peer_groups(model: object, timeout: float | None = None) -> list[RankGroup]:
    """Return the groups of ranks that hold the model together: those of its meshes and wrappers.

    timeout  seconds that a rank waits for the others; None: those of the model's own groups

    Only wrappers and meshes are read, so that no kind of model makes the call fail: an error that
    comes later can then be told to the ranks of these groups.
    """
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    if not isinstance(model, torch.nn.Module):
        return []
    reshard(model)
    groups: dict[int, ProcessGroup] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        mesh = tensor.device_mesh if is_dtensor(tensor) else None
        if mesh is not None and mesh.get_coordinate() is not None:
            for group in mesh.get_all_groups():
                groups.setdefault(id(group), group)
    for wrapped in wrapped_groups(model):
        if wrapped is not None:
            groups.setdefault(id(wrapped), wrapped)
    return [RankGroup.of(group, timeout) for group in groups.values() if group.size() > 1]


def explain(error: Exception, text: str, fqn: str = "") -> None:
    """Add a text, and the name of a tensor, to an error that is being raised."""
    if isinstance(error, CkptmapError):
        message = error.message
        if fqn and fqn not in message:
            message = f"{fqn}: {message}"
        error.message = f"{message}; {text}"
    else:
        error.add_note(text)


@contextmanager
def agreed(peers: Sequence[RankGroup]) -> Iterator[dict[str, str]]:
    """Raise on every rank what one rank raised inside the context: the error itself on that rank, a
    LoadError that names the rank on the others.

    Yields a dict for facts by subject, the fingerprint of a file for one. Raises LoadError CKM509
    on all ranks where two ranks state different facts of one subject.
    """
    error: Exception | None = None
    facts: dict[str, str] = {}
    try:
        yield facts
    except Exception as caught:
        error = caught
    try:
        found, seen = _exchanged(error, facts, peers)
    except LostRanks as lost:
        raise lost if error is None else error from lost
    if error is not None:
        raise error
    if found is not None:
        rank, code, message, hint = found
        raise LoadError(code, f"[rank {rank}] {message}", hint)
    for what, ranks in seen.items():
        if len(ranks) > 1:
            raise LoadError(
                "CKM509",
                f"{what}: is not the same file for ranks {' and '.join(map(str, ranks.values()))}",
                "give every rank the same checkpoint, or a copy of it",
            )


def _exchanged(
    error: Exception | None, facts: Mapping[str, str], peers: Sequence[RankGroup]
) -> tuple[tuple[int, str, str, str] | None, Seen]:
    """Return the first error of any rank, and the facts of all ranks."""
    import torch

    found = None
    if not peers:
        return None, {}
    rank = torch.distributed.get_rank()
    seen: Seen = {what: {fact: rank} for what, fact in facts.items()}
    if error is not None:
        text = (
            error.message
            if isinstance(error, CkptmapError)
            else "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        )
        found = (rank, getattr(error, "code", "CKM505"), text, getattr(error, "hint", ""))
    for group in peers:
        answers = group.all((found, seen))
        found = next((answer for answer, _ in answers if answer is not None), None)
        for _, theirs in answers:
            for what, ranks in theirs.items():
                seen[what] = {**ranks, **seen.get(what, {})}
    return found, seen
