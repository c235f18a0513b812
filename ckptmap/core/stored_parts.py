"""The stored tensors among which schemes find parts of weights: by module, by the end of a key, by kind.

    ending("_scale")                     ->  every key whose last segment ends so, in stored order
    pairs("_scale", "", "_packed")       ->  fc.weight, where fc.weight_scale and fc.weight_packed are there

Some twenty schemes look for their keys among 200,000. So keys are cut at their last dot once for all of
them: the last segments are few, and what stands before them, a module, is a number: no key is made and hashed again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, count, repeat
from operator import add
from typing import NamedTuple

from ckptmap.core.columns import NamedRows, Rows, each
from ckptmap.core.tensor_columns import Extents, extents_of
from ckptmap.tensors import StoredTensor, TensorInfo

ABSENT = -1
"""The number of a tensor that is not there."""


class StoredTable:
    """All stored tensors by number, in stored order: tensor i has the key `keys[i]`, shape and dtype `infos[i]`.

    Who wants no more than that need not have 200,000 tensors made.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        infos: Sequence[TensorInfo] | None = None,
        extents: Extents | None = None,
    ) -> None:
        """`infos` and `extents`: of the tensors, if they are known without a look at each."""
        named = stored if isinstance(stored, NamedRows) else None
        self.keys: Sequence[str] = list(stored) if named is None else named.names
        self.tensors: Rows[StoredTensor] = list(stored.values()) if named is None else named.rows
        self.infos = [tensor.info for tensor in stored.values()] if infos is None else infos
        self.extents = extents
        self.stems: list[str] = []
        """What stands before the last segment of a key, with its dot, by the number of the module."""
        self._modules: dict[str, int] = {}
        self.by_last: dict[str, dict[int, int]] = {}
        """The last segment of a key -> the module, the number of its stem -> the number of the tensor."""
        self._cut_keys()
        self._inner: dict[str, dict[int, int]] = {}
        self._known: tuple[Sequence[str], Sequence[int], Sequence[str]] = (), (), ()
        self._told: list[tuple[Sequence[str], Sequence[int]]] = []
        self._module_of: dict[str, int] = {}
        """The modules of the weights that were told, save those in `_told`, which are not in it yet."""

    def _cut_keys(self) -> None:
        """Cut all keys at their last dots, and number what stands before them.

        Parts of weights lie as their weights do, in writers' files: the modules of many scales are, one by one,
        those of as many codes, and then need not be looked up.
        """
        keys = self.keys
        numbers_of = defaultdict[str, list[int]](list)
        for number, (_, _, last) in enumerate(map(str.rpartition, keys, repeat("."))):
            numbers_of[last].append(number)
        known: dict[tuple[str, int], tuple[list[str], list[int]]] = {}
        for last, numbers in numbers_of.items():
            stems = list(map(str.removesuffix, map(keys.__getitem__, numbers), repeat(last)))
            alike, modules = known.get((stems[0], len(stems)), ([], []))
            if stems != alike:
                modules = list(map(self._modules.setdefault, stems, count(len(self.stems))))
                self.stems += stems
                known[stems[0], len(stems)] = stems, modules
            self.by_last[last] = dict(zip(modules, numbers, strict=True))

    def number(self, key: str) -> int:
        """Return the number of a key; ABSENT: there is no such tensor."""
        at = key.rfind(".") + 1
        return self.by_last.get(key[at:], _NONE).get(self._modules.get(key[:at], ABSENT), ABSENT)

    def numbers_of(self, keys: Iterable[str]) -> list[int]:
        """Return the number of each key; ABSENT: there is no such tensor."""
        return list(map(self.number, keys))

    def modules(self, fqns: Sequence[str]) -> Sequence[int]:
        """Return the module of each weight; a new one where no key is of it, but perhaps of one below it."""
        if fqns is self._known[0]:
            return self._known[1]
        if not fqns:
            return []
        for known, modules in self._told:
            self._module_of.update(zip(known, modules, strict=True))
        self._told.clear()
        found = list(map(self._module_of.get, fqns, repeat(ABSENT)))
        return self.cut(fqns)[0] if ABSENT in found else found

    def cut(self, fqns: Sequence[str]) -> tuple[Sequence[int], Sequence[str]]:
        """Return the module of each weight, as `modules` does, and the last segment of its FQN."""
        if fqns is not self._known[0]:
            lasts = [last for _, _, last in map(str.rpartition, fqns, repeat("."))]
            stems = list(map(str.removesuffix, fqns, lasts))
            modules = list(map(self._modules.get, stems, repeat(ABSENT)))
            for stem in stems if ABSENT in modules else ():
                if stem not in self._modules:
                    self._modules[stem] = len(self.stems)
                    self.stems.append(stem)
            if ABSENT in modules:
                modules = list(map(self._modules.__getitem__, stems))
            self.know(fqns, modules, lasts)
        return self._known[1:]

    def know(self, fqns: Sequence[str], modules: Sequence[int], lasts: Sequence[str]) -> None:
        """Take note of what `cut` returns for these weights: the same list is asked for again and again."""
        self._known = fqns, modules, lasts
        self._told.append((fqns, modules))

    def numbers(self, modules: Sequence[int], tail: str) -> list[int]:
        """Return the numbers of the tensors whose keys are the stem of a module and this tail; ABSENT for none."""
        at = tail.rfind(".") + 1
        if at:
            modules = self._below(modules, tail[:at])
        return list(map(self.by_last.get(tail[at:], _NONE).get, modules, repeat(ABSENT)))

    def _below(self, modules: Sequence[int], inside: str) -> Sequence[int]:
        """Return the modules whose stems are those of these and `inside`."""
        known = self._inner.setdefault(inside, {})
        new = [module for module in modules if module not in known] if known else modules
        stems = map(add, map(self.stems.__getitem__, new), repeat(inside))
        known.update(zip(new, map(self._modules.get, stems, repeat(ABSENT)), strict=False))
        return list(map(known.__getitem__, modules))

    def know_below(self, fqns: Sequence[str], inside: str, below: Sequence[int]) -> None:
        """Take note of the modules whose stems are these FQNs and `inside`."""
        modules, lasts = self.cut(fqns)
        for last in {*lasts}:
            here = list(map(last.__eq__, lasts))
            pairs = zip(compress(modules, here), compress(below, here), strict=True)
            self._inner.setdefault(last + inside, {}).update(pairs)

    def beside(self, fqns: Sequence[str], suffix: str) -> list[int]:
        """Return the numbers of the tensors whose keys are an FQN and this suffix; ABSENT for none."""
        modules, lasts = self.cut(fqns)
        found = {last: self.numbers(modules, last + suffix) for last in {*lasts}}
        if len(found) == 1:
            return next(iter(found.values()))
        return [found[last][at] for at, last in enumerate(lasts)]

    def extents_at(self, numbers: Sequence[int]) -> Extents | None:
        """Return the places of these tensors; None: one of them is not a single extent without replicas."""
        if self.extents is not None:
            return self.extents.take(numbers)
        return extents_of(map(self.tensors.__getitem__, numbers))


class Pairs(NamedTuple):
    """Weights that two tensors are of: the numbers of those by which they were found, their FQNs, and the
    numbers of the others."""

    numbers: Sequence[int]
    fqns: Sequence[str]
    others: Sequence[int]


class StoredParts(Mapping[str, StoredTensor]):
    """The stored tensors that no scheme has taken yet, by key, in stored order.

    `table` holds the taken ones, too. Only `take` removes tensors.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        infos: Sequence[TensorInfo] | None = None,
        extents: Extents | None = None,
    ) -> None:
        """As those of `StoredTable`."""
        self.table = StoredTable(stored, infos, extents)
        of_kind: dict[TensorInfo, int] = {}
        kinds = each(self.table.infos, lambda info: of_kind.setdefault(info, len(of_kind)))
        self._kinds: list[int | None] = [*kinds, None]
        """The kind of each tensor; None for those that are taken, and at ABSENT."""
        self.of_kind = list(of_kind)
        """Shape and dtype of the tensors of each kind."""
        self._kinds_by_last: dict[str, set[int | None]] = {}
        """The kinds of the tensors of a last segment when they were last looked at; there may be fewer now."""
        self._count = len(self.table.keys)

    @classmethod
    def of(cls, stored: Mapping[str, StoredTensor]) -> StoredParts:
        """Return tensors as an object of this class, which is returned as it is."""
        return stored if isinstance(stored, cls) else cls(stored)

    def take(self, numbers: Sequence[int]) -> None:
        """Remove these tensors, which are parts of weights. Raise KeyError for one that is not there."""
        kinds = self._kinds
        for number in numbers:
            if kinds[number] is None:
                raise KeyError(self.table.keys[number] if number != ABSENT else number)
            kinds[number] = None
        self._count -= len(numbers)

    def kinds(self, numbers: Iterable[int]) -> list[int | None]:
        """Return for each tensor a number that tensors of one shape and dtype share; None: there is no tensor."""
        return list(map(self._kinds.__getitem__, numbers))

    def kinds_below(self, modules: Sequence[int], tail: str) -> list[int | None]:
        """Return the kinds of the tensors whose keys are the stem of a module and this tail."""
        return self.kinds(self.table.numbers(modules, tail))

    def info(self, key: str) -> TensorInfo | None:
        """Return shape and dtype of a tensor; None: there is none."""
        number = self.table.number(key)
        return None if self._kinds[number] is None else self.table.infos[number]

    def places(self, numbers: Sequence[int]) -> tuple[Sequence[str], Sequence[int], Sequence[int]]:
        """Return the file, the offset and the bytes of each of these tensors; no file: it is not one extent."""
        table = self.table
        nbytes = each(list(map(table.infos.__getitem__, numbers)), lambda info: info.nbytes)
        if table.extents is not None:
            known = table.extents.take(numbers)
            return known.files, known.offsets, nbytes
        extents = [table.tensors[number].extent for number in numbers]
        files = ["" if extent is None else extent.file for extent in extents]
        return files, [0 if extent is None else extent.offset for extent in extents], nbytes

    def many(self) -> Counter[int | None]:
        """Return how many tensors there are of each kind, and under None how many are taken."""
        return Counter(self._kinds)

    def left(self) -> list[int]:
        """Return the numbers of the tensors that are not taken, in stored order."""
        kinds = self._kinds
        return [number for number in range(len(self.table.keys)) if kinds[number] is not None]

    def ending(self, *ends: str, dtypes: Collection[str] | None = None) -> list[str]:
        """Return the keys that end in one of `ends`, in stored order.

        dtypes  only those of tensors of these dtypes; None: of any
        """
        columns = [numbers for _, _, numbers in self.by_last(*ends, dtypes=dtypes)]
        numbers = columns[0] if len(columns) == 1 else sorted(chain.from_iterable(columns))
        found = list(map(self.table.keys.__getitem__, numbers))
        return (
            [key for key in found if key.endswith(ends)] if any("." in e for e in ends) else found
        )

    def before(self, suffix: str) -> tuple[list[str], list[int]]:
        """Return what stands before `suffix`, which holds a dot, in the keys that end so, and the numbers of these
        tensors, in stored order."""
        inside = suffix[: suffix.rfind(".") + 1]
        names: list[str] = []
        found: list[int] = []
        for _, modules, numbers in self.by_last(suffix):  # of one last segment
            stems = list(map(self.table.stems.__getitem__, modules))
            there = list(map(str.endswith, stems, repeat(inside)))
            names = [stem[: -len(inside)] for stem in compress(stems, there)]
            found = list(compress(numbers, there))
            self.table.know_below(names, inside, list(compress(modules, there)))
        return names, found

    def by_last(
        self, *ends: str, dtypes: Collection[str] | None = None
    ) -> Iterator[tuple[str, list[int], list[int]]]:
        """Yield each last segment that may end in one of `ends`, and the modules and the numbers of its tensors,
        which rise.

        dtypes  only those of tensors of these dtypes; None: of any
        """
        wanted: set[int | None] = {
            kind for kind, info in enumerate(self.of_kind) if dtypes is None or info.dtype in dtypes
        }
        cut = [end.rpartition(".") for end in ends]
        for last, number_of in self.table.by_last.items():
            known = self._kinds_by_last.get(last, wanted)
            if any(may_end(last, end) for end in cut) and not wanted.isdisjoint(known):
                modules, numbers = list(number_of), list(number_of.values())
                kinds = self.kinds(numbers)
                there = self._kinds_by_last[last] = {*kinds}
                if there <= wanted:
                    yield last, modules, numbers
                elif there & wanted:
                    fit = list(map(wanted.__contains__, kinds))
                    yield last, list(compress(modules, fit)), list(compress(numbers, fit))

    def pairs(
        self,
        end: str,
        name: str,
        beside: str,
        dtypes: Collection[str] | None = None,
        fits: Callable[[TensorInfo, TensorInfo], bool] | None = None,
    ) -> Pairs:
        """Return the weights that have a tensor of this `end`, and another of the end `beside`, in stored order.

        name    what takes the place of `end` in the FQN of the weight; all three begin with a dot, or none does
        dtypes  of the tensors of this end; None: of any
        fits    shape and dtype of both -> whether they can be of a weight; asked once for each two kinds
        """
        at, stems = int(end.startswith(".")), self.table.stems
        found: list[tuple[Pairs, Sequence[int], Sequence[str]]] = []
        for last, modules, numbers in self.by_last(end, dtypes=dtypes):
            base = last.removesuffix(end[at:])
            others = self.table.numbers(modules, base + beside[at:])
            kinds = self.kinds(numbers), self.kinds(others)
            may_be = {both: self._fit(*both, fits) for both in {*zip(*kinds, strict=True)}}
            top = at and "" in stems  # a dot stands before the end
            if top or not all(may_be.values()):
                there = [
                    may_be[one, other] and not (at and stems[module] == "")
                    for module, one, other in zip(modules, *kinds, strict=True)
                ]
                columns = (modules, numbers, others)
                modules, numbers, others = (list(compress(column, there)) for column in columns)
            if numbers:
                ending = base + name[at:]
                fqns = [stems[module] + ending for module in modules]
                found.append((Pairs(numbers, fqns, others), modules, [ending] * len(fqns)))
        return self._in_order(found)

    def _in_order(self, found: Sequence[tuple[Pairs, Sequence[int], Sequence[str]]]) -> Pairs:
        """Return the pairs of several last segments in stored order; the table knows their modules and lasts."""
        if not found:
            return Pairs([], [], [])
        pairs, modules, lasts = found[0]
        if len(found) > 1:
            rows = [row for (pairs, *more) in found for row in zip(*pairs, *more, strict=True)]
            *columns, modules, lasts = zip(*sorted(rows), strict=True)
            pairs = Pairs(*columns)
        self.table.know(pairs.fqns, modules, lasts)
        return pairs

    def _fit(
        self,
        kind: int | None,
        other: int | None,
        fits: Callable[[TensorInfo, TensorInfo], bool] | None,
    ) -> bool:
        if kind is None or other is None:
            return False
        return fits is None or fits(self.of_kind[kind], self.of_kind[other])

    @property
    def lasts(self) -> Collection[str]:
        """The last segments of all keys."""
        return self.table.by_last.keys()

    def __getitem__(self, key: str) -> StoredTensor:
        number = self.table.number(key)
        if self._kinds[number] is None:
            raise KeyError(key)
        return self.table.tensors[number]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._kinds[self.table.number(key)] is not None

    def __iter__(self) -> Iterator[str]:
        return map(self.table.keys.__getitem__, self.left())

    def __len__(self) -> int:
        return self._count


_NONE: Mapping[int, int] = {}


def may_end(last: str, end: tuple[str, str, str]) -> bool:
    """Return whether a key with this last segment may end so; `end` was cut at its last dot."""
    return last == end[2] if end[1] else last.endswith(end[2])
