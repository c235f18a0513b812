"""Which parameter an index of FSDP1's optimizer state can mean: a FlatParameter, or a single parameter.

A FlatParameter holds the tensors of one wrapped module, in the order of the model's state dict. Weights
that were flat themselves name it and the offset of each tensor (`InUnit`). Otherwise the wrapped
modules tell, which FSDP1's raw state dict still lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptmap.mapping.wrappers import ANYWHERE
from ckptmap.protocols.file_systems import Mounts
from ckptmap.sharding.dtensor_spec import is_dtensor, read_placed
from ckptmap.sharding.flat_param import KEY
from ckptmap.sharding.flat_range_boxes import InUnit, Slices
from ckptmap.sharding.reference_model import Plain
from ckptmap.sharding.sharded_tensor_spec import is_sharded, read_sharded
from ckptmap.storage.files import Files
from ckptmap.tensors import BUFFERS, FLOATING, Leaf, Opaque, PerRank, StoredTensor, TensorInfo

Counts = tuple[int, ...]
"""How many elements each rank holds."""


@dataclass(frozen=True)
class ShardSizes:
    """The shapes of an index's largest state, and how many elements each rank holds of it."""

    shapes: Sequence[tuple[int, ...]] = ()
    counts: Counts = ()


class FlatMember(NamedTuple):
    """A tensor of a parameter, and the flat element of the parameter that it begins at."""

    info: TensorInfo
    start: int


@dataclass(frozen=True)
class IndexMeaning:
    """What an index can mean: a flat parameter with its tensors, or one tensor.

    key      as stored
    members  key -> the tensor
    counts   how many elements each rank holds, without padding; None: not known
    weights  of a unit whose tensors are known from the model's dict alone, their leaves: two that
             are tied are both there, and once in the flat parameter
    mounts   the file systems to read weights through that may be tied
    """

    key: str
    members: Mapping[str, FlatMember]
    counts: Counts | None
    is_unit: bool = False
    weights: Mapping[str, Leaf] | None = None
    mounts: Mounts = field(default_factory=Mounts, repr=False, compare=False)

    @property
    def numel(self) -> int:
        return sum(info.numel for info, _ in self.members.values())

    def fitted(self, sizes: ShardSizes) -> IndexMeaning | None:
        """Return this meaning, tied tensors taken once, if it fits the ranks' state; else None."""
        if self._fits(sizes):
            return self
        if self.weights is None or not sizes.counts:
            return None
        fitting = [
            without
            for key, _ in _pairs_of_one_shape(self.members)
            if (without := self._without(key))._fits(sizes) and self._is_repeated(key)
        ]
        return fitting[0] if len(fitting) == 1 else None

    def _fits(self, sizes: ShardSizes) -> bool:
        if not sizes.counts:
            return True  # frozen, or never stepped: without state
        if self.is_unit:
            return count_copies(sizes.counts, self) > 0
        ((info, _),) = self.members.values()
        if set(sizes.shapes) == {info.shape}:
            return self.counts is None or self.counts == sizes.counts
        if any(len(shape) != 1 for shape in sizes.shapes):
            return False
        if self.counts is not None and self.counts != sizes.counts:
            return False
        return count_copies(sizes.counts, self) > 0

    def _without(self, key: str) -> IndexMeaning:
        infos = {name: info for name, (info, _) in self.members.items() if name != key}
        return replace(self, members=dict(_with_offsets(infos)))

    def _is_repeated(self, key: str) -> bool:
        """Return whether the tensor holds the same bytes as another one of its shape."""
        assert self.weights is not None
        weight = self.weights[key]
        return any(
            _same_bytes(weight, self.weights[other], self.mounts)
            for member, other in _pairs_of_one_shape(self.members)
            if member == key
        )


def _pairs_of_one_shape(
    members: Mapping[str, FlatMember],
) -> Iterator[tuple[str, str]]:
    """Yield pairs (later, earlier) of members of one shape."""
    for earlier, later in itertools.combinations(members, 2):
        if members[later].info == members[earlier].info:
            yield later, earlier


def count_copies(counts: Counts, meaning: IndexMeaning) -> int:
    """Return how many times the ranks together hold the parameter; 0: their counts do not fit it.

    A flat parameter's shards are equally long, the last ones padded; a parameter's slices are what
    they are. Ranks 0..N-1 hold it once, N..2N-1 again: replicas are the outermost dim of the mesh.
    """
    for copies in range(1, len(counts) + 1):
        if len(counts) % copies:
            continue
        ranks = len(counts) // copies
        if counts != counts[:ranks] * copies:
            continue
        if meaning.is_unit and set(counts) == {-(-meaning.numel // ranks)}:
            return copies
        if not meaning.is_unit and sum(counts[:ranks]) == meaning.numel:
            return copies
    return 0


# --------------------------------------------------------------------------------- from weights


def parameter_meanings(weights: Mapping[str, Leaf]) -> list[IndexMeaning]:
    """Return the parameters in the order of the model's dict, tied ones once. Parameters that lay
    together in one flat parameter are one entry."""
    units: dict[str, dict[str, FlatMember]] = {}
    meanings: dict[str, IndexMeaning | None] = {}
    seen: set[object] = set()
    for key, info, share in _parameters(weights):
        if share is not None and share in seen:
            continue
        seen.add(share)
        if isinstance(share, InUnit):
            meanings.setdefault(share.unit, None)
            units.setdefault(share.unit, {})[key] = FlatMember(info, share.offset)
        else:
            counts = share.counts if isinstance(share, Slices) else None
            meanings[key] = IndexMeaning(key, {key: FlatMember(info, 0)}, counts)
    return [
        meaning
        or IndexMeaning(
            key, dict(sorted(units[key].items(), key=lambda item: item[1].start)), None, True
        )
        for key, meaning in meanings.items()
    ]


def unit_meanings(
    weights: Mapping[str, Leaf], modules: Sequence[str], plain: Plain, mounts: Mounts
) -> list[IndexMeaning]:
    """Return the flat parameters by wrapped module, in module order, and parameters that lie in none.

    Within a unit tensors are in the order of the dict, which is that of its modules; what is not
    cut where others are is no part of a flat parameter: a buffer, or one that FSDP1 ignores.
    """
    names = plain(weights)
    whole = are_whole(weights)
    prefixes = sorted(
        (".".join(s for s in m.split(".") if s not in ANYWHERE) for m in modules), key=len
    )
    members: dict[str, dict[str, TensorInfo]] = {}
    meanings: dict[str, IndexMeaning | None] = {}
    for key, info, _ in _parameters(weights):
        enclosing = [p for p in prefixes if not p or names[key].startswith(p + ".")]
        for prefix in enclosing:  # its flat parameter comes before all that is in the module
            meanings.setdefault(_unit_key(prefix), None)
        if enclosing and (whole or is_cut(weights[key])):
            members.setdefault(_unit_key(enclosing[-1]), {})[key] = info
        else:
            meanings[key] = IndexMeaning(key, {key: FlatMember(info, 0)}, None)
    return [
        meaning or _unit(key, members[key], weights, mounts)
        for key, meaning in meanings.items()
        if meaning is not None or key in members
    ]


def _unit_key(prefix: str) -> str:
    return f"{prefix}.{KEY}" if prefix else KEY


def _unit(
    key: str, infos: Mapping[str, TensorInfo], weights: Mapping[str, Leaf], mounts: Mounts
) -> IndexMeaning:
    leaves = {name: weights[name] for name in infos}
    return IndexMeaning(key, dict(_with_offsets(infos)), None, True, leaves, mounts)


def _parameters(weights: Mapping[str, Leaf]) -> Iterator[tuple[str, TensorInfo, object]]:
    """Yield (key, info, share) of every weight that can be a parameter."""
    for key, leaf in weights.items():
        first = leaf.values[0] if isinstance(leaf, PerRank) else leaf
        info = getattr(first, "info", None)
        if not isinstance(info, TensorInfo) or info.dtype not in FLOATING:
            continue
        if key.rpartition(".")[2] not in BUFFERS:
            yield key, info, getattr(first, "share", None)


def is_cut(leaf: Leaf) -> bool:
    """Return whether the ranks hold parts of the weight, as a ShardedTensor or a DTensor."""
    values = leaf.values if isinstance(leaf, PerRank) else (leaf,)
    return any(isinstance(value, Opaque) and value.info is not None for value in values)


def are_whole(weights: Mapping[str, Leaf]) -> bool:
    """Return whether every weight is whole, as NO_SHARD and FSDP1 of one rank save them."""
    return not any(
        is_cut(leaf) or isinstance(getattr(leaf, "share", None), InUnit | Slices)
        for leaf in weights.values()
    )


def _with_offsets(
    infos: Mapping[str, TensorInfo],
) -> Iterator[tuple[str, FlatMember]]:
    offset = 0
    for key, info in infos.items():
        yield key, FlatMember(info, offset)
        offset += info.numel


# --------------------------------------------------------------------------------- ties


def _same_bytes(first: Leaf, second: Leaf, mounts: Mounts) -> bool:
    """Return whether both weights hold the same bytes on every rank.

    Checksums in the files are compared in place of the bytes, where the files have them.
    """
    first_shards, second_shards = _shards(first), _shards(second)
    if not first_shards or [part.info for part in first_shards] != [
        part.info for part in second_shards
    ]:
        return False
    return all(
        _content(a, mounts) == _content(b, mounts)
        for a, b in zip(first_shards, second_shards, strict=True)
    )


def _shards(leaf: Leaf) -> list[StoredTensor]:
    """Return the ranks' parts of a weight."""
    shards: list[StoredTensor] = []
    for value in leaf.values if isinstance(leaf, PerRank) else (leaf,):
        if is_sharded(value):
            shards += [tensor for _, tensor in read_sharded(value, KEY).shards]
        elif is_dtensor(value):
            local = read_placed(value, KEY).local
            shards += [local] if isinstance(local, StoredTensor) else []
        elif isinstance(value, StoredTensor):
            shards.append(value)
    return shards


def _content(tensor: StoredTensor, mounts: Mounts) -> tuple[int | None, bytes]:
    chunk = tensor.chunks[0]
    if chunk.crc32 is not None:
        return chunk.crc32, b""
    files = Files(mounts=mounts)
    try:
        return None, files.read(chunk.region.file, chunk.region.offset, chunk.region.nbytes)
    finally:
        files.close()
