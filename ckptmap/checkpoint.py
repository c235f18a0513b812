"""open(): any checkpoint as a mapping of plain FQN -> LazyTensor, from headers alone.

    path -> container -> index -> layouts join ranks -> roles -> schemes group parts -> plain names

Every room is visited once and named by protocol only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from ckptmap import registry
from ckptmap.encodings.dense import Dense
from ckptmap.errors import MissingKeyError, SourceError
from ckptmap.files import Files
from ckptmap.lazy import LazyTensor
from ckptmap.mapping.wrappers import describe_wrappers, strip_wrappers
from ckptmap.places import look, refuse_place
from ckptmap.protocols import Group, Place
from ckptmap.roots import Roles, is_tensor, split_roles
from ckptmap.tensors import Cut, Index, Leaf, Opaque, Path, PerRank, StoredTensor
from ckptmap.wire.gc_pause import paused_gc


@dataclass(frozen=True)
class Refused:
    """A leaf that no plan can carry: shown, and refused unless dropped by key."""

    key: str
    reason: str
    droppable: bool


class Checkpoint(Mapping[str, LazyTensor]):
    """A checkpoint, opened: the weights by plain FQN, in stored order.

    optimizer   FQN -> state name -> LazyTensor; empty where there is none keyed by FQN
    optimizer_plain  the optimizer's param_groups and other plain values, by path below its root
    extra       what is not a tensor (step, hyper-parameters), nested as it was saved
    other       tensors that are neither weights nor optimizer state, by path
    refused     leaves of classes that are never called
    wrappers    what was stripped from names, one pattern each: `("_orig_mod.",)`
    names       plain FQN -> the key as stored
    setup       the `--to` name that such a checkpoint answers to
    """

    def __init__(self, path: str, index: Index, roles: Roles, files: Files) -> None:
        self.path = path
        self.index = index
        self.files = files
        self.roles = roles
        self.notes: list[str] = list(index.notes)
        self.refused: list[Refused] = []
        groups = self._group(roles.model, index.records, roles.model_root)
        plain = strip_wrappers(list(groups), path)
        self._groups = {plain[key]: group for key, group in groups.items()}
        self.names = {fqn: key for key, fqn in plain.items()}
        self.wrappers = describe_wrappers(plain)
        self.optimizer, self.optimizer_plain, self.optimizer_by_index = self._optimizer_state()
        self.other = {
            path: lazy
            for path, leaf in roles.rest.items()
            if is_tensor(leaf)
            for lazy in self._one(path, leaf)
        }
        self.plain = dict(self._plain_values(roles.rest))

    # ------------------------------------------------------------------ the mapping

    def __getitem__(self, fqn: str) -> LazyTensor:
        group = self._groups.get(fqn)
        if group is None:
            raise MissingKeyError(
                "CKM501", f"{self.path}: no tensor {fqn!r}", _nearest(fqn, self._groups)
            )
        return LazyTensor(fqn, group, self.files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._groups

    def group(self, fqn: str) -> Group:
        return self._groups[fqn]

    def find(self, role: str, fqn: str) -> LazyTensor | None:
        """A tensor by the role and name that a plan gives it."""
        if role == "model":
            return self[fqn] if fqn in self else None
        if role == "other":
            return next((lazy for lazy in self.other.values() if lazy.fqn == fqn), None)
        key, _, name = fqn.rpartition(".")
        return self.optimizer.get(key, {}).get(name)

    # ------------------------------------------------------------------ what else it says

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return self.index.world

    @property
    def extra(self) -> dict[str, Any]:
        return nest(self.plain)

    @property
    def encodings(self) -> tuple[str, ...]:
        """Names of the encodings of its weights, in order of first use."""
        return tuple(dict.fromkeys(group.encoding.name for group in self._groups.values()))

    @property
    def setup(self) -> str:
        """The nearest `--to` name: container and wrappers tell, encodings are appended."""
        mine = [s for s in registry.setups() if s.writer == self.index.container]
        heads = {pattern.split(".")[0] for pattern in self.wrappers}
        wrapped = [s for s in mine if s.wrap and s.head in heads]
        fitting = wrapped or [s for s in mine if not s.wrap] or mine
        name = fitting[-1].name if fitting else self.index.container
        return "-".join([name, *(e for e in self.encodings if e != "dense")])

    def close(self) -> None:
        self.files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {len(self)} tensors, {self.setup})"

    # ------------------------------------------------------------------ building

    def _one(self, path: Path, leaf: Leaf) -> list[LazyTensor]:
        """A tensor outside the weights, by itself; none where it is refused."""
        groups = self._group({path: leaf}, {}, ()).values()
        return [LazyTensor(group.fqn, group, self.files) for group in groups]

    def _group(
        self, leaves: Mapping[Path, Leaf], records: Mapping[str, Mapping[str, Any]], root: Path
    ) -> dict[str, Group]:
        """Logical tensors by stored key, in stored order."""
        stored: dict[str, StoredTensor] = {}
        order: dict[str, Group | None] = {}
        for path, leaf in leaves.items():
            key = join(path)
            if key in order:
                raise SourceError("CKM114", f"{self.path}: key {key!r} occurs twice", "rename one")
            if isinstance(leaf, StoredTensor):
                stored[key] = leaf
                order[key] = None
                continue
            group = self._adopt(key, leaf)
            if group is not None:
                order[key] = group
        prefix = join(root) + "." if root else ""
        mine = {k.removeprefix(prefix): r for k, r in records.items() if k.startswith(prefix)}
        for group, consumed in (
            found for scheme in registry.schemes() for found in scheme.group(stored, mine)
        ):
            for key in consumed:
                del stored[key]
            order[consumed[0]] = group
        result: dict[str, Group] = {}
        for key, adopted in order.items():
            if adopted is not None:
                result[adopted.fqn] = adopted
            elif key in stored:
                result[key] = Group(key, stored[key].info, Dense(), {"": stored[key]})
        return result

    def _adopt(self, key: str, leaf: Leaf) -> Group | None:
        """A pickled tensor subclass as the group that a scheme makes of it, else refused."""
        if isinstance(leaf, Opaque | Cut):
            for scheme in registry.schemes():
                group = scheme.adopt(key, leaf)
                if group is not None:
                    return group
        name = leaf.pieces[0][1].class_name if isinstance(leaf, Cut) else _class_of(leaf)
        self.refused.append(Refused(key, f"a tensor of unknown class {name}", droppable=False))
        return None

    def _optimizer_state(
        self,
    ) -> tuple[dict[str, dict[str, LazyTensor]], dict[Path, Any], bool]:
        """State by FQN: nested {"state": {fqn: {name: t}}} or flattened "state.<fqn>.<name>"."""
        tensors: dict[str, dict[str, LazyTensor]] = {}
        rest: dict[Path, Any] = {}
        by_index = False
        for path, leaf in self.roles.optimizer.items():
            parsed = _state_key(path)
            if parsed is None or not is_tensor(leaf):
                rest[path] = leaf
                continue
            key, name = parsed
            by_index = by_index or key.isdigit()
            for lazy in self._one(path, leaf):
                tensors.setdefault(key, {})[name] = lazy
        plain = {} if by_index else strip_wrappers(list(tensors), f"{self.path} (optimizer)")
        state = {
            plain[key]: {name: lazy.named(f"{plain[key]}.{name}") for name, lazy in states.items()}
            for key, states in tensors.items()
            if key in plain
        }
        return state, dict(self._plain_values(rest, self.roles.optimizer_root or ())), by_index

    def _plain_values(
        self, leaves: Mapping[Path, Leaf], root: Path = ()
    ) -> Iterator[tuple[Path, Any]]:
        for path, leaf in leaves.items():
            found = next(_opaques(leaf), None)
            if found is not None and not (is_tensor(leaf) and isinstance(leaf, StoredTensor)):
                held = _holds_tensor(found)
                self.refused.append(
                    Refused(
                        join((*root, *path)),
                        f"an object of unknown class {found.class_name}",
                        not held,
                    )
                )
            elif not is_tensor(leaf):
                yield path, leaf


def open(path: str | os.PathLike[str], *, root: str | None = None) -> Checkpoint:
    """Open whatever checkpoint is at `path`; headers only, no process group, nothing unpickled.

    `root` names the dict that holds the weights (`"model"`, `"app/model"`), where several could.
    Raises SourceError where it is none, is malformed, or is ambiguous.
    """
    place = look(FilePath(path))
    container = registry.container_for(place)
    if container is None:
        raise refuse_place(place, lambda child: registry.container_for(child) is not None)
    with paused_gc():
        return _opened(place, container.index(place), root)


def _opened(place: Place, index: Index, root: str | None) -> Checkpoint:
    leaves = {path: _joined(join(path), leaf) for path, leaf in index.leaves.items()}
    return Checkpoint(place.path, index, split_roles(leaves, root, place.path), Files())


def _joined(key: str, leaf: Leaf) -> Leaf:
    """Parts that ranks hold as one tensor, by the first layout that knows them."""
    values: Sequence[Leaf]
    if isinstance(leaf, PerRank):
        values = leaf.values
    elif isinstance(leaf, Opaque) and leaf.info is not None:
        values = (leaf,)
    else:
        return leaf
    for layout in registry.layouts():
        joined = layout.join(values, key)
        if joined is not None:
            return joined
    return leaf


def join(path: Path) -> str:
    return ".".join(map(str, path))


def nest(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Leaves by path -> nested dicts; runs of integer keys 0..n-1 become lists."""
    tree: dict[Any, Any] = {}
    for path, value in values.items():
        node = tree
        for segment in path[:-1]:
            node = node.setdefault(segment, {})
        node[path[-1]] = value
    return {key: _listed(value) for key, value in tree.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    value = {key: _listed(item) for key, item in value.items()}
    if value and list(value) == list(range(len(value))):
        return list(value.values())
    return value


def _state_key(path: Path) -> tuple[str, str] | None:
    """("state", fqn, name) or ("state.<fqn>.<name>",) -> (fqn, name)."""
    if len(path) >= 3 and path[0] == "state":
        return join(path[1:-1]), str(path[-1])
    if len(path) == 1 and isinstance(path[0], str) and path[0].startswith("state."):
        fqn, _, name = path[0].removeprefix("state.").rpartition(".")
        return fqn, name
    return None


def _opaques(value: Any) -> Iterator[Opaque]:
    if isinstance(value, Opaque):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _opaques(key)
            yield from _opaques(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _opaques(item)
    elif isinstance(value, PerRank):
        yield from _opaques(value.values)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, StoredTensor):
        return True
    if isinstance(value, Opaque):
        return _holds_tensor((value.args, value.state))
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds_tensor, value))


def _class_of(leaf: Leaf) -> str:
    found = next(_opaques(leaf), None)
    return found.class_name if found else type(leaf).__name__


def _nearest(fqn: str, keys: Mapping[str, object]) -> str:
    import difflib

    near = difflib.get_close_matches(fqn, list(keys), n=1)
    return f"did you mean {near[0]!r}?" if near else "see `ckptmap inspect` for the keys"
