"""Find where the parameters of an FSDP1 model with `use_orig_params=True` begin in its flat parameter.

Each begins at a multiple of 16 bytes of the dtype that the unit computes in, and the whole is a
multiple of the number of ranks. Which tensors are in it is not stored: a buffer of the same dtype looks
like a parameter that one rank holds whole, so the number of elements must decide.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ckptmap.sharding.flat_unit import StoredUnit
from ckptmap.tensors import PARAMETERS

ALIGNMENTS = (4, 8, 2, 16)
"""Elements in 16 bytes of the dtypes that models compute in."""

MOST_BUFFERS = 2
"""As many tensors of a unit may be buffers that look like parameters."""


@dataclass(frozen=True)
class UnitMember:
    """A tensor that may lie in the flat parameter; one that `is_cut` over ranks does."""

    fqn: str
    numel: int
    is_cut: bool


def place(
    unit: StoredUnit, members: Sequence[UnitMember], ties: Mapping[str, str]
) -> dict[str, int] | None:
    """Return FQN -> the flat element at which each member that is cut begins; None: that is not clear.

    As few members as possible are taken for buffers. Of `ties`, FQN -> the earlier FQN, both begin there.
    """
    unsure = [member.fqn for member in members if not member.is_cut and not _is_parameter(member)]
    for number in range(min(MOST_BUFFERS, len(unsure)) + 1):
        ways = {
            tuple(sorted(offsets.items()))
            for buffers in combinations(unsure, number)
            for step in ALIGNMENTS
            if (offsets := _offsets(unit, members, ties, buffers, step)) is not None
        }
        if ways:
            return dict(ways.pop()) if len(ways) == 1 else None
    return None


def _is_parameter(member: UnitMember) -> bool:
    return member.fqn.rpartition(".")[2] in PARAMETERS


def _offsets(
    unit: StoredUnit,
    members: Sequence[UnitMember],
    ties: Mapping[str, str],
    buffers: Collection[str],
    step: int,
) -> dict[str, int] | None:
    """Return FQN -> flat element of the cut members; None if the members do not fill the unit."""
    offsets: dict[str, int] = {}
    end = 0
    for member in members:
        if member.fqn in buffers:
            continue
        earlier = ties.get(member.fqn)
        if earlier in offsets:
            offsets[member.fqn] = offsets[earlier]
            continue
        offsets[member.fqn] = end + -end % step
        end = offsets[member.fqn] + member.numel
    if not 0 <= unit.info.numel - end < max(1, len(unit.runs)):
        return None
    return {member.fqn: offsets[member.fqn] for member in members if member.is_cut}
