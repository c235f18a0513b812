"""Which tensors of a checkpoint are parameters and which are buffers, as far as it shows.

No format says so, and both lie in one dict. FSDP cuts every parameter and no buffer; an optimizer
lists parameters alone, though not all of them where some are frozen.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from ckptmap.core.woven import Pieced
from ckptmap.errors import CkptmapError
from ckptmap.protocols import Group
from ckptmap.sharding.flat_slices import InUnit, Slices
from ckptmap.tensors import FLOATING, PARAMETERS, StoredTensor

if TYPE_CHECKING:
    from ckptmap.checkpoint.checkpoint import Checkpoint


class BufferEvidence:
    """What one checkpoint shows of its tensors. It may show nothing: then none is a buffer."""

    def __init__(self, ckpt: Checkpoint) -> None:
        self._ckpt = ckpt

    def is_buffer(self, fqn: str) -> bool:
        """Did ranks that cut others leave it whole, or is it not in an optimizer that has all that
        are parameters for certain? A single row, which only flat parameters can cut, shows little."""
        if fqn not in self._ckpt or fqn in self._listed or self._is_cut(fqn):
            return False
        if not self._frozen:
            return True
        rows = self._ckpt.group(fqn).info.shape[:1]
        return self._flat if rows <= (1,) else bool(self._cut)

    @cached_property
    def _cut(self) -> frozenset[str]:
        return frozenset(fqn for fqn in self._ckpt if _is_cut(self._ckpt.group(fqn)))

    def _is_cut(self, fqn: str) -> bool:
        return fqn in self._cut

    @cached_property
    def _flat(self) -> bool:
        return any(
            _is_flat(stored) for fqn in self._cut for stored in _stored(self._ckpt.group(fqn))
        )

    @cached_property
    def _listed(self) -> frozenset[str]:
        """By the optimizer; nothing where its state is of no use, which is said elsewhere."""
        try:
            named = [name for group in self._ckpt.optimizer_groups for name in group["params"]]
            return frozenset(named).union(self._ckpt.optimizer)
        except CkptmapError:
            return frozenset()

    @cached_property
    def _frozen(self) -> bool:
        """May there be parameters that the optimizer does not list?"""
        if not self._listed:
            return True
        shares = {share for fqn in self._listed if fqn in self._ckpt for share in self._shares(fqn)}
        return any(
            fqn not in self._listed and shares.isdisjoint(self._shares(fqn))
            for fqn in self._ckpt
            if self._is_cut(fqn) or self._is_called_so(fqn)
        )

    def _is_called_so(self, fqn: str) -> bool:
        info = self._ckpt.group(fqn).info
        return fqn.rpartition(".")[2] in PARAMETERS and info.dtype in FLOATING

    def _shares(self, fqn: str) -> set[object]:
        """What tied tensors have in common."""
        return {stored.share for stored in _stored(self._ckpt.group(fqn))} - {None}


def _is_cut(group: Group) -> bool:
    """Over ranks, or in a flat parameter, of which one rank may have held all of a small one."""
    return any(len(stored.chunks) > 1 or _is_flat(stored) for stored in _stored(group))


def _is_flat(stored: StoredTensor) -> bool:
    return isinstance(stored.share, InUnit | Slices)


def _stored(group: Group) -> Iterable[StoredTensor]:
    for part in group.parts.values():
        yield from part.sources if isinstance(part, Pieced) else (part,)
