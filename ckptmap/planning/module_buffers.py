"""Tell parameters from buffers among the tensors of a checkpoint, as far as the checkpoint shows.

No format says so: a state dict holds both alike. It matters because FSDP cuts every parameter and no
buffer, and an optimizer lists parameters alone, though not all of them where some are frozen.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from ckptmap.core.rearranged_tensors import Assembled
from ckptmap.errors import CkptmapError
from ckptmap.protocols import Group
from ckptmap.sharding.flat_range_boxes import InUnit, Slices
from ckptmap.tensors import FLOATING, PARAMETERS, StoredTensor

if TYPE_CHECKING:
    from ckptmap.checkpoint.checkpoint import Checkpoint


class BufferEvidence:
    """What one checkpoint shows of its tensors; a tensor of which it shows nothing is no buffer."""

    def __init__(self, ckpt: Checkpoint) -> None:
        self._ckpt = ckpt

    def is_buffer(self, fqn: str) -> bool:
        """Return whether the tensor is certainly a buffer.

        It is one if the ranks left it whole and cut others, or if the optimizer lists all parameters
        and not this tensor. A tensor of a single row is judged by flat parameters alone: only they
        can cut a row.
        """
        if fqn not in self._ckpt or fqn in self._listed or self._is_cut(fqn):
            return False
        if not self._some_frozen:
            return True
        rows = self._ckpt.group(fqn).info.shape[:1]
        return self._flat if rows <= (1,) else bool(self._cut)

    @cached_property
    def _cut(self) -> frozenset[str]:
        """FQNs of the tensors that the ranks hold in parts."""
        return frozenset(fqn for fqn in self._ckpt if _is_cut(self._ckpt.group(fqn)))

    def _is_cut(self, fqn: str) -> bool:
        return fqn in self._cut

    @cached_property
    def _flat(self) -> bool:
        """Whether some tensor lies in a flat parameter."""
        return any(
            _is_flat(stored) for fqn in self._cut for stored in _stored(self._ckpt.group(fqn))
        )

    @cached_property
    def _listed(self) -> frozenset[str]:
        """FQNs of the parameters that the optimizer lists."""
        try:
            named = [name for group in self._ckpt.optimizer_groups for name in group["params"]]
            return frozenset(named).union(self._ckpt.optimizer)
        except CkptmapError:  # state that cannot be read is reported where it is planned
            return frozenset()

    @cached_property
    def _some_frozen(self) -> bool:
        """May there be parameters that the optimizer does not list?"""
        if not self._listed:
            return True
        shares = {share for fqn in self._listed if fqn in self._ckpt for share in self._shares(fqn)}
        return any(
            fqn not in self._listed and shares.isdisjoint(self._shares(fqn))
            for fqn in self._ckpt
            if self._is_cut(fqn) or self._is_named_like_parameter(fqn)
        )

    def _is_named_like_parameter(self, fqn: str) -> bool:
        info = self._ckpt.group(fqn).info
        return fqn.rpartition(".")[2] in PARAMETERS and info.dtype in FLOATING

    def _shares(self, fqn: str) -> set[object]:
        """Return the marks of shared storage, which tied tensors have in common."""
        return {stored.share for stored in _stored(self._ckpt.group(fqn))} - {None}


def _is_cut(group: Group) -> bool:
    """Return whether it is cut over ranks, or in a flat parameter, of which one rank may hold all of a small one?"""
    return any(len(stored.chunks) > 1 or _is_flat(stored) for stored in _stored(group))


def _is_flat(stored: StoredTensor) -> bool:
    return isinstance(stored.share, InUnit | Slices)


def _stored(group: Group) -> Iterable[StoredTensor]:
    """Yield the stored tensors beneath a logical one."""
    for part in group.parts.values():
        yield from part.sources if isinstance(part, Assembled) else (part,)
