"""Read what `optimizer.state_dict()` returns under FSDP1: flat shards of state, one file a rank.

    use_orig_params=False   {0: {exp_avg: [ceil(numel / N)]}}   an index a FlatParameter, padded
    use_orig_params=True    {0: {exp_avg: [n]}, 3: ...}         an index a parameter, its slice of
                                                                this rank; none where that is empty

Indices count the same on every rank: through the groups, as the parameters were passed. Which is
which comes from `param_names` in the groups, else from the order of the model's own dict, which is
that of its modules, where what each rank holds fits that in one way only. Ranks that replicate
others (HYBRID_SHARD) hold the same again, which is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property

from ckptmap.core.state_paths import by_rank
from ckptmap.optim.align_order import align_named
from ckptmap.optim.fsdp1_index_meaning import (
    HeldState,
    IndexMeaning,
    are_whole,
    copies,
    is_cut,
    single_places,
    unit_places,
)
from ckptmap.optim.index_order import MODEL_ORDER
from ckptmap.optim.nested_keys import read_nested
from ckptmap.optim.state import GROUPS, NAMES, PARAMS, STATE, StateKeys, expanded
from ckptmap.protocols.file_systems import Mounts, ReadsFiles
from ckptmap.sharding.flat_range_boxes import InUnit, Slices, rectangles
from ckptmap.sharding.reference_model import Like, Plain, Units
from ckptmap.sharding.sharded_tensor_spec import is_sharded
from ckptmap.tensors import (
    Chunk,
    Leaf,
    Opaque,
    Path,
    PerRank,
    Region,
    StateNote,
    StoredTensor,
    TensorInfo,
)


class FlatOptimizer(ReadsFiles):
    """Replaces state of flat parameters by state of the parameters in them, keyed by name.

    The registry asks it after the unflattener of the weights, whose result it needs.
    """

    name = "flat-optimizer"

    def unflatten(
        self,
        leaves: Mapping[Path, Leaf],
        like: Callable[[], Like] | None,
        plain: Plain,
        where: str,
        units: Units,
    ) -> Mapping[Path, Leaf]:
        """Return the leaves with the state by name; where it cannot be resolved, with a StateNote that
        says why."""
        root = _root_of(leaves, units)
        if root is None:
            return leaves
        depth = len(root)
        inside = {path[depth:]: leaf for path, leaf in leaves.items() if path[:depth] == root}
        at = _weights_root(leaves, root, units)
        weights = {str(path[-1]): leaf for path, leaf in leaves.items() if path and path[:-1] == at}
        inside = expanded(inside)
        keys = read_nested(inside)
        if keys is None or not keys.by_index or not _is_flat(inside, keys, weights):
            return leaves
        try:
            readings = _readings(weights, units.get(at or (), ()), plain, self.mounts)
            state = _by_name(inside, keys, plain, readings)
        except _Unresolved as error:
            state = {(STATE,): StateNote(refused=str(error))}
        kept = {path: leaf for path, leaf in leaves.items() if path[:depth] != root}
        return {**kept, **{(*root, *path): leaf for path, leaf in state.items()}}


class _Unresolved(Exception):
    """The state cannot be assigned to parameters; the text says why."""


def _root_of(leaves: Mapping[Path, Leaf], units: Units) -> Path | None:
    """Return the path of state keyed by index: of several ranks, or of one that lists units (NO_SHARD)."""
    kinds = PerRank | StoredTensor if units else PerRank
    for path, leaf in leaves.items():
        at = path.index(STATE) if STATE in path else len(path)
        if at + 2 < len(path) and type(path[at + 1]) is int and isinstance(leaf, kinds):
            return path[:at]
    return None


def _weights_root(leaves: Mapping[Path, Leaf], root: Path, units: Units) -> Path | None:
    """Return the path of the dict with cut weights, else of the one that lists units; None: neither."""
    cut = (path[:-1] for path, leaf in leaves.items() if path[: len(root)] != root and _cut(leaf))
    weights_root = next(cut, next((path for path, modules in units.items() if modules), None))
    return None if weights_root == root else weights_root


def _readings(
    weights: Mapping[str, Leaf], modules: Sequence[str], plain: Plain, mounts: Mounts
) -> list[Sequence[IndexMeaning]]:
    """Return the readings of the indices, likeliest first: as flat parameters where units are listed,
    and as single parameters."""
    singles = single_places(weights)
    listed = modules and (any(map(is_cut, weights.values())) or are_whole(weights))
    return [unit_places(weights, modules, plain, mounts), singles] if listed else [singles]


def _by_name(
    leaves: Mapping[Path, Leaf],
    keys: StateKeys,
    plain: Plain,
    readings: Sequence[Sequence[IndexMeaning]],
) -> dict[Path, Leaf]:
    """Return the state by name, by the first reading that fits.

    Raises _Unresolved with the objection to the first reading.
    """
    against: _Unresolved | None = None
    for places in readings:
        try:
            return _State(leaves, keys, places, plain).by_name()
        except _Unresolved as error:
            against = against or error
    assert against is not None, "there is a reading"
    raise against


def _cut(leaf: Leaf) -> bool:
    if isinstance(leaf, StoredTensor):
        return isinstance(leaf.share, InUnit | Slices)
    return isinstance(leaf, PerRank) and any(
        is_sharded(value) or (isinstance(value, Opaque) and value.info) for value in leaf.values
    )


def _is_flat(leaves: Mapping[Path, Leaf], keys: StateKeys, weights: Mapping[str, Leaf]) -> bool:
    """Return whether the state is plain one-dim tensors, no DTensor, beside weights that are cut."""
    values = [value for path in keys.state for value in by_rank(leaves[path])]
    stored = [value for value in values if isinstance(value, StoredTensor)]
    if len(stored) != sum(isinstance(value, StoredTensor | Opaque) for value in values):
        return False
    if are_whole(weights) and any(len(value.info.shape) > 1 for value in stored):
        return False  # state of the parameters themselves
    return bool(weights) and any(len(value.info.shape) == 1 for value in stored)


_LISTS = (
    ", which list no wrapped modules: name a checkpoint of this model that does, another rank file of"
    " FSDP1's, with --like"
)


# --------------------------------------------------------------------------------- state


class _State:
    """One reading of the optimizer's leaves: what each index means."""

    def __init__(
        self,
        leaves: Mapping[Path, Leaf],
        keys: StateKeys,
        places: Sequence[IndexMeaning],
        plain: Plain,
    ) -> None:
        self.leaves = leaves
        self.keys = keys
        self.plain = plain
        self.places = places

    def by_name(self) -> dict[Path, Leaf]:
        """Return the leaves keyed by the weights' stored keys. Raises _Unresolved."""
        if any(isinstance(self.leaves[path], PerRank) for path in self._listing):
            raise _Unresolved("the ranks list different parameters in their groups")
        source, order = self._order()
        state: dict[Path, Leaf] = {}
        for path, (key, name) in self.keys.state.items():
            for weight, (info, start) in order[key].members.items():
                title = ".".join((key, *map(str, name)))
                entry = self._leaf(title, self.leaves[path], order[key], info)
                if entry is _Flat.FLAT:
                    counts = self._held[key].counts
                    again = copies(counts, order[key])
                    entry = _unflattened(title, self.leaves[path], info, start, counts, again)
                state[STATE, weight, *name] = entry
        groups: dict[Path, Leaf] = {
            (GROUPS, number, PARAMS): [w for key in params for w in order[key].members]
            for number, params in enumerate(self.keys.params)
        }
        hyper = {
            (GROUPS, number, *name): self.leaves[path]
            for path, (number, name) in self.keys.hyper.items()
            if name != (NAMES,)
        }
        rest = {path: self.leaves[path] for path in self.keys.rest}
        return {(STATE,): StateNote(order=source), **state, **groups, **hyper, **rest}

    @cached_property
    def _listing(self) -> list[Path]:
        return [
            p for p in self.leaves if p[0] == GROUPS and (len(p) < 3 or p[2] in (PARAMS, NAMES))
        ]

    # ------------------------------------------------------------------ which is which

    def _order(self) -> tuple[str, Mapping[str, IndexMeaning]]:
        """Return where the order came from, and index -> its meaning, proven by what the ranks hold."""
        listed = [key for params in self.keys.params for key in params]
        lost = next((key for key, _ in self.keys.state.values() if key not in listed), None)
        if lost is not None:
            raise _Unresolved(f"the state of index {lost} belongs to no group")
        names = self._names()
        if names is None:
            return MODEL_ORDER, self._aligned()
        order = {}
        for key, place in zip(listed, self._named(names), strict=True):
            fitted = place.fitted(self._held[key])
            if fitted is None:
                raise _Unresolved(
                    f"index {key} is named {place.key}, but the ranks hold "
                    f"{list(self._held[key].counts)} elements of it"
                )
            order[key] = fitted
        return "param_names in the groups", order

    def _names(self) -> list[str] | None:
        all_names: list[str] = []
        for number, params in enumerate(self.keys.params):
            names = self.leaves.get((GROUPS, number, NAMES))
            if not isinstance(names, list) or len(names) != len(params):
                return None
            all_names += map(str, names)
        return all_names

    def _named(self, names: Sequence[str]) -> list[IndexMeaning]:
        known = self.plain([place.key for place in self.places])
        by_name = {known[place.key]: place for place in self.places}
        plain = self.plain(names)
        lost = next((name for name in names if plain[name] not in by_name), None)
        if lost is not None:
            raise _Unresolved(f"param_names has {lost}, which is no weight of the files")
        return [by_name[plain[name]] for name in names]

    def _aligned(self) -> Mapping[str, IndexMeaning]:
        held = [[self._held[key] for key in params] for params in self.keys.params]
        keys = [place.key for place in self.places]
        ways = align_named(held, self.places, keys, lambda item, place: bool(place.fitted(item)))
        if isinstance(ways, str):
            flat = any(place.is_unit for place in self.places)
            kind = "flat parameters" if flat else "weights"
            raise _Unresolved(
                f"its {sum(map(len, held))} parameters are flat shards, and {ways} to match them"
                f" with the {len(self.places)} {kind} of the model files" + ("" if flat else _LISTS)
            )
        pairs = zip(self.keys.params, ways, strict=True)
        return {
            key: self.places[at].fitted(self._held[key]) or self.places[at]
            for keys, places in pairs
            for key, at in zip(keys, places, strict=True)
        }

    @cached_property
    def _held(self) -> Mapping[str, HeldState]:
        held = {key: HeldState() for params in self.keys.params for key in params}
        for path, (key, _) in self.keys.state.items():
            values = by_rank(self.leaves[path])
            shapes = [v.info.shape for v in values if isinstance(v, StoredTensor)]
            if any(shapes) and key in held and not held[key].counts:
                counts = tuple(v.info.numel if isinstance(v, StoredTensor) else 0 for v in values)
                held[key] = HeldState(shapes, counts)
        return held

    # ------------------------------------------------------------------ one entry

    def _leaf(self, title: str, leaf: Leaf, place: IndexMeaning, info: TensorInfo) -> Leaf | _Flat:
        """Return a state entry that is no tensor, or the same on all ranks; else `_Flat.FLAT`."""
        values = [value for value in by_rank(leaf) if value is not None]
        stored = _stored(leaf)
        if not stored:
            if any(value != values[0] for value in values):
                raise _Unresolved(f"state {title} differs between ranks: {values[:3]!r:.80}")
            return values[0] if values else None
        if len(stored) < len(values) or len({value.info.dtype for value in stored}) > 1:
            raise _Unresolved(f"state {title} is of different kinds on the ranks")
        shapes = {value.info.shape for value in stored}
        held = sum(value.info.numel for value in stored)
        whole = shapes == {info.shape} and held > info.numel and not place.is_unit
        return _same_on_all(stored) if whole or shapes == {()} else _Flat.FLAT


class _Flat(Enum):
    """Stands for an entry that is cut over the ranks."""

    FLAT = "flat"


def _unflattened(
    title: str, leaf: Leaf, info: TensorInfo, start: int, counts: Sequence[int], again: int
) -> StoredTensor:
    """Return one tensor's part of the flat shards.

    Rank r holds `counts[r]` elements. The ranks together hold the flat parameter `again` times,
    one copy after the other; the copies become replicas.
    """
    stored = [value for value in _stored(leaf) if value.info.numel]
    numel, expected = sum(value.info.numel for value in stored), sum(counts)
    if any(len(value.info.shape) != 1 for value in stored) or numel != expected:
        raise _Unresolved(f"state {title} holds {numel} elements, expected {expected} in one dim")
    if any(len(v.chunks) > 1 or not v.chunks[0].region.is_contiguous for v in stored):
        raise _Unresolved(f"state {title} is no contiguous tensor")
    made = TensorInfo(info.shape, _stored(leaf)[0].info.dtype)
    each = len(stored) // again
    others = [
        chunk
        for copy in range(1, again)
        for chunk in _chunks(made, stored[copy * each : (copy + 1) * each], start)
    ]
    return StoredTensor(made, lambda: list(_chunks(made, stored[:each], start)), others)


def _stored(leaf: Leaf) -> list[StoredTensor]:
    return [value for value in by_rank(leaf) if isinstance(value, StoredTensor)]


def _same_on_all(stored: Sequence[StoredTensor]) -> StoredTensor:
    """Return the first rank's tensor, the others' as its replicas; it shares storage with no other."""
    others = [chunk for each in stored[1:] for chunk in each.chunks]
    return StoredTensor(stored[0].info, list(stored[0].chunks), others)


def _chunks(info: TensorInfo, stored: Sequence[StoredTensor], start: int) -> Iterator[Chunk]:
    """Yield what the flat shards hold of the tensor that begins at flat element `start`."""
    at = 0
    for shard in stored:
        low, high = max(at, start), min(at + shard.info.numel, start + math.prod(info.shape))
        for box, first in rectangles(info.shape, low - start, high - start):
            (chunk,) = shard.chunks
            where = chunk.region.offset + (start + first - at) * info.itemsize
            yield Chunk(box, Region.contiguous(chunk.region.file, where, box.sizes, info.itemsize))
        at += shard.info.numel
