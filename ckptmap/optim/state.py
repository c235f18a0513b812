"""Optimizer state as frozen values: in the keys of its file first, then by parameter name.

    {"state": {0: {"exp_avg": t}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        -> StateKeys  the parameter that each leaf belongs to, in the file's own keys
        -> Optimizer  the same as LazyTensors and plain values, then by plain FQN

A key form is a way to key the state of a parameter: by name, by a dotted key that contains the
name, by index. `registry.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from ckptmap import registry
from ckptmap.core.state_paths import nest
from ckptmap.errors import SourceError
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Leaf, Path, PlainValue

_Value = TypeVar("_Value")

STATE, GROUPS, PARAMS, NAMES = "state", "param_groups", "params", "param_names"
FORMAT_VERSION = "_optimizer_state_format_version"
"""What torch_checkpointing's `optimizer_transform_pre` puts beside state that is keyed by name. It leaves PARAMS out
of the groups, whose NAMES are the keys of the state."""
"""The words of torch.optim's state dicts."""
SCRATCH = frozenset({"unorm_vec", "gnorm_vec"})
"""Entries of bitsandbytes that each step computes anew. LAMB and LARS keep the norm of the update, of one
element."""

StateValue: TypeAlias = LazyTensor | PlainValue
"""One value of optimizer state: a tensor, or a plain value such as a number."""

MakeValue: TypeAlias = Callable[[Path, Leaf], Any]
"""Returns the StateValue of a leaf, or `REFUSED`."""

ParamGroup: TypeAlias = Mapping[str, Any]
"""`{"params": [key, ...], "lr": 0.1, ...}`; a hyper-parameter that is a tensor is a LazyTensor."""


@dataclass(frozen=True)
class StateKeys:
    """The parameter or the group that each leaf belongs to. Parameters' keys are strings, indices too.

    state   leaf path -> (parameter, path of the state's name); an empty name: it has no state
    hyper   leaf path -> (group, path of the hyper-parameter's name); the first path of several
            holds the value, the others must hold the same
    params  the parameters of each group, in order
    rest    leaves that are neither
    """

    by_index: bool
    state: Mapping[Path, tuple[str, Path]]
    hyper: Mapping[Path, tuple[int, Path]]
    params: Sequence[Sequence[str]]
    rest: Sequence[Path] = ()


class KeyForm(Protocol):
    """One way to key optimizer state, read and written."""

    name: str
    whole: bool
    """True: it holds only in one file of whole tensors, where integer keys stay integers."""

    def read(self, leaves: Mapping[Path, Leaf]) -> StateKeys | None:
        """Return the keys of these leaves, `expanded`; None: they are not keyed in this form."""

    def write(self, optimizer: Optimizer) -> list[tuple[Path, StateValue]]:
        """Return every state entry and hyper-parameter with its path below the optimizer's root.

        Values are LazyTensors and plain values. Raises PlanError CKM207 where the form cannot name
        one of them.
        """


def key_forms() -> tuple[KeyForm, ...]:
    """Return every key form that is registered, in the order in which they are asked."""
    return registry.key_forms()


@dataclass(frozen=True)
class StateLeaf:
    """One entry of one parameter's state: `value` is a LazyTensor, or plain (None, a number).

    An empty `name`: the parameter is listed without state, and `value` is `{}`.
    """

    key: str
    name: Path
    value: StateValue

    @property
    def title(self) -> str:
        return ".".join(map(str, self.name))


class Same(NamedTuple):
    """Two tensors of which one is written; if the other differs, `hint` says what to do."""

    kept: LazyTensor
    other: LazyTensor
    hint: str = (
        "the two are copies of one value: save the checkpoint again, or leave the optimizer behind"
        " with --optimizer drop"
    )


@dataclass(frozen=True)
class Optimizer:
    """Optimizer state; keyed by plain FQN once it is `named`.

    leaves  every state entry, in stored order
    groups  hyper-parameters and `"params"`, in stored order
    rest    what lies beside state and groups: LazyTensors and plain values, by path
    same    pairs of tensors, step counts and hyper-parameters, that must agree
    """

    leaves: Sequence[StateLeaf] = ()
    groups: Sequence[ParamGroup] = ()
    rest: Mapping[Path, StateValue] = field(default_factory=dict)
    same: Sequence[Same] = ()

    @property
    def keys(self) -> list[str]:
        """Every parameter with state or in a group, those of the groups first."""
        keys = dict.fromkeys(key for group in self.groups for key in group[PARAMS])
        keys.update(dict.fromkeys(leaf.key for leaf in self.leaves))
        return list(keys)

    @cached_property
    def tensors(self) -> dict[str, dict[str, LazyTensor]]:
        """Parameter -> state name -> tensor."""
        return _by_key(
            (leaf, leaf.value) for leaf in self.leaves if isinstance(leaf.value, LazyTensor)
        )

    @cached_property
    def values(self) -> dict[str, dict[str, object]]:
        """Parameter -> state name -> value that is no tensor."""
        return _by_key(
            (leaf, leaf.value) for leaf in self.leaves if not isinstance(leaf.value, LazyTensor)
        )

    @cached_property
    def nested_values(self) -> dict[str, dict[str, object]]:
        """Parameter -> name of the entry -> value that is no tensor, a dict or list as one value. An entry
        that holds tensors as well is there leaf by leaf, as in `values`."""
        by_key: dict[str, dict[Path, object]] = {}
        mixed = {(leaf.key, leaf.name[:1]) for leaf in self.leaves if _is_apart(leaf)}
        for leaf in self.leaves:
            if leaf.name and not isinstance(leaf.value, LazyTensor):
                apart = (leaf.key, leaf.name[:1]) in mixed
                path = (leaf.title,) if apart else leaf.name
                by_key.setdefault(leaf.key, {})[path] = leaf.value
        return {key: nest(values) for key, values in by_key.items()}

    @cached_property
    def named_tensors(self) -> dict[str, LazyTensor]:
        """Every tensor by the name that a plan gives it: state, hyper-parameters, the rest."""
        return {lazy.fqn: lazy for lazy in self._all_tensors()}

    def _all_tensors(self) -> Iterator[LazyTensor]:
        values: list[object] = [leaf.value for leaf in self.leaves]
        values += [value for group in self.groups for value in _settings(group)]
        yield from (v for v in (*values, *self.rest.values()) if isinstance(v, LazyTensor))

    def named(self, names: Mapping[str, str]) -> Optimizer:
        """Return the state with every parameter's key replaced by its name."""
        leaves = [_named(leaf, names[leaf.key]) for leaf in self.leaves]
        groups = [
            {
                name: _renamed(name, value, [names[key] for key in group[PARAMS]])
                for name, value in group.items()
            }
            for group in self.groups
        ]
        return replace(self, leaves=leaves, groups=groups)

    def without(self, is_left_out: Callable[[str], bool]) -> Optimizer:
        """Return the state without these parameters, and without groups that had no others."""
        leaves = [leaf for leaf in self.leaves if not is_left_out(leaf.key)]
        groups = []
        for group in self.groups:
            kept = [at for at, key in enumerate(group[PARAMS]) if not is_left_out(key)]
            if kept or not group[PARAMS]:
                listed = [name for name in (PARAMS, NAMES) if name in group]
                lists = {name: [group[name][at] for at in kept] for name in listed}
                groups.append({**group, **lists})
        return replace(self, leaves=leaves, groups=groups)


def _is_apart(leaf: StateLeaf) -> bool:
    """Return whether what lies below the first name of this leaf cannot be one plain value."""
    return len(leaf.name) == 1 or isinstance(leaf.value, LazyTensor)


def _by_key(entries: Iterable[tuple[StateLeaf, _Value]]) -> dict[str, dict[str, _Value]]:
    """Return parameter -> state name -> value."""
    by_key: dict[str, dict[str, _Value]] = {}
    for leaf, value in entries:
        if leaf.name:
            by_key.setdefault(leaf.key, {})[leaf.title] = value
    return by_key


def _settings(group: Mapping[Any, object]) -> Iterator[object]:
    """Yield every hyper-parameter, those in nested dicts too: betas that are two tensors."""
    for value in group.values():
        if isinstance(value, Mapping):
            yield from _settings(value)
        else:
            yield value


def _named(leaf: StateLeaf, fqn: str) -> StateLeaf:
    value = leaf.value
    if isinstance(value, LazyTensor):
        value = value.named(f"{fqn}.{leaf.title}")
    return StateLeaf(fqn, leaf.name, value)


def _renamed(name: str, value: object, params: list[str]) -> object:
    return list(params) if name in (PARAMS, NAMES) else value


# ------------------------------------------------------------------ from leaves


REFUSED = object()
"""Marks a leaf of a foreign class, which cannot be carried into an output."""


def expanded(leaves: Mapping[Path, Leaf]) -> dict[Path, Leaf]:
    """Return the leaves with a list of groups that is one leaf split into one leaf a value, as it is
    stored where a hyper-parameter is a tensor:
    ("param_groups",): [{"lr": 0.1}] -> ("param_groups", 0, "lr"): 0.1"""
    by_path: dict[Path, Leaf] = {}
    for path, leaf in leaves.items():
        if path == (GROUPS,) and isinstance(leaf, list) and all(isinstance(g, dict) for g in leaf):
            for number, group in enumerate(leaf):
                by_path.update({(GROUPS, number, name): value for name, value in group.items()})
        else:
            by_path[path] = leaf
    return by_path


def collect(leaves: Mapping[Path, Leaf], keys: StateKeys, make: MakeValue) -> Optimizer:
    """Return the state in the file's own keys, of `expanded` leaves.

    `make` returns a LazyTensor or a plain value for a leaf, and `REFUSED` for one that cannot be
    carried.
    """
    values = {path: make(path, leaf) for path, leaf in leaves.items()}
    carried = {path: value for path, value in values.items() if value is not REFUSED}
    state = [
        StateLeaf(key, name, carried[path])
        for path, (key, name) in keys.state.items()
        if path in carried
    ]
    groups: list[dict[str, object]] = [{PARAMS: list(params)} for params in keys.params]
    same: list[Same] = []
    for path, (number, name) in keys.hyper.items():
        if path in carried:
            first = _set_first(
                groups[number], name, _with_path_name(carried[path], (GROUPS, number, *name))
            )
            if isinstance(first, LazyTensor):
                same.append(Same(first, carried[path]))
    rest = {path: carried[path] for path in keys.rest if path in carried}
    return Optimizer(state, groups, rest, same)


def _with_path_name(value: object, path: Path) -> object:
    return value.named(".".join(map(str, path))) if isinstance(value, LazyTensor) else value


def _set_first(group: dict[str, object], name: Path, value: object) -> object:
    """Set a hyper-parameter, which may lie in a nested dict; return the value that was there before."""
    node: dict[Any, Any] = group
    for segment in name[:-1]:
        node = node.setdefault(segment, {})
    if name[-1] in node:
        return node[name[-1]]
    node[name[-1]] = value
    return None


# ------------------------------------------------------------------ names


def plain_names(
    keys: Sequence[str],
    stored: Mapping[str, str],
    strip: Callable[[str], Iterator[str]],
    where: str,
) -> dict[str, str]:
    """Return the plain FQN of every key: that of the weight stored under the key, else the first of
    the names that `strip` yields that is a weight's, else the last one.

    `stored` is the model's own key -> plain FQN. Raises SourceError CKM114 on a collision.
    """
    weights = set(stored.values())
    result: dict[str, str] = {}
    key_of: dict[str, str] = {}
    for key in keys:
        names = [stored[key]] if key in stored else list(strip(key))
        fqn = next((name for name in names if name in weights), names[-1])
        if fqn in key_of:
            raise SourceError(
                "CKM114",
                f"{where}: optimizer keys {key_of[fqn]!r} and {key!r} are both {fqn!r} without their"
                " wrapper segments",
                "leave the optimizer behind with --optimizer drop",
            )
        key_of[fqn] = key
        result[key] = fqn
    return result
