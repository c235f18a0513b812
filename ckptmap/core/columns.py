"""Many values of one class as columns: one sequence for each field, and rows created on access.

A checkpoint of 100,000 small tensors has 100,000 names and offsets, but only a few shapes. One
object for each tensor would take seconds and hundreds of MB. So from the headers that are read to
the manifest that is written, tensors stay in this one form:

    class         row                   columns                                a row describes
    WholeEntries  TensorEntry           infos, files, offsets, lengths         an entry of DCP's metadata
    Extents       Extent                files, offsets, crcs                   where a tensor is read
    OutTensors    OutTensor             paths, forms                           how a tensor is cut
    Steps         Step                  fqns, conversions                      how a tensor is converted
    Slots         Slot                  paths, boxes, offsets, sizes           where a chunk is written
    Sources       StoredTensor or None  infos, files, offsets, crcs, others    where a chunk is read
    Chunks        ChunkRow              files, offsets, sizes, boxes, digests  what the manifest says of it
    Groups        Group, keys           fqns, forms                            how weights are quantized

A value that many rows share (an info, a form, a box) is one object. `distinct` and `each` work on
these few objects instead of the many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, Protocol, Self, TypeVar, overload

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
Row = TypeVar("Row", covariant=True)
S = TypeVar("S")
T = TypeVar("T")


class Columns(Sequence[R]):
    """A sequence of rows; row i is created from entry i of each column.

    A subclass is a dataclass whose fields are its columns, in the order of the arguments of `row`.
    """

    __slots__ = ()
    row: ClassVar[Callable[..., Any]]
    """Returns a row, given one entry of each column."""
    _columns_of: ClassVar[Callable[[object], tuple[Sequence[object], ...]]]

    def __init_subclass__(cls) -> None:
        cls._columns_of = attrgetter(*cls.__annotations__)

    def __post_init__(self) -> None:
        assert len(set(map(len, self.columns()))) == 1, "columns of different lengths"

    def columns(self) -> tuple[Sequence[object], ...]:
        """Return the columns, in order."""
        return type(self)._columns_of(self)

    @classmethod
    def of(cls, rows: Iterable[R]) -> Self:
        """Return these rows as columns; an object of this class is returned as it is."""
        if isinstance(rows, cls):
            return rows
        entries: list[Any] = list(rows)
        return cls(*[[row[i] for row in entries] for i in range(len(cls.__annotations__))])

    def take(self, indices: Sequence[int]) -> Self:
        """Return the rows at `indices`, in that order."""
        if isinstance(indices, range) and indices.step == 1:
            return self[indices.start : indices.stop]
        return type(self)(*[list(map(c.__getitem__, indices)) for c in self.columns()])

    def extend(self, *columns: Iterable[object]) -> None:
        """Append rows, given as columns. All columns of `self` must be lists."""
        for column, more in zip(self.columns(), columns, strict=True):
            assert isinstance(column, list)
            column += more

    def __len__(self) -> int:
        return len(self.columns()[0])

    def __iter__(self) -> Iterator[R]:
        return map(type(self).row, *self.columns())

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> R | Self:
        entries = [column[index] for column in self.columns()]
        if isinstance(index, slice):
            return type(self)(*entries)
        row: R = type(self).row(*entries)
        return row

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((len(self), *self[:1]))


class Rows(Protocol[Row]):
    """Rows by number."""

    def __getitem__(self, index: int, /) -> Row: ...
    def __len__(self) -> int: ...


class NamedRows(Mapping[K, R]):
    """Rows by name, or by path, in order: row i has the name `names[i]`."""

    def __init__(self, names: Sequence[K], rows: Rows[R]) -> None:
        assert len(names) == len(rows)
        self.names, self.rows = names, rows

    @cached_property
    def numbers(self) -> Mapping[K, int]:
        """The number of each row, by its name."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    def __getitem__(self, name: K) -> R:
        return self.rows[self.numbers[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.numbers

    def __iter__(self) -> Iterator[K]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


_NONE = object()


def met(values: Iterable[T]) -> Iterator[T]:
    """Yield each different object among `values` where it is met first; mostly many of one follow each other."""
    seen = set[int]()
    last: object = _NONE
    for value in values:
        if value is not last:
            last = value
            if id(value) not in seen:
                seen.add(id(value))
                yield value


def distinct(values: Collection[T]) -> dict[int, T]:
    """Return the different objects among `values`, by their id, in order of first appearance."""
    return {id(value): value for value in met(values)}


class ManyNamed(dict[str, T]):
    """Values by name, of few different objects, which nobody changes: the objects are found once."""

    @cached_property
    def few(self) -> Collection[T]:
        return distinct(self.values()).values()


def few(values: Mapping[str, T]) -> Collection[T]:
    """Return the different objects among the values of a dict."""
    return values.few if isinstance(values, ManyNamed) else distinct(values.values()).values()


def distinct_at(values: Sequence[T]) -> list[tuple[int, T]]:
    """Return the different objects among `values`, each with the number of the first that is it."""
    first: dict[int, int] = {}
    last: object = _NONE
    for number, value in enumerate(values):
        if value is not last:
            last = value
            if id(value) not in first:
                first[id(value)] = number
    return [(number, values[number]) for number in first.values()]


def by_object(values: Sequence[T]) -> Iterator[tuple[T, Sequence[int]]]:
    """Yield the different objects among `values`, each with the numbers of all that are it."""
    objects = distinct(values)
    if len(objects) == 1:
        yield values[0], range(len(values))
        return
    numbers: dict[int, list[int]] = {key: [] for key in objects}
    for number, value in enumerate(values):
        numbers[id(value)].append(number)
    for key, value in objects.items():
        yield value, numbers[key]


def firsts(values: Mapping[str, T]) -> list[tuple[str, T]]:
    """Return the different objects among `values`, each with the first key that has it."""
    first: dict[int, tuple[str, T]] = {}
    for key, value in values.items():
        if id(value) not in first:
            first[id(value)] = key, value
    return list(first.values())


def each(values: Collection[T], make: Callable[[T], S]) -> list[S]:
    """Return `make(value)` for every value; `make` is called once for each different object."""
    result_of: dict[int, S] = {}
    results: list[S] = []
    last: object = _NONE
    for value in values:
        if value is not last:
            last = value
            try:
                result = result_of[id(value)]
            except KeyError:
                result = result_of.setdefault(id(value), make(value))
        results.append(result)
    return results
