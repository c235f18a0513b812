"""Groups of keys that differ only in numbers: what `draft_mapping` pairs into rules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.mapping.name_patterns import HOLE, skeleton
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.tensor_bytes import tensor_bytes

LETTERS = "nekjlm"
"""The names of captures in a rule, in the order of the numbers in a key."""
MAX_NUMEL = 1 << 28
"""The values of a larger tensor (in elements) are not compared."""


@dataclass
class KeyGroup:
    """All tensors whose keys have one pattern; most rules need all of them to have one shape.

    tensors   the numbers in a key -> its tensor
    """

    pattern: str
    tensors: dict[tuple[int, ...], LazyTensor]

    @cached_property
    def first(self) -> LazyTensor:
        return self.tensors[min(self.tensors)]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.first.shape

    @property
    def numbers(self) -> frozenset[tuple[int, ...]]:
        return frozenset(self.tensors)

    @property
    def uniform(self) -> bool:
        return len({lazy.shape for lazy in self.tensors.values()}) == 1

    @property
    def name(self) -> str:
        """The pattern with named captures: `layers.{n}.experts.{e}.w`."""
        parts = self.pattern.split(HOLE)
        holes = [f"{{{letter}}}" for letter in LETTERS[: len(parts) - 1]]
        return parts[0] + "".join(h + p for h, p in zip(holes, parts[1:], strict=True))

    @cached_property
    def rows(self) -> list[bytes]:
        """The digests of the rows of the first tensor, or of the elements of a vector."""
        return row_digests(self.first)


def groups_of(ckpt: Checkpoint) -> list[KeyGroup]:
    """Return the groups of the keys of a checkpoint, in stored order."""
    groups: dict[str, KeyGroup] = {}
    for fqn in ckpt:
        pattern, numbers = skeleton(fqn)
        groups.setdefault(pattern, KeyGroup(pattern, {})).tensors[numbers] = ckpt[fqn]
    return list(groups.values())


def row_digests(lazy: LazyTensor) -> list[bytes]:
    import xxhash

    if lazy.info.numel > MAX_NUMEL:
        return []
    data = tensor_bytes(lazy.read().contiguous())
    count = lazy.shape[0] if lazy.shape else 1
    step = data.nbytes // max(1, count)
    return [xxhash.xxh3_64_digest(data[i * step : (i + 1) * step]) for i in range(count)]
