"""The weights of a checkpoint by FQN: most are one plain tensor, a quantized one is codes and scales."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import compress
from typing import Generic, TypeVar

from ckptmap.core.columns import ManyNamed, few
from ckptmap.core.tensor_columns import PlainTensors
from ckptmap.core.weight_columns import LoneWeight, WeightForm, WeightKind
from ckptmap.protocols import Group
from ckptmap.quantization.dense import Dense
from ckptmap.tensors import StoredTensor, TensorInfo

DENSE = Dense()


T = TypeVar("T")


class PlacedWeights(Generic[T]):
    """What is known of each weight, by its place in stored order; some places hold none."""

    def __init__(self, places: int) -> None:
        """`places`: how many there are."""
        self.fqns: list[str] = [""] * places
        self.held: list[T | None] = [None] * places

    def add(self, places: Iterable[int], fqns: Iterable[str], held: Iterable[T]) -> None:
        """Put weights to their places; `held` may go on beyond them, as `repeat(form)` does."""
        for place, fqn, one in zip(places, fqns, held, strict=False):
            self.fqns[place] = fqn
            self.held[place] = one

    def taken(self) -> tuple[list[str], list[T]]:
        """Return FQNs and what is known, in stored order."""
        there = [held is not None for held in self.held]
        return list(compress(self.fqns, there)), [held for held in self.held if held is not None]


class LogicalTensors(Mapping[str, Group]):
    """FQN -> Group, in stored order.

    A Group is made when it is looked up: 100,000 groups with their dicts of parts take 30 MB and a
    tenth of a second, and `inspect` needs few of them. Quantized weights are names and forms.
    """

    __slots__ = ("_dense", "_forms", "_groups", "_infos", "_kinds", "_sharing", "columns")

    def __init__(
        self,
        tensors: Mapping[str, Group | WeightForm | LoneWeight | StoredTensor] | PlainTensors,
        shares: bool = True,
    ) -> None:
        """`shares`: whether some of the tensors may be one view of one storage."""
        self.columns = tensors if isinstance(tensors, PlainTensors) else None
        """The columns of all tensors; None: some tensor is not plain, or shares its bytes."""
        self._forms = ManyNamed[WeightForm | LoneWeight]()
        self._groups: dict[str, Group] = {}
        self._kinds: Mapping[str, WeightKind] | None = None
        self._sharing: list[tuple[str, ...]] | None = None if shares else []
        self._dense: Mapping[str, StoredTensor]
        if isinstance(tensors, PlainTensors):
            self._dense = tensors.by_name
            self._infos = ManyNamed(zip(tensors.names, tensors.infos, strict=True))
            return
        dense = {}
        for fqn, tensor in tensors.items():
            if isinstance(tensor, StoredTensor):
                dense[fqn] = tensor
            else:
                self._forms[fqn] = LoneWeight(tensor, ()) if isinstance(tensor, Group) else tensor
        self._dense = dense
        self._infos = ManyNamed({fqn: tensor.info for fqn, tensor in tensors.items()})

    @classmethod
    def in_order(
        cls,
        placed: PlacedWeights[WeightForm | LoneWeight],
        places: Iterable[int],
        dense: Mapping[str, StoredTensor],
        shares: bool,
    ) -> LogicalTensors:
        """Return the weights that were put together, and the plain tensors of these places, in stored order."""
        forms = ManyNamed(zip(*placed.taken(), strict=True))
        every = PlacedWeights[WeightForm | LoneWeight | StoredTensor](0)
        every.fqns, every.held = placed.fqns, [*placed.held]
        every.add(places, dense, dense.values())
        fqns, held = every.taken()
        infos = ManyNamed(zip(fqns, [one.info for one in held], strict=True))
        if len(infos) < len(fqns):  # of two that have one name, the last remains
            return cls(dict(zip(fqns, held, strict=True)), shares)
        made = cls({}, shares)
        made._infos, made._forms, made._dense = infos, forms, dense
        return made

    def __getitem__(self, fqn: str) -> Group:
        form = self._forms.get(fqn)
        if form is None:
            tensor = self._dense[fqn]
            return Group(fqn, tensor.info, DENSE, {"": tensor})
        group = self._groups.get(fqn)
        if group is None:
            group = self._groups[fqn] = form.group(fqn)
        return group

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._infos

    def dense_or_group(self, fqn: str) -> Group | StoredTensor:
        """Return a dense tensor itself, any other as its Group."""
        return self[fqn] if fqn in self._forms else self._dense[fqn]

    def dense(self) -> Mapping[str, StoredTensor]:
        """Return the tensors that are one plain tensor each, as stored."""
        return self._dense

    def forms(self) -> Mapping[str, WeightForm | LoneWeight]:
        """Return the weights that are more than one plain tensor, by FQN: what many have in common."""
        return self._forms

    def kinds(self, fqns: Iterable[str]) -> list[WeightKind]:
        """Return for each weight one object that all weights share that are known to be like it."""
        return list(map(self._by_kind().__getitem__, fqns))

    def _by_kind(self) -> Mapping[str, WeightKind]:
        if self._kinds is None:
            self._kinds = ManyNamed({**self._infos, **self._forms})
        return self._kinds

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return shape and dtype of every weight; no group is made for that."""
        return self._infos

    def renamed(self, names: Mapping[str, str]) -> LogicalTensors:
        """Return the same tensors under `names[key]`."""
        if self.columns is not None:
            return LogicalTensors(self.columns.renamed(names))
        return LogicalTensors({names[key]: self._named(key, names[key]) for key in self})

    def _held(self, fqn: str) -> WeightForm | LoneWeight | StoredTensor:
        return self._forms.get(fqn) or self._dense[fqn]

    def _named(self, key: str, fqn: str) -> WeightForm | Group | LoneWeight | StoredTensor:
        held = self._held(key)
        return (
            held.group(key)._replace(fqn=fqn)
            if isinstance(held, WeightForm | LoneWeight) and key != fqn
            else held
        )

    def with_groups(self, groups: Mapping[str, Group]) -> LogicalTensors:
        """Return all tensors, those of `groups` in place of the ones with their names or at the end."""
        return LogicalTensors({**{fqn: self._held(fqn) for fqn in self}, **groups})

    def without(self, keys: Collection[str]) -> LogicalTensors:
        """Return all tensors but those of `keys`."""
        return LogicalTensors({fqn: self._held(fqn) for fqn in self if fqn not in keys})

    def sharing(self) -> list[tuple[str, ...]]:
        """Return sets of names that the file itself says are one tensor."""
        if self._sharing is None:
            self._sharing = [] if self.columns is not None else self._names_of_storages()
        return list(self._sharing)

    def _names_of_storages(self) -> list[tuple[str, ...]]:
        names: dict[object, list[str]] = {}
        for fqn in self._infos:
            held = self._forms.get(fqn)
            # A tensor that was decoded to be fused has no parts: it is read through others.
            stored = self._dense[fqn] if held is None else held.first_part(fqn)
            if stored is not None and stored.share is not None and stored.info.numel:
                names.setdefault(stored.share, []).append(fqn)
        return [tuple(of_storage) for of_storage in names.values() if len(of_storage) > 1]

    def encodings(self) -> tuple[str, ...]:
        """Return the names of their encodings, in order of first use."""
        if not self._forms and self._dense:
            return (DENSE.name,)  # without a loop over 100,000 tensors
        kinds = few(self._by_kind())
        names = (
            DENSE.name if isinstance(kind, TensorInfo) else kind.encoding.name for kind in kinds
        )
        return tuple(dict.fromkeys(names))
