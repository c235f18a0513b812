"""Work once for all quantized weights of one form: the first is made and checked, the others take what was found.

    layers.0.fc.weight_packed i32 [64, 8], layers.0.fc.weight_scale bf16 [64, 2]     made and checked
    layers.1.fc.weight_packed i32 [64, 8], layers.1.fc.weight_scale bf16 [64, 2]     the same encoding

A checkpoint has 100,000 quantized weights, of three or four forms. A reader makes the group of a weight from
tensors that it looks up by name. What it looks up, found or not, is noted; another weight that shows the
same under the same names has the same form. So no reader tells what its checks depend on, save the values
that it read. The groups are columns, names and forms: a `Group` is made when it is looked up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from ckptmap.core.columns import distinct_at, each
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups, LoneWeight, WeightForm, stem_of
from ckptmap.protocols import Group
from ckptmap.protocols.encodings import Record, Records
from ckptmap.tensors import StoredTensor

Make: TypeAlias = Callable[[str, Mapping[str, StoredTensor]], Found]
"""Makes the group of a weight from the tensors that it looks up: from their names, shapes and dtypes alone."""

MakeOfRecord: TypeAlias = Callable[[str, Record, Mapping[str, StoredTensor]], Found]


class WeightForms:
    """Makes groups of the tensors `stored`, one call of `make` for each form."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = StoredParts.of(stored)

    def groups(
        self, fqns: Iterable[str], make: Make, facts: Iterable[Hashable] | None = None
    ) -> Groups:
        """Return the groups of these weights, as `make` would.

        facts  what else `make` depends on, of each weight: values that were read, its record, its
               part of a config

        Raise what `make` raises.
        """
        fqns = fqns if isinstance(fqns, list | tuple) else list(fqns)
        if not fqns:
            return Groups([], [])
        modules, lasts = self._stored.table.cut(fqns)
        alike = _alike(lasts if facts is None else list(zip(lasts, facts, strict=True)))
        forms: dict[int, WeightForm | LoneWeight] = {}
        for numbers in alike.values():
            self._add_forms(fqns, modules, numbers, make, forms)
        return Groups(fqns, list(map(forms.__getitem__, range(len(fqns)))))

    def recorded(self, records: Records, make: MakeOfRecord) -> Groups:
        """Return the groups of the weights that records describe. `make` takes the record, too."""
        return self.groups(
            records,
            lambda fqn, near: make(fqn, records[fqn], near),
            each(records.values(), repr),
        )

    def _add_forms(
        self,
        fqns: Sequence[str],
        modules: Sequence[int],
        numbers: Sequence[int],
        make: Make,
        forms: dict[int, WeightForm | LoneWeight],
    ) -> None:
        """Add the forms of weights of equal facts, by number."""
        seen: dict[tuple[str, ...], dict[tuple[int | None, ...], list[int]]] = {}
        for number in numbers:
            if number in forms:
                continue
            form = self._made(fqns[number], make)
            forms[number] = form
            if isinstance(form, LoneWeight) or len(numbers) == 1:
                continue
            tails = (*form.shown,)
            if tails not in seen:
                seen[tails] = self._showing(tails, modules, numbers)
            module = modules[number : number + 1]
            shown = tuple(kind for tail in tails for kind in self._stored.kinds_below(module, tail))
            others = seen[tails][shown]
            if len(forms) > 1 and not forms.keys().isdisjoint(others):
                others = [other for other in others if other not in forms]
            forms.update(dict.fromkeys(others, form))

    def _showing(
        self, tails: Sequence[str], modules: Sequence[int], numbers: Sequence[int]
    ) -> dict[tuple[int | None, ...], list[int]]:
        """Return the numbers of the weights by what is found under the keys that end in `tails`."""
        some = modules if len(numbers) == len(modules) else [modules[number] for number in numbers]
        shown = zip(*[self._stored.kinds_below(some, tail) for tail in tails], strict=True)
        by_shown = defaultdict[tuple[int | None, ...], list[int]](list)
        for number, kinds in zip(numbers, shown, strict=True):
            by_shown[kinds].append(number)
        return by_shown

    def _made(self, fqn: str, make: Make) -> WeightForm | LoneWeight:
        """Return the form of a weight that is made now; a LoneWeight if it depends on more than tensors of
        its module, whose other weights may have other ones."""
        looked = _Looked(self._stored)
        group, keys = make(fqn, looked)
        lasts, stem = self._stored.lasts, stem_of(fqn)
        # What ends in no last segment that is stored is absent everywhere.
        found = {
            key: tensor
            for key, tensor in looked.found.items()
            if tensor is not None or key.rpartition(".")[2] in lasts
        }
        key_of = {id(tensor): key for key, tensor in found.items()}
        inside = all(key.startswith(stem) for key in found)
        taken = all(id(part) in key_of for part in group.parts.values())
        if looked.listed or not inside or not taken or not all(key in found for key in keys):
            return LoneWeight(group, keys)
        at = len(stem)
        return WeightForm(
            {key[at:]: tensor is not None for key, tensor in found.items()},
            group.info,
            group.encoding,
            [(name, key_of[id(part)][at:]) for name, part in group.parts.items()],
            [key[at:] for key in keys],
            self._stored.table,
        )


def one_of_each_form(groups: Groups, kinds: Sequence[Hashable] = ()) -> Iterator[Group]:
    """Yield one of the groups that `WeightForms` made of each form, of which all others have the same parts.

    kinds  what describes each weight besides: only weights of the same are alike
    """
    numbers = [number for number, _ in distinct_at(groups.forms)]
    if kinds and kinds.count(kinds[0]) < len(kinds):
        first: dict[tuple[int, Hashable], int] = {}
        for number, key in enumerate(zip(map(id, groups.forms), kinds, strict=True)):
            first.setdefault(key, number)
        numbers = list(first.values())
    for number in numbers:
        yield groups.forms[number].group(groups.fqns[number])


def _alike(facts: Sequence[Hashable]) -> Mapping[Hashable, Sequence[int]]:
    """Return the numbers of the weights that have each of these facts."""
    distinct = dict.fromkeys(facts)
    if len(distinct) < 2:
        return dict.fromkeys(distinct, range(len(facts)))
    alike: dict[Hashable, list[int]] = {fact: [] for fact in distinct}
    for number, fact in enumerate(facts):
        alike[fact].append(number)
    return alike


class _Looked(Mapping[str, StoredTensor]):
    """Stored tensors that note which keys are looked up, and what is found there."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self.found: dict[str, StoredTensor | None] = {}
        self.listed = False
        """Whether the keys were listed: then the group may depend on any tensor."""

    def __getitem__(self, key: str) -> StoredTensor:
        tensor = self.found[key] = self._stored.get(key)
        if tensor is None:
            raise KeyError(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        self.listed = True
        return iter(self._stored)

    def __len__(self) -> int:
        self.listed = True
        return len(self._stored)
