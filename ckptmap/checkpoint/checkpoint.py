"""A checkpoint that was opened: weights by plain FQN, optimizer state, and all other values.

A `Checkpoint` is made from headers alone, by `ckptmap.checkpoint.assemble`, and never changes. What
derives one from another, such as new names or a merged adapter, returns a new value over the same
open files, which close with the last value that refers to them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptmap import registry
from ckptmap.checkpoint.group_parts import RefusedLeaf
from ckptmap.checkpoint.logical_tensors import LogicalTensors
from ckptmap.checkpoint.name_translation import NameTranslation
from ckptmap.checkpoint.split_roles import Roles
from ckptmap.core import argument_checks
from ckptmap.core.formatting import counted
from ckptmap.core.printable import quote
from ckptmap.core.short_repr import short
from ckptmap.core.state_paths import nest
from ckptmap.core.tensor_columns import PlainTensors
from ckptmap.core.weight_columns import WeightKind
from ckptmap.errors import MissingKeyError
from ckptmap.mapping.renaming import Renaming
from ckptmap.optim.index_order import Order
from ckptmap.optim.optimizer_reader import OptimizerReader
from ckptmap.protocols import Group, Index
from ckptmap.protocols.file_systems import Fingerprint
from ckptmap.storage.files import Files
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Path, StoredTensor, TensorInfo


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint(Mapping[str, LazyTensor]):
    """A checkpoint, opened: the weights by plain FQN, in stored order.

    path              where it is, absolute; of a checkpoint on the Hub the local mirror
    index             what its container holds
    files             its open files
    roles             the leaves of the state dict: weights, optimizer state, the rest
    groups            the stored parts of every weight, by FQN
    names             FQN -> the key as stored
    wrappers          what was stripped from names, one pattern each: `("_orig_mod.",)`
    optimizer_reader  reads the optimizer state; see `optimizer` below
    other             tensors that are neither weights nor optimizer state, by path
    plain             what is not a tensor (step, hyper-parameters), by path; `extra` nests it
    notes             what a reader should be told
    refused           leaves of classes that are never called
    origin            the place on the Hub that `path` stands for, its commit pinned; "": a local path
    renamings         how its names were changed by prefix and pattern, in this order, before any scheme
    translation       how its names were translated from another scheme's; None: they were not
    merged            the adapter that was merged into it, as a manifest records it; None: none was
    ties              names that are left out, each with the one that it must be equal to
    untied            heads that a config beside the weights ties, though they are tensors of their
                      own here, each with its embedding
    fingerprints      of its files, as they were opened
    root              that it was opened with; "": none was given
    has_manifest      whether a manifest of ckptmap states digests of it
    """

    path: str
    index: Index
    files: Files
    roles: Roles
    groups: LogicalTensors
    names: Mapping[str, str]
    wrappers: tuple[str, ...]
    optimizer_reader: OptimizerReader
    other: Mapping[Path, LazyTensor]
    plain: Mapping[Path, Any]
    notes: list[str]
    refused: list[RefusedLeaf]
    origin: str = ""
    renamings: tuple[Renaming, ...] = ()
    translation: NameTranslation | None = None
    merged: Mapping[str, object] | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    untied: Mapping[str, str] = field(default_factory=dict)
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    root: str = ""
    has_manifest: bool = False

    # ------------------------------------------------------------------ the mapping

    def __getitem__(self, fqn: str) -> LazyTensor:
        if self.translation is not None and fqn in self.translation.decoded:
            return self.translation.decoded[fqn]
        try:
            group = self.groups[fqn]
        except KeyError:
            raise MissingKeyError(
                "CKM501", f"{self.path}: no tensor {fqn!r}", _nearest(str(fqn), self)
            ) from None
        return LazyTensor(fqn, group, self.files)

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def _ipython_key_completions_(self) -> list[str]:
        """Return the names that a notebook offers after `ckpt["`."""
        return list(self)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self.groups

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return shape and dtype of every weight by FQN, without reading any of them."""
        return self.groups.infos()

    def kinds(self, fqns: Iterable[str]) -> list[WeightKind]:
        """Return for each weight one object that all weights share that are known to be like it."""
        return self.groups.kinds(fqns)

    def group(self, fqn: str) -> Group:
        """Return the stored parts of a weight."""
        return self.groups[fqn]

    def dense(self) -> Mapping[str, StoredTensor]:
        """Return the weights that are one plain tensor each, as stored."""
        dense = self.groups.dense()
        if self.translation is None:
            return dense
        return {fqn: stored for fqn, stored in dense.items() if fqn not in self.translation.decoded}

    def sharing(self) -> list[tuple[str, ...]]:
        """Return the weights that share one storage in the file, one tuple of FQNs a storage."""
        return self.groups.sharing()

    @property
    def origins(self) -> Mapping[str, tuple[str, ...]]:
        """Weights that have another name in the file: FQN -> the keys there."""
        if self.translation is not None:
            return self.translation.origins
        return {fqn: (key,) for fqn, key in self.names.items() if key != fqn}

    def columns(self) -> PlainTensors | None:
        """Return the columns of all weights where all are plain tensors; else None.

        With 100,000 tensors one look at the columns replaces as many looks at tensors.
        """
        return self.groups.columns

    def with_groups(self, groups: Mapping[str, Group], files: Sequence[str]) -> Checkpoint:
        """Return the checkpoint with these weights in place of its own or after them; some of
        their parts lie in `files`, which are of another checkpoint."""
        more = [file for file in files if file not in self.index.files]
        index = replace(self.index, files=(*self.index.files, *more))
        return replace(self, groups=self.groups.with_groups(groups), index=index)

    def find(self, role: str, fqn: str) -> LazyTensor | None:
        """Return a tensor by the role and the name that a plan gives it; None: there is none."""
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
    def optimizer_values(self) -> dict[str, dict[str, object]]:
        """FQN -> state name -> what is no tensor: a step count of older torch, None."""
        return self.optimizer_reader.named().values

    @property
    def optimizer_nested_values(self) -> dict[str, dict[str, object]]:
        """FQN -> name of the entry -> what is no tensor; a dict or list is one value, as the optimizer had it."""
        return self.optimizer_reader.named().nested_values

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
        """Whether the state is keyed by index, and neither the file nor the user names the indices."""
        return self.optimizer_reader.by_index

    def with_optimizer_order(
        self, param_order: Order | None = None, like: str | os.PathLike[str] | None = None
    ) -> Checkpoint:
        """Return the checkpoint with its optimizer state named by this order of the parameters, one
        list of FQNs a group, or by the transformers class of the config.json in `like`.

        State that the file keys by name keeps its names. Raises SourceError CKM207 where
        `param_order` does not fit, ArgumentError CKM516 where it is no list of lists.
        """
        if param_order is not None:
            param_order = argument_checks.order("param_order", param_order)
        reader = self.optimizer_reader.with_order(
            param_order, None if like is None else os.fspath(like)
        )
        if param_order is not None:
            reader.named()
        return replace(self, optimizer_reader=reader)

    # ------------------------------------------------------------------ what else it says

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return self.index.world

    @property
    def sidecar_dir(self) -> str:
        """Where the config and the tokenizer of the weights are: `path`, or another directory that the format names."""
        return self.index.sidecar_dir or self.path

    @property
    def translated(self) -> Mapping[str, object] | None:
        """How its names were translated from another scheme's, as a manifest records it; None: they
        were not."""
        return None if self.translation is None else self.translation.record()

    @property
    def extra(self) -> dict[str, object]:
        return nest(self.plain)

    @property
    def encodings(self) -> tuple[str, ...]:
        """Names of the encodings of its weights, in order of first use."""
        return self.groups.encodings()

    @property
    def setup(self) -> str:
        """The nearest `--to` name: container and wrappers tell, encodings are appended."""
        setups = registry.setups_of(self.index.container)
        heads = {pattern.split(".")[0] for pattern in self.wrappers}
        with_wrappers = [s for s in setups if s.wrap and s.head in heads]
        fitting = with_wrappers or [s for s in setups if not s.wrap] or setups
        name = self.index.setup or (fitting[-1].name if fitting else self.index.container)
        encoded = (e.removeprefix(f"{name}-") for e in self.encodings if e != "dense")
        return "-".join([name, *encoded])

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

    def _repr_html_(self) -> str:
        """Return what a notebook shows of it."""
        return registry.card(self)

    def __repr__(self) -> str:
        return f"Checkpoint({short(self.shown)}, {counted(len(self), 'tensor')}, {self.setup})"


def _nearest(fqn: str, ckpt: Checkpoint) -> str:
    """Return a hint for an unknown name: the nearest known one, else how to list all of them."""
    import difflib

    near = difflib.get_close_matches(fqn, list(ckpt.groups), n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"list the keys with: ckptmap inspect {quote(ckpt.shown)}"
