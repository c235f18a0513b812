"""The weights of a checkpoint by FQN: most are one plain tensor, a quantized one is codes and scales."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ckptmap.core.tensor_columns import PlainTensors
from ckptmap.protocols import Group
from ckptmap.quantization.dense import Dense
from ckptmap.tensors import StoredTensor, TensorInfo

DENSE = Dense()


class LogicalTensors(Mapping[str, Group]):
    """FQN -> Group, in stored order.

    The Group of a dense tensor is created on access: 100,000 groups with their dicts of parts take
    30 MB and a tenth of a second, and `inspect` needs few of them.
    """

    __slots__ = ("_dense", "_groups", "_infos", "columns")

    def __init__(self, tensors: Mapping[str, Group | StoredTensor] | PlainTensors) -> None:
        self.columns = tensors if isinstance(tensors, PlainTensors) else None
        """The columns of all tensors; None: some tensor is not plain, or shares its bytes."""
        self._groups: dict[str, Group] = {}
        self._dense: Mapping[str, StoredTensor]
        if isinstance(tensors, PlainTensors):
            self._dense = tensors.by_name
            self._infos = dict(zip(tensors.names, tensors.infos, strict=True))
        else:
            self._groups = {
                fqn: tensor for fqn, tensor in tensors.items() if isinstance(tensor, Group)
            }
            self._dense = {
                fqn: tensor for fqn, tensor in tensors.items() if not isinstance(tensor, Group)
            }
            self._infos = {fqn: tensor.info for fqn, tensor in tensors.items()}

    def __getitem__(self, fqn: str) -> Group:
        tensor = self.dense_or_group(fqn)
        if isinstance(tensor, Group):
            return tensor
        return Group(fqn, tensor.info, DENSE, {"": tensor})

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._infos

    def dense_or_group(self, fqn: str) -> Group | StoredTensor:
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
        if self.columns is not None:
            return LogicalTensors(self.columns.renamed(names))
        return LogicalTensors({names[key]: self._named(key, names[key]) for key in self})

    def _named(self, key: str, fqn: str) -> Group | StoredTensor:
        tensor = self.dense_or_group(key)
        return tensor._replace(fqn=fqn) if isinstance(tensor, Group) else tensor

    def with_groups(self, groups: Mapping[str, Group]) -> LogicalTensors:
        """Return all tensors, those of `groups` in place of the ones with their names or at the end."""
        return LogicalTensors({**{fqn: self.dense_or_group(fqn) for fqn in self}, **groups})

    def without(self, keys: Collection[str]) -> LogicalTensors:
        """Return all tensors but those of `keys`."""
        return LogicalTensors({fqn: self.dense_or_group(fqn) for fqn in self if fqn not in keys})

    def sharing(self) -> list[tuple[str, ...]]:
        """Return sets of names that the file itself says are one tensor."""
        if self.columns is not None:
            return []
        names: dict[object, list[str]] = {}
        for fqn, tensor in ((fqn, self.dense_or_group(fqn)) for fqn in self):
            # A tensor that was decoded to be fused has no parts: it is read through others.
            stored = (
                next(iter(tensor.parts.values()), None) if isinstance(tensor, Group) else tensor
            )
            if stored is not None and stored.share is not None and stored.info.numel:
                names.setdefault(stored.share, []).append(fqn)
        return [
            tuple(names_of_tensor) for names_of_tensor in names.values() if len(names_of_tensor) > 1
        ]

    def encodings(self) -> tuple[str, ...]:
        """Return the names of their encodings, in order of first use."""
        groups = self._groups
        if not groups and self._dense:
            return (DENSE.name,)  # without a loop over 100,000 tensors
        names = (groups[fqn].encoding.name if fqn in groups else DENSE.name for fqn in self)
        return tuple(dict.fromkeys(names))
