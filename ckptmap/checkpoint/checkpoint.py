"""open(): any checkpoint as a mapping of plain FQN -> LazyTensor, from headers alone.

    path -> container -> index -> layouts join ranks -> roles -> schemes group parts -> plain names

Every room is visited once and named by protocol only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_not
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any

from ckptmap import registry
from ckptmap.checkpoint.compare import same_parts
from ckptmap.checkpoint.framework_members import index_of, left_behind, merged
from ckptmap.checkpoint.fsdp1_units import LikeUnits
from ckptmap.checkpoint.group import Refused, grouped, remarks, strings_beside
from ckptmap.checkpoint.groups import Groups
from ckptmap.checkpoint.leaf_reader import LeafReader
from ckptmap.checkpoint.module_order import in_order
from ckptmap.checkpoint.roles import Roles, is_tensor, split_roles
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.state_paths import join, nest
from ckptmap.core.tensor_columns import Extents
from ckptmap.errors import MissingKeyError, SourceError
from ckptmap.formats.probe import find, look
from ckptmap.mapping.wrappers import describe_wrappers, strip_wrappers
from ckptmap.optim.moments import gathered
from ckptmap.optim.order import Order, Weight
from ckptmap.optim.reading import Model, OptimizerReader
from ckptmap.optim.state import key_forms
from ckptmap.protocols import Directory, Group, Index, Place
from ckptmap.quantization.unsupported_schemes import naked_note
from ckptmap.sharding.reference_model import (
    CONFIG,
    MANIFEST,
    Like,
    like_config,
    like_manifest,
    unflatteners,
)
from ckptmap.storage.files import Files, Fingerprint
from ckptmap.storage.hub.resolve import locate, named_as_asked
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.unchanged import fingerprints
from ckptmap.tensors import Leaf, Opaque, PerRank, StoredTensor, TensorInfo


class Checkpoint(Mapping[str, LazyTensor]):
    """A checkpoint, opened: the weights by plain FQN, in stored order.

    optimizer   FQN -> state name -> LazyTensor, and more: see `optimizer` below
    extra       what is not a tensor (step, hyper-parameters), nested as it was saved
    other       tensors that are neither weights nor optimizer state, by path
    refused     leaves of classes that are never called
    wrappers    what was stripped from names, one pattern each: `("_orig_mod.",)`
    names       plain FQN -> the key as stored
    translated  how its names were translated from another scheme's; None: they were not
    setup       the `--to` name that such a checkpoint answers to
    """

    translated: Mapping[str, Any] | None = None
    merged: Mapping[str, Any] | None = None
    """What was merged into it, as a manifest records it; None: nothing was."""
    ties: Mapping[str, str] = MappingProxyType({})
    """Names that are left out, each with the one that it must be equal to."""
    untied: Mapping[str, str] = MappingProxyType({})
    """Heads that what lies beside the weights ties, though they are tensors of their own here, each
    with its embedding."""
    fingerprints: Mapping[str, Fingerprint] = MappingProxyType({})
    """Of its files, as they were opened."""

    def __init__(self, path: str, index: Index, roles: Roles, files: Files) -> None:
        self.path = path
        self.origin = ""
        """The place on the Hub that `path` stands for, its commit pinned; "" for a local path."""
        self.index = index
        self.files = files
        self.roles = roles
        self.notes: list[str] = [*index.notes, *left_behind(index.unread_files)]
        self.refused: list[Refused] = []
        said = strings_beside(roles.rest, roles.model_root)
        groups = grouped(roles.model, index.records, roles.model_root, path, self.refused, said)
        plain = strip_wrappers(list(groups), path)
        stripped = any(map(is_not, plain, plain.values()))
        self._groups = groups.renamed(plain) if stripped else groups
        self.names = {fqn: key for key, fqn in plain.items()} if stripped else plain
        self.wrappers = describe_wrappers(plain)
        moments = roles.optimizer
        if moments:  # only then: importing all schemes takes longer than inspecting a small file
            moments = gathered(moments, index.records, roles.optimizer_root, registry.schemes())
        self.notes += remarks(self._groups.encoded())
        self.notes += naked_note(self._groups.infos())
        read = LeafReader(path, files, self.refused, roles.optimizer_root or ())
        self.optimizer_reader = OptimizerReader(
            moments, key_forms(), read.optimizer, self._model(plain), path,
            index.sidecar_dir,
        )  # fmt: skip
        if self.optimizer_reader.form is None and self.optimizer_reader.why:
            self.notes.append(f"optimizer state cannot be read: {self.optimizer_reader.why}")
        self.other = {
            path: lazy
            for path, leaf in roles.rest.items()
            if is_tensor(leaf) and (lazy := read.tensor(path, leaf)) is not None
        }
        self.plain = dict(read.plain(roles.rest))

    # ------------------------------------------------------------------ the mapping

    def __getitem__(self, fqn: str) -> LazyTensor:
        try:
            group = self._groups[fqn]
        except KeyError:
            raise MissingKeyError(
                "CKM501", f"{self.path}: no tensor {fqn!r}", _nearest(str(fqn), self._groups)
            ) from None
        return LazyTensor(fqn, group, self.files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._groups

    def infos(self) -> dict[str, TensorInfo]:
        """What the weights are, no group made."""
        return self._groups.infos()

    def group(self, fqn: str) -> Group:
        return self._groups[fqn]

    @property
    def groups(self) -> Mapping[str, Group]:
        """Every logical tensor's stored parts, by FQN."""
        return self._groups

    def dense(self) -> Mapping[str, StoredTensor]:
        """The weights that are one plain tensor each, as stored."""
        return self._groups.dense()

    def sharing(self) -> list[tuple[str, ...]]:
        """Names of weights that the file itself says are one tensor."""
        return self._groups.sharing()

    @property
    def origins(self) -> dict[str, tuple[str, ...]]:
        """Of weights that have other names in the file: FQN -> the keys there."""
        return {fqn: (key,) for fqn, key in self.names.items() if key != fqn}

    def run(self) -> Extents | None:
        """All of its weights side by side, where all are plain and lie so; a look at 100,000."""
        return self._groups.run

    def put(self, fqn: str, group: Group) -> None:
        """Say what a tensor is that its own file says too little of."""
        self._groups[fqn] = group

    def find(self, role: str, fqn: str) -> LazyTensor | None:
        """A tensor by the role and name that a plan gives it."""
        if role == "model":
            return self.get(fqn)
        if role == "other":
            return next((lazy for lazy in self.other.values() if lazy.fqn == fqn), None)
        return self.optimizer_reader.named().named_tensors.get(fqn)

    # ------------------------------------------------------------------ optimizer state

    @property
    def optimizer(self) -> dict[str, dict[str, LazyTensor]]:
        """FQN -> state name -> LazyTensor; empty where there is none, or none that can be named.

        State keyed by index is named by the first that can: the order given to `open`, the file's
        own names, the order of the model dict saved with it, the transformers class of the
        config.json beside it.
        """
        return self.optimizer_reader.named().tensors

    @property
    def optimizer_values(self) -> dict[str, dict[str, Any]]:
        """FQN -> state name -> what is no tensor: a step count of older torch, None."""
        return self.optimizer_reader.named().values

    @property
    def optimizer_groups(self) -> list[dict[str, Any]]:
        """The groups with their hyper-parameters, `"params"` by FQN."""
        return [dict(group) for group in self.optimizer_reader.named().groups]

    @property
    def optimizer_order(self) -> str:
        """Where the names behind an index came from; "" where the file keys state by name, or
        nothing tells."""
        return self.optimizer_reader.order

    @property
    def optimizer_by_index(self) -> bool:
        """Is the state keyed by index, and neither the file nor the user says which is which?"""
        return self.optimizer_reader.by_index

    def order_optimizer(
        self, param_order: Order | None = None, like: str | os.PathLike[str] | None = None
    ) -> None:
        """Name state that is keyed by index by this order of parameters, one list of FQNs a group,
        or by the transformers class of the config.json in `like`. Raises SourceError CKM207 where
        the order does not fit."""
        self.optimizer_reader.ask(param_order, None if like is None else os.fspath(like))
        if param_order is not None:
            self.optimizer_reader.named()

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
        return self._groups.encodings()

    @property
    def setup(self) -> str:
        """The nearest `--to` name: container and wrappers tell, encodings are appended."""
        mine = [s for s in registry.setups() if s.writer == self.index.container]
        heads = {pattern.split(".")[0] for pattern in self.wrappers}
        wrapped = [s for s in mine if s.wrap and s.head in heads]
        fitting = wrapped or [s for s in mine if not s.wrap] or mine
        name = fitting[-1].name if fitting else self.index.container
        return "-".join([name, *(e for e in self.encodings if e != "dense")])

    @property
    def shown(self) -> str:
        """Where it is, as the user would write it."""
        return self.origin or self.path

    def close(self) -> None:
        self.files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({self.shown!r}, {len(self)} tensors, {self.setup})"

    # ------------------------------------------------------------------ building

    def _model(self, plain: Mapping[str, str]) -> Model:
        groups = self._groups if self.roles.optimizer else {}  # nobody else asks for them
        weights = [Weight(fqn, group.info, _share(group)) for fqn, group in groups.items()]
        return Model(weights, plain, self._keeps_order)

    @property
    def _keeps_order(self) -> Callable[[], bool]:
        """Tells whether all weights stand where the dict that was saved had them."""
        return partial(_all_in_order, self._groups, self.index.keeps_order)


def open(
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    like: str | os.PathLike[str] | None = None,
    param_order: Order | None = None,
) -> Checkpoint:
    """Open whatever checkpoint is at `path`; headers only, no process group, nothing unpickled.

    `hf://org/name[@revision][/folder]` is a path too: headers are read by range from the Hub.

    `root` names the dict that holds the weights (`"model"`, `"app/model"`), where several could.
    `like` is another checkpoint of the same model, or its config.json: flat shards of FSDP1 carry
    no shapes, some do not say which modules are wrapped, and a config.json tells which parameter
    an optimizer's index means. So does
    `param_order`, which goes first: the FQNs of the parameters as they were passed to the
    optimizer, one list a group. Raises SourceError where the path is no checkpoint, is malformed,
    or is ambiguous, CKM207 where `param_order` does not fit.
    """
    located = locate(path)
    like = None if like is None else locate(like).path
    with named_as_asked(), paused_gc():
        place, notes = find(look(located.path), registry.knows)
        known = partial(read_like, like) if like is not None else _own(place)
        index = index_of(place)
        notes = (*located.notes, *notes, *index.notes)
        units = index.units if like is None else LikeUnits(index.units, str(like))
        ckpt = _opened(place, replace(index, notes=notes, units=units), root, known)
    ckpt.origin = located.origin
    ckpt.order_optimizer(param_order, like)
    return ckpt


def open_as(path: str | os.PathLike[str], directory: Directory) -> Checkpoint:
    """A directory as `directory` reads it, which may be one of several checkpoints in it."""
    place = look(locate(path).path)
    return _opened(place, merged(directory, place), None, _own(place))


def _own(place: Place) -> Callable[[], Like] | None:
    """Our own outputs say themselves what lies flat in them."""
    if MANIFEST not in place.names:
        return None
    return partial(like_manifest, FilePath(place.path) / MANIFEST)


def _opened(
    place: Place, index: Index, root: str | None, like: Callable[[], Like] | None
) -> Checkpoint:
    leaves = index.leaves
    if not isinstance(leaves, Extents):  # those are whole, and nothing else
        for way in unflatteners():
            leaves = way.unflatten(leaves, like, strip_wrappers, place.path, index.units)
        leaves = {
            path: leaf if isinstance(leaf, StoredTensor) else _joined(join(path), leaf)
            for path, leaf in leaves.items()
        }
        index = replace(index, leaves=leaves)
    ckpt = Checkpoint(place.path, index, split_roles(leaves, root, place.path), Files())
    ckpt.fingerprints = ckpt.files.seen = fingerprints(index.files)
    return ckpt


def read_like(path: str | os.PathLike[str]) -> Like:
    """Names and shapes of the model that a checkpoint, or a config.json, is of.

    A checkpoint that lists its tensors in no order of the model's (safetensors, DCP of replicas)
    gets the order from the config.json beside it, where there is one that transformers knows.
    """
    file = locate(path).path
    if file.name == CONFIG:
        return like_config(file)
    config = (file if file.is_dir() else file.parent) / CONFIG
    try:
        ckpt = open(path)
    except SourceError as error:
        if error.code == "CKM111" and config.is_file():  # a model without its weights
            return like_config(config)
        raise
    infos = {fqn: ckpt.group(fqn).info for fqn in ckpt}
    ordered = frozenset(in_order(ckpt.path, ckpt.index, ckpt.groups))
    if not ordered and config.is_file():
        try:
            return like_config(config)
        except SourceError:  # no transformers, or not its model: the shapes are still known
            pass
    first: dict[object, str] = {}
    ties = {}
    for fqn in ckpt:
        share = _share(ckpt.group(fqn))
        if share is not None and first.setdefault(share, fqn) != fqn:
            ties[fqn] = first[share]
    shapes = {fqn: info.shape for fqn, info in infos.items()}
    return Like(str(path), shapes, ordered, ties, lambda a, b: same_parts(ckpt[a], ckpt[b]) is None)


def _all_in_order(groups: Groups, keeps_order: Callable[[StoredTensor], bool] | None) -> bool:
    parts = (part for group in groups.values() for part in group.parts.values())
    return keeps_order is not None and all(map(keeps_order, parts))


def _share(group: Group) -> object:
    stored = group.parts.get("")
    return stored.share if stored is not None else None


def _joined(key: str, leaf: Leaf) -> Leaf:
    """Parts that ranks hold as one tensor, by the first layout that knows them."""
    values: Sequence[Leaf]
    if isinstance(leaf, PerRank):
        values = leaf.values
    elif isinstance(leaf, Opaque):
        values = (leaf,)
    else:
        return leaf
    for layout in registry.layouts():
        joined = layout.join(values, key)
        if joined is not None:
            return joined
    return leaf


def _nearest(fqn: str, keys: Mapping[str, object]) -> str:
    import difflib

    near = difflib.get_close_matches(fqn, list(keys), n=1)
    return f"did you mean {near[0]!r}?" if near else "see `ckptmap inspect` for the keys"
