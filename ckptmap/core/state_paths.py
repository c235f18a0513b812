"""Functions on the paths and leaves of a state dict: keys, nesting, foreign objects, comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ckptmap.tensors import Leaf, Opaque, Path, PerRank, StoredTensor


class ListIndex(int):
    """A path segment that is an index of a list. It equals the integer.

    It has its own type because an integer can also be a key of a dict.
    """

    __slots__ = ()


MAX_DEPTH = 128
"""The most levels of nested dicts and lists; a value that holds itself would have more."""
SPARE_ITEMS = 1_000_000
"""Items that repeated references may add to any value; the pickle reader has the same allowance."""
_CONTAINERS = (dict, list, tuple, set, frozenset)
ATOMS = frozenset({int, float, bool, str, bytes, type(None)})
"""Types of plain values that hold no others. A random state has hundreds of them, so they are passed by first."""


PER_RANK = "per_rank"
"""Key of the values of each rank among the extra values: `extra.per_rank.rank3.NAME` are those of rank 3."""


def by_rank(leaf: Leaf) -> Sequence[Leaf]:
    """Return the value of a leaf for each rank; one value if the leaf is not split by rank."""
    return leaf.values if isinstance(leaf, PerRank) else (leaf,)


def counts(segment: object) -> bool:
    """Return whether the segment is a key of a dict, and an integer or a bool."""
    return isinstance(segment, int) and type(segment) is not ListIndex


def join(path: Path) -> str:
    """Return the key of a path: its segments joined with dots."""
    if len(path) == 1:
        return str(path[0])
    return ".".join(map(str, path))


def joined(paths: Sequence[Path]) -> list[str]:
    """Return the key of each path."""
    try:
        return list(map(".".join, paths))  # type: ignore[arg-type]
    except TypeError:  # a segment is a number
        return list(map(join, paths))


ROLES = ("model", "optimizer", "other")


def logical_key(role: str, fqn: str) -> str:
    """Return the key of a tensor in a manifest: `fqn` for a weight, else `role:fqn`.

    A weight with a colon in its name has the form `role:fqn`, too.
    """
    return fqn if role == "model" and ":" not in fqn else f"{role}:{fqn}"


def role_and_fqn(key: str) -> tuple[str, str]:
    """Return the role and FQN of a key that `logical_key` made."""
    role, colon, fqn = key.partition(":")
    return (role, fqn) if colon and role in ROLES else ("model", key)


def nest(values: Mapping[Path, object]) -> dict[str, Any]:
    """Return nested dicts with these leaves, and lists where the segments are `ListIndex` 0..n-1.

    Where an index is missing, the indices become keys of a dict, so that each item keeps its index.
    (`state_tree.nest`, for files, fills such gaps with None.)
    """
    tree: dict[Any, object] = {}
    for path, value in values.items():
        node = tree
        for segment in path[:-1]:
            below = node.setdefault(segment, {})
            assert isinstance(below, dict), "no path goes through a leaf"
            node = below
        node[path[-1]] = value
    return {key: _listed(value) for key, value in tree.items()}


def _listed(value: object) -> object:
    if not isinstance(value, dict):
        return value
    value = {key: _listed(item) for key, item in value.items()}
    counted = bool(value) and all(type(key) is ListIndex for key in value)
    if counted and sorted(value) == list(range(len(value))):
        return [value[index] for index in range(len(value))]
    return value


def opaques(value: object) -> Iterator[Opaque]:
    """Yield every foreign object (`Opaque`) in a value, at any depth."""
    for item in walk_values(value):
        if type(item) in ATOMS:
            continue
        if isinstance(item, Opaque):
            yield item
        elif isinstance(item, PerRank):
            yield from opaques(item.values)


def walk_values(value: object) -> Iterator[object]:
    """Yield a value and everything in its dicts, lists, tuples and sets, keys included.

    A container that occurs twice is entered once, because it may hold itself.
    """
    seen: dict[int, object] = {}
    todo = [value]
    while todo:
        item = todo.pop()
        yield item
        if type(item) in ATOMS:
            continue
        if isinstance(item, (Mapping, list, tuple, set, frozenset)) and id(item) not in seen:
            seen[id(item)] = item  # the reference keeps its id from being used again
            todo += reversed(_items_of(item))


def _items_of(container: Iterable[object]) -> list[object]:
    if isinstance(container, Mapping):
        return [item for entry in container.items() for item in entry]
    return list(container)


def hides_tensor(value: object) -> bool:
    """Return whether the value holds a stored tensor, inside foreign objects as well."""
    seen: dict[int, object] = {}
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, StoredTensor):
            return True
        if not isinstance(item, Opaque | Mapping | list | tuple) or id(item) in seen:
            continue
        seen[id(item)] = item  # objects refer to each other, and back
        if isinstance(item, Opaque):
            todo += (item.args, item.state)
        else:
            todo += item.values() if isinstance(item, Mapping) else item
    return False


def is_endless(value: object) -> bool:
    """Return whether the value is too large to write out.

    It is if it holds itself, if it nests deeper than `MAX_DEPTH`, or if it refers to the same
    containers so often that the written form would be many times larger than the value.
    """
    extents: dict[int, tuple[int, int]] = {}
    item_count = 0

    def extent(container: Iterable[object], depth: int) -> tuple[int, int]:
        """Return the levels of a container, and its items with all repetitions."""
        nonlocal item_count
        if depth > MAX_DEPTH:
            raise RecursionError
        measured = extents.get(id(container))
        if measured is None:
            items = _items_of(container)
            item_count += len(items)
            below = [extent(item, depth + 1) for item in items if isinstance(item, _CONTAINERS)]
            height = 1 + max((levels for levels, _ in below), default=0)
            measured = height, len(items) + sum(numel for _, numel in below)
            extents[id(container)] = measured
        if depth + measured[0] > MAX_DEPTH + 1:
            raise RecursionError
        return measured

    try:
        height, numel = extent(value, 0) if isinstance(value, _CONTAINERS) else (0, 0)
    except RecursionError:
        return True
    return height > MAX_DEPTH or numel > SPARE_ITEMS + 16 * item_count


UNRESOLVED = "a view that torch conjugates or negates only when it is used"
RESOLVED = "save tensor.resolve_conj().resolve_neg() in its place"


NUMPY_ARRAYS = (
    "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct",
    "numpy._core.numeric._frombuffer", "numpy.core.numeric._frombuffer",
)  # fmt: skip
"""Functions that rebuild a pickled numpy array: of numpy 2, of numpy 1, and of both in protocol 5."""
LAZY_PARAMETERS = tuple(
    f"torch.nn.parameter.Uninitialized{kind}" for kind in ("Parameter", "Buffer")
)
RUN_ONCE = "run one batch through the model, and save it again"
_OTHER_FORMS = {
    "torch._utils._rebuild_sparse_tensor": ("a sparse tensor", "save tensor.to_dense() in its place"),
    "torch._utils._rebuild_nested_tensor": ("a nested tensor", "save tensor.unbind() in its place"),
    "torch._utils._rebuild_qtensor": (
        "a quantized tensor of torch.ao", "save tensor.dequantize() in its place",
    ),
    **dict.fromkeys(NUMPY_ARRAYS, ("a numpy array", "save torch.from_numpy(array) in its place")),
    **dict.fromkeys(LAZY_PARAMETERS, ("a parameter of a lazy module, which has no values yet", RUN_ONCE)),
}  # fmt: skip
"""Function that rebuilds a tensor of no dense form -> what it is, and what to save in its place."""


def described(value: Opaque) -> str:
    """Return why an object cannot be carried over into the output, as a clause."""
    if value.is_empty:
        return "was on the meta device when it was saved, so its values are not here"
    if value.is_unresolved:
        return f"{UNRESOLVED}, so its values are not here: {RESOLVED}"
    if value.class_name in _OTHER_FORMS:
        what, repair = _OTHER_FORMS[value.class_name]
        return f"{what}: {repair}" if ", which" in what else f"{what}, which is not read: {repair}"
    return f"an object of unknown class {value.class_name}"


# ------------------------------------------------------------------ compared


class _Marker:
    """Stands for a tensor or an absent value in a comparison of plain values."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


TENSOR, NOTHING = _Marker("a tensor"), _Marker("nothing")


def differing(
    output: Mapping[Path, object], source: Mapping[Path, object], depth: int = 1
) -> list[str]:
    """Return the differences between the plain values of an output and those of the source.

    Every value of the source must be in the output and be equal. An entry (all values that share
    the first `depth` segments) that is in both must have no other values in the output. A tuple
    equals a list, and the key 1 equals "1", because JSON and DCP have only one of the two.
    """
    output_atoms, source_atoms = dict(_atoms(output)), dict(_atoms(source))
    lasts = _last_indices(output_atoms)
    problems = [
        f"{_name(path)}: is no tensor, and is not in the output"
        for path, value in source_atoms.items()
        if path not in output_atoms and value is not TENSOR and not _is_hole(path, value, lasts)
    ]
    for path, (output_value, source_value) in _find_differences(
        output_atoms, source_atoms, depth
    ).items():
        if source_value is NOTHING:
            problems.append(f"{_name(path)}: {output_value!r:.60} is in the output only")
        elif output_value is not NOTHING:
            problems.append(
                f"{_name(path)}: {output_value!r:.60}, the source has {source_value!r:.60}"
            )
    return problems


def unequal(
    a: Mapping[Path, object], b: Mapping[Path, object], depth: int = 1
) -> tuple[int, dict[str, tuple[object, object]]]:
    """Return the number of equal values, and the pairs of values that differ, by name.

    Values are equal by the rules of `differing`. In an entry that both sides have, a value of only
    one side is a difference.
    """
    a_atoms, b_atoms = dict(_atoms(a)), dict(_atoms(b))
    differences = _find_differences(a_atoms, b_atoms, depth)
    common = [path for path in a_atoms if path in b_atoms and a_atoms[path] is not TENSOR]
    agree = sum(path not in differences for path in common)
    named: dict[str, tuple[object, object]] = {}
    for path, values in differences.items():
        named.setdefault(_name(path), values)
    return agree, named


def _find_differences(
    a: Mapping[_Where, object], b: Mapping[_Where, object], depth: int
) -> dict[_Where, tuple[object, object]]:
    """Return the values of common entries that differ or are on one side only.

    A tensor differs from a plain value; two tensors are not compared here.
    """
    entries = {path[:depth] for path in a} & {path[:depth] for path in b}
    ends = _last_indices(a), _last_indices(b)
    differences = {}
    for path in {**a, **b}:
        a_value, b_value = a.get(path, NOTHING), b.get(path, NOTHING)
        are_markers = isinstance(a_value, _Marker) and isinstance(b_value, _Marker)
        if path[:depth] not in entries or are_markers or _alike(a_value, b_value):
            continue
        if isinstance(b_value, _Marker) and _is_hole(path, a_value, ends[1]):
            continue
        if isinstance(a_value, _Marker) and _is_hole(path, b_value, ends[0]):
            continue
        differences[path] = (a_value, b_value)
    return differences


def _is_hole(path: _Where, value: object, lasts: Mapping[_Where, int]) -> bool:
    """Return whether the value is a None in place of an item that the other side's list lacks.

    That list must have an item at this index or after it.
    """
    return value is None and path[-1][0] and int(path[-1][1]) <= lasts.get(path[:-1], -1)


def _last_indices(atoms: Iterable[_Where]) -> dict[_Where, int]:
    """Return the last index of each list, by the path of the list."""
    lasts: dict[_Where, int] = {}
    for path in atoms:
        for depth, (is_index, text) in enumerate(path):
            if is_index:
                lasts[path[:depth]] = max(int(text), lasts.get(path[:depth], -1))
    return lasts


def _name(path: _Where) -> str:
    return ".".join(text for _, text in path)


_Where: TypeAlias = tuple[tuple[bool, str], ...]
"""Each segment of a path as (whether it is an index of a list, text). The first never is an index:
the entries of a checkpoint have names, even if they are in a list."""


def _atoms(values: Mapping[Path, object]) -> Iterator[tuple[_Where, object]]:
    for path, value in values.items():
        where = tuple((at > 0 and type(s) is ListIndex, str(s)) for at, s in enumerate(path))
        yield from _atoms_below(where, value)


def _atoms_below(path: _Where, value: object) -> Iterator[tuple[_Where, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _atoms_below((*path, (False, str(key))), item)
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _atoms_below((*path, (True, str(index))), item)
    else:
        yield path, value


def _alike(a: object, b: object) -> bool:
    if isinstance(a, Mapping | list | tuple):  # empty, because items of others are compared alone
        kind = Mapping if isinstance(a, Mapping) else (list, tuple)
        return isinstance(b, kind) and len(a) == len(b) == 0
    return (type(a) is type(b) and bool(a == b)) or (a != a and b != b)
