"""Key the state of flat vectors by FQN, as if each parameter had been stepped alone.

    state of vector 0 {exp_avg: [n] on each rank, step: 3}, parameters w, b in it
        -> ("state", "w", "exp_avg"): as w lies in the weights;  ("state", "w", "step"): 3
        -> ("param_groups",): [{"lr": 0.1, "params": ["w", "b"]}]

State that is not element by element (8-bit codes, factors of a matrix) means nothing for a parameter: then
a note says why the state is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptmap.core.state_tree import flatten
from ckptmap.errors import SourceError
from ckptmap.formats.deepspeed.flat_vectors import FlatParameter
from ckptmap.formats.deepspeed.optimizer_states import RankPartition
from ckptmap.formats.deepspeed.step_files import ONE_SAVE
from ckptmap.tensors import Leaf, Path, StateNote, StoredTensor

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


class _Unreadable(Exception):
    """The state cannot be assigned to parameters; the text says why."""


def optimizer_leaves(
    members: Sequence[FlatParameter], ranks: Sequence[RankPartition]
) -> dict[Path, Leaf]:
    """Return the leaves of the optimizer by path.

    Raise SourceError CKM110 if the ranks' hyper-parameters differ.
    """
    by_vector: dict[int, list[FlatParameter]] = {}
    for member in members:
        by_vector.setdefault(member.vector, []).append(member)
    leaves: dict[Path, Leaf] = {}
    try:
        for vector, inside in by_vector.items():
            leaves.update(_state_of(vector, inside, ranks))
    except _Unreadable as error:
        return {(STATE,): StateNote(refused=str(error))}
    first = ranks[0]
    for rank in ranks[1:]:
        if _plain(rank.groups) != _plain(first.groups):
            raise SourceError(
                "CKM110",
                f"{rank.pickled.file}: its param_groups differ from those in {first.pickled.name}",
                ONE_SAVE,
            )
    names = [
        [member.fqn for vector in vectors for member in by_vector.get(vector, ())]
        for vectors in first.of_group
    ]
    settings = first.groups or [{} for _ in names]
    groups = [{**group, PARAMS: params} for group, params in zip(settings, names, strict=True)]
    return {**leaves, **flatten({GROUPS: groups}, first.pickled.file, first.pickled.nbytes)}


def _plain(groups: Sequence[Mapping[str, Leaf]]) -> list[dict[str, Leaf]]:
    plain = (bool, int, float, str, tuple, list, type(None))
    return [{k: v for k, v in group.items() if isinstance(v, plain)} for group in groups]


def _state_of(
    vector: int, members: Sequence[FlatParameter], ranks: Sequence[RankPartition]
) -> Iterator[tuple[Path, Leaf]]:
    """Yield the state of each parameter in a vector."""
    states = [rank.states[vector] for rank in ranks]
    for name in dict.fromkeys(name for state in states for name in state):
        values = [state.get(name) for state in states]
        held = [value for value in values if value is not None]
        if held and all(isinstance(v, StoredTensor) and not v.info.shape for v in held):
            yield from _scalars(members, name, held)
        elif any(isinstance(value, StoredTensor) for value in held):
            yield from _cut(vector, members, name, values, ranks)
        elif all(value == held[0] for value in held):
            for member in members:
                yield (STATE, member.fqn, name), held[0] if held else None
        else:
            raise _Unreadable(f"{name} of group {vector} differs between ranks: {held[:3]!r:.60}")


def _scalars(
    members: Sequence[FlatParameter], name: str, held: Sequence[Leaf]
) -> Iterator[tuple[Path, Leaf]]:
    """Yield one value for each parameter. The ranks' values must be equal: they are compared once."""
    first, *others = [value for value in held if isinstance(value, StoredTensor)]
    for number, member in enumerate(members):
        replicas = [chunk for other in others for chunk in other.chunks] if not number else ()
        yield (
            (STATE, member.fqn, name),
            StoredTensor(first.info, lambda: first.chunks, replicas),
        )


def _cut(
    vector: int,
    members: Sequence[FlatParameter],
    name: str,
    values: Sequence[Leaf],
    ranks: Sequence[RankPartition],
) -> Iterator[tuple[Path, Leaf]]:
    needed = [0] * len(ranks)
    for member in members:
        for piece in member.pieces:
            needed[piece.rank] = max(needed[piece.rank], piece.at + piece.numel)
    held: list[StoredTensor | None] = []
    for rank, value in enumerate(values):
        numel = value.info.numel if isinstance(value, StoredTensor) else 0
        weights = ranks[rank].vectors[vector].info.numel
        flat = isinstance(value, StoredTensor) and len(value.info.shape) == 1
        if (flat or needed[rank]) and not (flat and needed[rank] <= numel and weights <= numel):
            raise _Unreadable(
                f"{name} of group {vector} has {numel} elements on rank {rank}, whose weights have"
                f" {weights}: it is not kept for each element"
            )
        held.append(value if isinstance(value, StoredTensor) else None)
    dtypes = {value.info.dtype for value in held if value is not None}
    padded = [v.info.numel - ranks[r].vectors[vector].info.numel for r, v in enumerate(held) if v]
    if len(dtypes) > 1 or max(padded, default=0) > PADDING * len(ranks):
        raise _Unreadable(f"{name} of group {vector} is not kept for each element of the weights")
    for member in members:
        yield (STATE, member.fqn, name), member.tensor(held)


PADDING = 2
"""The most elements of padding in a vector, for each rank."""
