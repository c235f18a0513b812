"""Read the state dicts of a job's ranks from one torch.save zip file per rank.

The ranks of a job mostly pickle the same state dict. Two pickles are alike if they hold the same
opcodes and differ in constants only (a rank, a mesh coordinate). Of alike pickles, the reader
parses the first, and takes only the constants from the others:

    rank 0   parsed          {"w": <DTensor, mesh coordinate (0,)>}
    rank 1   alike, (1,)     the same leaves, with rank 1's constants and storages

A leaf of a rank is built when it is used. A pickle that is not alike any parsed one (uneven shards,
another class, one opcode more) is parsed too, and later pickles are compared with it. `Template` has
the rules of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

from ckptmap.core.state_tree import flatten, holds_tensor
from ckptmap.errors import SourceError
from ckptmap.formats.pickle.reader import Device, DType, Inert, Size
from ckptmap.formats.pickle.template import Constant, Hole, Template
from ckptmap.formats.torch_save.module_metadata import fsdp1_units
from ckptmap.formats.torch_save.reader import ReadTensor, open_zip, parse
from ckptmap.formats.zip.reader import Records
from ckptmap.sharding.pickled_mesh import PickledMesh
from ckptmap.storage.files import Files
from ckptmap.tensors import Leaf, Opaque, Path, PerRank, TensorInfo

MAX_PARSED = 8
"""Greatest number of parsed trees that a file is compared with. Uneven shards make a few kinds of
ranks."""
MAX_FAILURES = 24
"""Number of failed comparisons opcode by opcode, after which the reader makes no more of them."""
MAX_DEPTH = 64
"""Nesting depth of the values in a leaf. A tree with a deeper leaf is not shared between ranks."""

_FIXED = (str, int, float, bool, bytes, complex, type(None), DType, TensorInfo)
_FIELDS = {"args", "state", "info", "items"}


class _Unknown(Exception):
    """Raised for a value that cannot be rebuilt with the constants of another rank."""


class Parsed:
    """The tree of one parsed pickle. Once a second pickle proves to be alike, its leaves hold a `Hole` in
    place of each constant that differs."""

    def __init__(self, records: Records, data: bytes) -> None:
        tree = parse(records, data)
        self.records = records
        self.leaves = flatten(tree, records.file, len(data))
        self.units = fsdp1_units(tree)
        self.template = Template.of(data)
        self.members = records.sizes("data/")
        self._first: dict[Callable[[Leaf], bool], Path | None] = {}
        self.is_shared = False
        self.varying: set[int] = set()
        """`id()` of each value that differs from rank to rank."""
        self.often: set[int] = set()
        """`id()` of each object that the tree holds more than once, such as a mesh that tensors share."""

    def first(self, is_such: Callable[[Leaf], bool]) -> Path | None:
        """Return the path of the first leaf for which `is_such` holds; None if there is none."""
        if is_such not in self._first:
            paths = (path for path, leaf in self.leaves.items() if is_such(leaf))
            self._first[is_such] = next(paths, None)
        return self._first[is_such]

    def widen(self, data: bytes) -> bool:
        """Add holes so that the tree fits the pickle `data` too. Return False if it cannot fit."""
        template = self.template.widened(data)
        if template is None:
            return False
        pickled, holes = template.with_persistent_ids()
        walk = _Walk()
        try:
            leaves = flatten(parse(self.records, pickled, holes), self.records.file, len(pickled))
            for leaf in leaves.values():
                walk.varies(leaf)
        except (SourceError, _Unknown):  # a constant that differs decides what the pickle holds
            return False
        self.template, self.leaves, self.is_shared = template, leaves, True
        self.varying, self.often = {i for i, does in walk.differs.items() if does}, walk.repeated
        return True


class _Walk:
    """Finds the values that hold a `Hole` or a tensor, and so differ from rank to rank."""

    def __init__(self) -> None:
        self.differs: dict[int, bool] = {}
        """`id()` of each value that was met, and whether it differs."""
        self.repeated: set[int] = set()
        self._depth = 0

    def varies(self, value: object) -> bool:
        """Return True if the value differs from rank to rank.

        Raise _Unknown for a value that cannot be rebuilt, or that nests deeper than MAX_DEPTH.
        """
        kind = type(value)
        if (
            kind in _FIXED
            or isinstance(value, type)
            or (type(value) is Device and type(value.text) is str)
        ):
            return False
        answer = self.differs.get(id(value))
        if answer is not None:
            self.repeated.add(id(value))
            return answer
        if kind in (Hole, ReadTensor):
            varies_here = True
        else:
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise _Unknown
            varies_here = any([self.varies(item) for item in _inside(value)])
            self._depth -= 1
            if (
                varies_here
                and kind not in (list, tuple, Size, dict)
                and not isinstance(value, Inert)
            ):
                raise _Unknown
        self.differs[id(value)] = varies_here
        return varies_here


def _inside(value: object) -> Iterable[object]:
    """Return the values in a container. Raise _Unknown for any other class of containers."""
    if isinstance(value, Inert) and value.__dict__.keys() <= _FIELDS:
        return value.__dict__.values()
    if isinstance(value, dict) and {*map(type, value)} <= {str, int}:
        return (*value.values(), *getattr(value, "__dict__", {}).values())
    if isinstance(value, list | tuple | set | frozenset):
        return value
    raise _Unknown


class RankTree:
    """The leaves of one rank: a parsed tree, and the constants that this rank has in its holes."""

    __slots__ = ("_filled_values", "_own", "_starts", "_template", "parsed", "records")

    def __init__(self, parsed: Parsed, records: Records, constants: Sequence[Constant]) -> None:
        self.parsed, self.records = parsed, records
        self._template, self._own = parsed.template, constants
        self._filled_values: dict[int, object] = {}
        self._starts: Mapping[str, int] | None = None

    def get(self, path: Path) -> Leaf:
        """Return the leaf that this rank's own file holds at `path`; None if it holds none."""
        leaf: Leaf = self.filled(self.parsed.leaves.get(path))
        return leaf

    def first(self, is_such: Callable[[Leaf], bool]) -> list[Leaf]:
        """Return a list of the first leaf for which `is_such` holds; an empty list if none does."""
        path = self.parsed.first(is_such)
        return [] if path is None else [self.get(path)]

    @property
    def starts(self) -> Mapping[str, int]:
        """Return storage key -> byte offset in the file. The first use looks up all storages."""
        if self._starts is None:
            self._starts = self.records.starts("data/")
        return self._starts

    def filled(self, value: object) -> Any:
        """Return a value of the parsed tree with this rank's constants. An object that several
        leaves share is made once, so that they share it here too."""
        if id(value) not in self.parsed.varying:
            return value
        filled = self._filled_values.get(id(value))
        if filled is None:
            filled = self._fill(value)
            if id(value) in self.parsed.often:
                self._filled_values[id(value)] = filled
        return filled

    def _fill(self, value: Any) -> Any:
        kind = type(value)
        if kind is Hole:
            return self._constant(value.index)
        if kind is ReadTensor:
            return value.of(self.records)
        if kind is dict:
            return {key: self.filled(item) for key, item in value.items()}
        if kind in (list, tuple, Size):
            return kind([self.filled(item) for item in value])
        inert = object.__new__(kind)
        inert.__dict__.update({name: self.filled(item) for name, item in value.__dict__.items()})
        return inert

    def _constant(self, index: int) -> Constant:
        if self._template is not self.parsed.template:
            self._own = self.parsed.template.adopted(self._template, self._own)
            self._template = self.parsed.template
        return self._own[index]


class RankReader:
    """Reads the trees of ranks, one file after the other, and keeps the parsed ones to compare with."""

    def __init__(self) -> None:
        self.parsed: list[Parsed] = []
        self._failures = 0

    def read(self, files: Files, name: str) -> RankTree:
        """Return the tree of one file. Raise SourceError as `torch_save.reader.load` does."""
        return self._tree(*open_zip(files, name))

    def _tree(self, records: Records, data: bytes) -> RankTree:
        members = records.sizes("data/")
        alike = [parsed for parsed in self.parsed if parsed.members == members]
        for parsed in alike:
            constants = parsed.template.constants(data)
            if constants is not None:
                parsed.is_shared = parsed.is_shared or parsed.widen(data)
                if parsed.is_shared:
                    return RankTree(parsed, records, constants)
        for parsed in alike if self._failures < MAX_FAILURES else ():
            constants = parsed.template.constants(data) if parsed.widen(data) else None
            if constants is not None:
                return RankTree(parsed, records, constants)
            self._failures += 1
        parsed = Parsed(records, data)
        if len(self.parsed) < MAX_PARSED:
            self.parsed.append(parsed)
        else:
            parsed.template = Template.of(b"")  # frees the bytes: no later file is compared with it
        return RankTree(parsed, records, ())


class RankSet:
    """The trees of all ranks, in rank order.

    kinds     each parsed tree, with the ranks whose pickles are alike to it
    kind_of   for each rank, the index of its parsed tree in `kinds`
    """

    def __init__(self, trees: Sequence[RankTree]) -> None:
        self.trees = tuple(trees)
        kinds: dict[Parsed, list[int]] = {}
        for rank, tree in enumerate(trees):
            kinds.setdefault(tree.parsed, []).append(rank)
        self.kinds = tuple([(parsed, tuple(ranks)) for parsed, ranks in kinds.items()])
        self.meshes: dict[tuple[Opaque, ...], list[PickledMesh]] = {}
        """Meshes of all ranks, by the mesh objects of the parsed trees: a cache for the join."""
        number = {parsed: index for index, parsed in enumerate(kinds)}
        self.kind_of = tuple([number[tree.parsed] for tree in trees])

    @property
    def units(self) -> Mapping[Path, tuple[str, ...]]:
        """Return the FSDP1 units of the first rank that lists any, as `fsdp1_units` returns them."""
        return next((parsed.units for parsed, _ in self.kinds if parsed.units), {})

    def merged(self) -> dict[Path, Leaf]:
        """Return path -> leaf for all ranks: the paths of rank 0 in their order, then the others'.

        A leaf is a plain value that all ranks share, or a PerRank of the value of each rank.
        Raises SourceError CKM113 if one rank holds a dict of names, and another one value.
        """
        paths = dict.fromkeys(path for parsed, _ in self.kinds for path in parsed.leaves)
        for path in self._filled_elsewhere(paths):
            del paths[path]
        if () in paths and len(paths) > 1:
            odd = next(ranks[0] for parsed, ranks in self.kinds if () in parsed.leaves)
            raise SourceError(
                "CKM113",
                f"{self.trees[odd].records.file}: holds no dict of names, expected one as the other ranks have",
                "copy the file of this rank again, or save again",
            )
        return {path: self._leaf(path) for path in paths}

    def _filled_elsewhere(self, paths: Iterable[Path]) -> list[Path]:
        """Return the paths at which some ranks hold an empty dict and others hold leaves below it.

        A pipeline stage without parameters of a kind saves such an empty dict.
        """
        if len(self.kinds) == 1:
            return []
        empty = {
            path: [parsed.leaves.get(path) for parsed, _ in self.kinds]
            for parsed, _ in self.kinds
            for path, leaf in parsed.leaves.items()
            if isinstance(leaf, dict) and not leaf
        }
        heads = {path[:depth] for path in paths for depth in range(len(path))} if empty else set()
        return [
            path
            for path, leaves in empty.items()
            if path in heads and all(leaf is None or leaf == {} for leaf in leaves)
        ]

    def _leaf(self, path: Path) -> Leaf:
        if len(self.trees) == 1:
            return self.trees[0].get(path)
        leaves = [parsed.leaves.get(path) for parsed, _ in self.kinds]
        if any(map(holds_tensor, leaves)):
            return PerRank(RankValues(self, path))
        if any(
            id(leaf) in parsed.varying for (parsed, _), leaf in zip(self.kinds, leaves, strict=True)
        ):
            leaves = [tree.get(path) for tree in self.trees]
        first = leaves[0]
        if all(_equal(first, other) for other in leaves) and not isinstance(first, Opaque):
            return first
        return PerRank(tuple([tree.get(path) for tree in self.trees]))


def _equal(a: object, b: object) -> bool:
    """Return True if two values are equal, where NaN equals NaN: all ranks may save a NaN loss."""
    try:
        return type(a) is type(b) and (bool(a == b) or _equal_inside(a, b))
    except RecursionError:
        return False


def _equal_inside(a: object, b: object) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a != a and b != b)


class RankValues(Sequence[Leaf]):
    """The values of all ranks at one path, in rank order. Each is made when it is looked up."""

    __slots__ = ("path", "ranks")

    def __init__(self, ranks: RankSet, path: Path) -> None:
        self.ranks, self.path = ranks, path

    def some(self, is_such: Callable[[Leaf], bool]) -> bool:
        """Return True if `is_such` holds for a leaf of any parsed tree. No rank's leaf is made."""
        return any(is_such(parsed.leaves.get(self.path)) for parsed, _ in self.ranks.kinds)

    def __len__(self) -> int:
        return len(self.ranks.trees)

    @overload
    def __getitem__(self, index: int) -> Leaf: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Leaf]: ...
    def __getitem__(self, index: int | slice) -> Leaf | Sequence[Leaf]:
        if isinstance(index, slice):
            return [tree.get(self.path) for tree in self.ranks.trees[index]]
        return self.ranks.trees[index].get(self.path)
