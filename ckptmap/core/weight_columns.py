"""Quantized weights as columns: names, and the forms that many of them share.

    fqns   layers.0.fc.weight, layers.1.fc.weight, ...
    forms  of codes beside it as weight_packed and weight_scale, of one encoding, shape and dtype

A `Group`, with its dict of parts, is made from them when it is looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckptmap.core.columns import Columns, by_object
from ckptmap.core.stored_parts import StoredTable
from ckptmap.protocols import Encoding, Group
from ckptmap.tensors import StoredTensor, TensorInfo

Found: TypeAlias = tuple[Group, Sequence[str]]
"""The group of a weight, and the stored keys of its parts."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightForm:
    """What the weights of a form have in common.

    shown     what follows the module in each key that is looked up -> whether there is such a tensor
    parts     (name of a part, what follows the module in its key)
    consumed  what follows the module in the keys of the parts
    stored    all stored tensors
    """

    shown: Mapping[str, bool]
    info: TensorInfo
    encoding: Encoding
    parts: Sequence[tuple[str, str]]
    consumed: Sequence[str]
    stored: StoredTable

    def group(self, fqn: str) -> Group:
        stem, stored = stem_of(fqn), self.stored
        numbers = [stored.number(stem + tail) for _, tail in self.parts]
        tensors = map(stored.tensors.__getitem__, numbers)
        names = (name for name, _ in self.parts)
        return Group(fqn, self.info, self.encoding, dict(zip(names, tensors, strict=True)))

    def part_numbers(self, fqns: Sequence[str]) -> Iterator[list[int]]:
        """Yield the numbers of each part of all these weights among the stored tensors."""
        modules = self.stored.modules(fqns)
        for _, tail in self.parts:
            yield self.stored.numbers(modules, tail)

    def first_part(self, fqn: str) -> StoredTensor | None:
        """Return the first part of a weight, which a Group need not be made for."""
        for _, tail in self.parts:
            return self.stored.tensors[self.stored.number(stem_of(fqn) + tail)]
        return None

    def keys(self, fqn: str) -> Sequence[str]:
        stem = stem_of(fqn)
        return tuple([stem + tail for tail in self.consumed])

    def consumed_numbers(self, modules: Sequence[int], stored: StoredTable) -> Iterator[list[int]]:
        """Yield the numbers of the tensors that weights of these modules take: for each key all of them."""
        for tail in self.consumed:
            yield stored.numbers(modules, tail)


@dataclass(frozen=True, slots=True, eq=False)
class LoneWeight:
    """A weight that no other is known to be like: its group is made."""

    made: Group
    consumed: Sequence[str]

    @property
    def encoding(self) -> Encoding:
        return self.made.encoding

    @property
    def info(self) -> TensorInfo:
        return self.made.info

    def group(self, fqn: str) -> Group:
        return self.made if fqn == self.made.fqn else self.made._replace(fqn=fqn)

    def first_part(self, fqn: str) -> StoredTensor | None:
        return next(iter(self.made.parts.values()), None)

    def keys(self, fqn: str) -> Sequence[str]:
        return self.consumed

    def consumed_numbers(self, modules: Sequence[int], stored: StoredTable) -> Iterator[list[int]]:
        for key in self.consumed:
            yield [stored.number(key)]


WeightKind: TypeAlias = WeightForm | LoneWeight | TensorInfo
"""What weights that are alike share, one object: their form, or shape and dtype of plain tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Groups(Columns[Found]):
    """Weights by FQN, each with its form; many share one. A row is the group and the keys of its parts."""

    fqns: Sequence[str]
    forms: Sequence[WeightForm | LoneWeight]

    @staticmethod
    def row(fqn: str, form: WeightForm | LoneWeight) -> Found:
        return form.group(fqn), form.keys(fqn)

    @classmethod
    def of(cls, rows: Iterable[Found]) -> Groups:
        """Return groups that were made one by one; an object of this class is returned as it is."""
        if isinstance(rows, cls):
            return rows
        made = list(rows)
        return cls([group.fqn for group, _ in made], [LoneWeight(*found) for found in made])

    def by_form(self) -> Iterator[tuple[WeightForm | LoneWeight, Sequence[int]]]:
        """Return each form, and which of the weights are of it."""
        return by_object(self.forms)

    def __add__(self, more: Groups) -> Groups:
        if not (self.fqns and more.fqns):
            return self if self.fqns else more
        return Groups([*self.fqns, *more.fqns], [*self.forms, *more.forms])


def stem_of(fqn: str) -> str:
    """Return the module of a weight, with the dot that follows it."""
    return fqn[: fqn.rfind(".") + 1]
