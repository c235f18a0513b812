"""The weights of a checkpoint by FQN: nearly all are one plain tensor, some are payload and scales."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ckptmap.core.tensor_columns import PlainTensors
from ckptmap.protocols import Group
from ckptmap.quantization.dense import Dense
from ckptmap.tensors import StoredTensor, TensorInfo

DENSE = Dense()


class LogicalTensors(Mapping[str, Group]):
    """FQN -> Group, in stored order.

    The Group of a dense tensor is made when someone asks for it: 100,000 groups with their dicts of
    parts are 30 MB and a tenth of a second, and `inspect` asks for few of them.
    """

    __slots__ = ("_dense", "_groups", "_infos", "run")

    def __init__(self, held: Mapping[str, Group | StoredTensor] | PlainTensors) -> None:
        self.run = held if isinstance(held, PlainTensors) else None
        """The columns of all tensors; None: some tensor is not plain, or shares its bytes."""
        self._groups: dict[str, Group] = {}
        self._dense: Mapping[str, StoredTensor]
        if isinstance(held, PlainTensors):
            self._dense = held.by_name
            self._infos = dict(zip(held.names, held.infos, strict=True))
        else:
            self._groups = {fqn: one for fqn, one in held.items() if isinstance(one, Group)}
            self._dense = {fqn: one for fqn, one in held.items() if not isinstance(one, Group)}
            self._infos = {fqn: one.info for fqn, one in held.items()}

    def __getitem__(self, fqn: str) -> Group:
        held = self.held(fqn)
        if isinstance(held, Group):
            return held
        return Group(fqn, held.info, DENSE, {"": held})

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._infos

    def held(self, fqn: str) -> Group | StoredTensor:
        """Return a dense tensor itself, any other as its Group."""
        return self._groups[fqn] if fqn in self._groups else self._dense[fqn]

    def dense(self) -> Mapping[str, StoredTensor]:
        """Return the tensors that are one plain tensor each, as stored."""
        return self._dense

    def encoded(self) -> Mapping[str, Group]:
        """Return the weights that are more than one plain tensor."""
        return self._groups

    def infos(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of every weight; no group is made for that."""
        return self._infos.copy()

    def renamed(self, names: Mapping[str, str]) -> LogicalTensors:
        """Return the same tensors under `names[key]`."""
        if self.run is not None:
            return LogicalTensors(self.run.renamed(names))
        return LogicalTensors({names[key]: self.held(key) for key in self})

    def with_groups(self, groups: Mapping[str, Group]) -> LogicalTensors:
        """Return all tensors, those of `groups` in place of the ones with their names or at the end."""
        return LogicalTensors({**{fqn: self.held(fqn) for fqn in self}, **groups})

    def without(self, keys: Collection[str]) -> LogicalTensors:
        """Return all tensors but those of `keys`."""
        return LogicalTensors({fqn: self.held(fqn) for fqn in self if fqn not in keys})

    def sharing(self) -> list[tuple[str, ...]]:
        """Return sets of names that the file itself says are one tensor."""
        if self.run is not None:
            return []
        names: dict[object, list[str]] = {}
        for fqn, held in ((fqn, self.held(fqn)) for fqn in self):
            # A tensor that was decoded to be fused has no parts: it is read through others.
            stored = next(iter(held.parts.values()), None) if isinstance(held, Group) else held
            if stored is not None and stored.share is not None and stored.info.numel:
                names.setdefault(stored.share, []).append(fqn)
        return [tuple(same) for same in names.values() if len(same) > 1]

    def encodings(self) -> tuple[str, ...]:
        """Return the names of their encodings, in order of first use."""
        groups = self._groups
        if not groups and self._dense:
            return (DENSE.name,)  # 100,000 tensors are not looked at for that
        names = (groups[fqn].encoding.name if fqn in groups else DENSE.name for fqn in self)
        return tuple(dict.fromkeys(names))
