"""Read what `optimizer.state_dict()` returns under FSDP1: flat shards of state, one file a rank.

    use_orig_params=False   {0: {exp_avg: [ceil(numel / N)]}}   an index is a FlatParameter, padded
    use_orig_params=True    {0: {exp_avg: [n]}, 3: ...}         an index is a parameter, with the slice
                                                                of this rank; no entry for an empty slice

Indices are the same on every rank: they count the parameters of the groups, in the order in which the
optimizer got them. `param_names` in the groups name the parameters. Without them, the order of the
model's state dict names them, if the sizes of the ranks' shards fit that order in one way only. Ranks
that replicate others (HYBRID_SHARD) hold the same values, and these are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property

from ckptmap.core.state_paths import by_rank
from ckptmap.optim.align_order import align_named
from ckptmap.optim.fsdp1_index_meaning import (
    IndexMeaning,
    ShardSizes,
    are_whole,
    count_copies,
    is_cut,
    parameter_meanings,
    unit_meanings,
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
        optimizer_leaves = {
            path[depth:]: leaf for path, leaf in leaves.items() if path[:depth] == root
        }
        weights_root = _weights_root(leaves, root, units)
        weights = {
            str(path[-1]): leaf
            for path, leaf in leaves.items()
            if path and path[:-1] == weights_root
        }
        optimizer_leaves = expanded(optimizer_leaves)
        keys = read_nested(optimizer_leaves)
        if keys is None or not keys.by_index or not _is_flat(optimizer_leaves, keys, weights):
            return leaves
        try:
            readings = _list_readings(
                weights, units.get(weights_root or (), ()), plain, self.mounts
            )
            state = _name_state(optimizer_leaves, keys, plain, readings)
        except _Unresolved as error:
            state = {(STATE,): StateNote(refused=str(error))}
        others = {path: leaf for path, leaf in leaves.items() if path[:depth] != root}
        return {**others, **{(*root, *path): leaf for path, leaf in state.items()}}


class _Unresolved(Exception):
    """The state cannot be assigned to parameters; the text says why."""


def _root_of(leaves: Mapping[Path, Leaf], units: Units) -> Path | None:
    """Return the path of state keyed by index: of several ranks, or of one that lists units (NO_SHARD).

    Optimizers that keep no state (SGD without momentum) have their groups alone: of flat parameters
    where the weights lay in such."""
    kinds = PerRank | StoredTensor if units else PerRank
    for path, leaf in leaves.items():
        at = path.index(STATE) if STATE in path else len(path)
        if at + 2 < len(path) and type(path[at + 1]) is int and isinstance(leaf, kinds):
            return path[:at]
    if not _lie_in_units(leaves):
        return None
    return next((path[: path.index(GROUPS)] for path in leaves if GROUPS in path), None)


def _lie_in_units(leaves: Mapping[Path, Leaf] | Mapping[str, Leaf]) -> bool:
    return any(isinstance(getattr(leaf, "share", None), InUnit) for leaf in leaves.values())


def _weights_root(leaves: Mapping[Path, Leaf], root: Path, units: Units) -> Path | None:
    """Return the path of the dict with cut weights, else of the one that lists units; None: neither."""
    cut = (path[:-1] for path, leaf in leaves.items() if path[: len(root)] != root and _cut(leaf))
    weights_root = next(cut, next((path for path, modules in units.items() if modules), None))
    return None if weights_root == root else weights_root


def _list_readings(
    weights: Mapping[str, Leaf], modules: Sequence[str], plain: Plain, mounts: Mounts
) -> list[Sequence[IndexMeaning]]:
    """Return the readings of the indices, likeliest first: as flat parameters where units are listed,
    and as single parameters."""
    parameters = parameter_meanings(weights)
    listed = modules and (any(map(is_cut, weights.values())) or are_whole(weights))
    return [unit_meanings(weights, modules, plain, mounts), parameters] if listed else [parameters]


def _name_state(
    leaves: Mapping[Path, Leaf],
    keys: StateKeys,
    plain: Plain,
    readings: Sequence[Sequence[IndexMeaning]],
) -> dict[Path, Leaf]:
    """Return the state by name, by the first reading that fits.

    Raises _Unresolved with the objection to the first reading.
    """
    first_objection: _Unresolved | None = None
    for meanings in readings:
        try:
            return _Reading(leaves, keys, meanings, plain).by_name()
        except _Unresolved as error:
            first_objection = first_objection or error
    assert first_objection is not None, "there is a reading"
    raise first_objection


def _cut(leaf: Leaf) -> bool:
    if isinstance(leaf, StoredTensor):
        return isinstance(leaf.share, InUnit | Slices)
    return isinstance(leaf, PerRank) and any(
        is_sharded(value) or (isinstance(value, Opaque) and value.info) for value in leaf.values
    )


def _is_flat(leaves: Mapping[Path, Leaf], keys: StateKeys, weights: Mapping[str, Leaf]) -> bool:
    """Return whether the state is plain one-dim tensors, no DTensor, beside weights that are cut; without
    state, whether the weights lay in flat parameters."""
    if not keys.state:
        return _lie_in_units(weights)
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


class _Reading:
    """One reading of the optimizer's leaves: what each index means."""

    def __init__(
        self,
        leaves: Mapping[Path, Leaf],
        keys: StateKeys,
        meanings: Sequence[IndexMeaning],
        plain: Plain,
    ) -> None:
        self.leaves = leaves
        self.keys = keys
        self.plain = plain
        self.meanings = meanings

    def by_name(self) -> dict[Path, Leaf]:
        """Return the leaves keyed by the weights' stored keys. Raises _Unresolved."""
        if any(isinstance(self.leaves[path], PerRank) for path in self._listing):
            raise _Unresolved("the ranks list different parameters in their groups")
        source, order = self._order()
        state: dict[Path, Leaf] = {}
        for path, (key, name) in self.keys.state.items():
            for weight, (info, start) in order[key].members.items():
                label = ".".join((key, *map(str, name)))
                entry = self._leaf(label, self.leaves[path], order[key], info)
                if entry is _Flat.FLAT:
                    counts = self._shard_sizes[key].counts
                    copies = count_copies(counts, order[key])
                    entry = _unflatten(label, self.leaves[path], info, start, counts, copies)
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
        others = {path: self.leaves[path] for path in self.keys.rest}
        return {(STATE,): StateNote(order=source), **state, **groups, **hyper, **others}

    @cached_property
    def _listing(self) -> list[Path]:
        return [
            p for p in self.leaves if p[0] == GROUPS and (len(p) < 3 or p[2] in (PARAMS, NAMES))
        ]

    # ------------------------------------------------------------------ which is which

    def _order(self) -> tuple[str, Mapping[str, IndexMeaning]]:
        """Return where the order came from, and index -> its meaning, proven by what the ranks hold."""
        listed = [key for params in self.keys.params for key in params]
        ungrouped = next((key for key, _ in self.keys.state.values() if key not in listed), None)
        if ungrouped is not None:
            raise _Unresolved(f"the state of index {ungrouped} belongs to no group")
        names = self._names()
        if names is None:
            return MODEL_ORDER, self._aligned()
        order = {}
        for key, meaning in zip(listed, self._named(names), strict=True):
            fitted = meaning.fitted(self._shard_sizes[key])
            if fitted is None:
                raise _Unresolved(
                    f"index {key} is named {meaning.key}, but the ranks hold "
                    f"{list(self._shard_sizes[key].counts)} elements of it"
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
        plain_keys = self.plain([meaning.key for meaning in self.meanings])
        by_name = {plain_keys[meaning.key]: meaning for meaning in self.meanings}
        plain_names = self.plain(names)
        unknown = next((name for name in names if plain_names[name] not in by_name), None)
        if unknown is not None:
            raise _Unresolved(f"param_names has {unknown}, which is no weight of the files")
        return [by_name[plain_names[name]] for name in names]

    def _aligned(self) -> Mapping[str, IndexMeaning]:
        sizes = [[self._shard_sizes[key] for key in params] for params in self.keys.params]
        keys = [meaning.key for meaning in self.meanings]
        aligned = align_named(
            sizes, self.meanings, keys, lambda item, meaning: bool(meaning.fitted(item))
        )
        if isinstance(aligned, str):
            flat = any(meaning.is_unit for meaning in self.meanings)
            problem = (
                f"its {sum(map(len, sizes))} parameters are flat shards, and {aligned} to match them"
                f" with the {len(self.meanings)} "
            )
            if flat:
                raise _Unresolved(f"{problem}flat parameters of the model files")
            raise _Unresolved(f"{problem}weights of the model files{_LISTS}")
        pairs = zip(self.keys.params, aligned, strict=True)
        return {
            key: self.meanings[at].fitted(self._shard_sizes[key]) or self.meanings[at]
            for keys, indices in pairs
            for key, at in zip(keys, indices, strict=True)
        }

    @cached_property
    def _shard_sizes(self) -> Mapping[str, ShardSizes]:
        sizes = {key: ShardSizes() for params in self.keys.params for key in params}
        for path, (key, _) in self.keys.state.items():
            values = by_rank(self.leaves[path])
            shapes = [v.info.shape for v in values if isinstance(v, StoredTensor)]
            if any(shapes) and key in sizes and not sizes[key].counts:
                counts = tuple(v.info.numel if isinstance(v, StoredTensor) else 0 for v in values)
                sizes[key] = ShardSizes(shapes, counts)
        return sizes

    # ------------------------------------------------------------------ one entry

    def _leaf(
        self, label: str, leaf: Leaf, meaning: IndexMeaning, info: TensorInfo
    ) -> Leaf | _Flat:
        """Return a state entry that is no tensor, or the same on all ranks; else `_Flat.FLAT`."""
        values = [value for value in by_rank(leaf) if value is not None]
        stored = _stored(leaf)
        if not stored:
            if any(value != values[0] for value in values):
                raise _Unresolved(f"state {label} differs between ranks: {values[:3]!r:.80}")
            return values[0] if values else None
        if len(stored) < len(values) or len({value.info.dtype for value in stored}) > 1:
            raise _Unresolved(f"state {label} is of different kinds on the ranks")
        shapes = {value.info.shape for value in stored}
        numel = sum(value.info.numel for value in stored)
        whole = shapes == {info.shape} and numel > info.numel and not meaning.is_unit
        return _with_replicas(stored) if whole or shapes == {()} else _Flat.FLAT


class _Flat(Enum):
    """Stands for an entry that is cut over the ranks."""

    FLAT = "flat"


def _unflatten(
    label: str, leaf: Leaf, info: TensorInfo, start: int, counts: Sequence[int], copies: int
) -> StoredTensor:
    """Return one tensor's part of the flat shards.

    Rank r holds `counts[r]` elements. The ranks together hold the flat parameter `copies` times,
    one copy after the other; the copies become replicas.
    """
    stored = [value for value in _stored(leaf) if value.info.numel]
    numel, expected = sum(value.info.numel for value in stored), sum(counts)
    if any(len(value.info.shape) != 1 for value in stored) or numel != expected:
        raise _Unresolved(f"state {label} holds {numel} elements, expected {expected} in one dim")
    if any(len(v.chunks) > 1 or not v.chunks[0].region.is_contiguous for v in stored):
        raise _Unresolved(f"state {label} is no contiguous tensor")
    state_info = TensorInfo(info.shape, _stored(leaf)[0].info.dtype)
    per_copy = len(stored) // copies
    replicas = [
        chunk
        for number in range(1, copies)
        for chunk in _chunks(state_info, stored[number * per_copy : (number + 1) * per_copy], start)
    ]
    return StoredTensor(
        state_info, lambda: list(_chunks(state_info, stored[:per_copy], start)), replicas
    )


def _stored(leaf: Leaf) -> list[StoredTensor]:
    return [value for value in by_rank(leaf) if isinstance(value, StoredTensor)]


def _with_replicas(stored: Sequence[StoredTensor]) -> StoredTensor:
    """Return the first rank's tensor, the others' as its replicas; it shares storage with no other."""
    replicas = [chunk for tensor in stored[1:] for chunk in tensor.chunks]
    return StoredTensor(stored[0].info, list(stored[0].chunks), replicas)


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
