"""Read the optimizer state of one checkpoint as the file keys it, then key it by plain FQN.

The names behind indices are looked up when first asked for. A transformers class, which needs torch,
is built only when the state itself is asked for: `inspect` runs without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path as FilePath
from typing import TypeAlias

from ckptmap.core.printable import quote
from ckptmap.errors import SourceError
from ckptmap.mapping.wrappers import ANYWHERE, HEAD
from ckptmap.optim import index_order as orders
from ckptmap.optim.index_order import Order, Weight
from ckptmap.optim.merge_rank_groups import contradiction, merge_rank_groups
from ckptmap.optim.several_states import count_of, joined
from ckptmap.optim.state import (
    GROUPS,
    PARAMS,
    STATE,
    KeyForm,
    MakeValue,
    Optimizer,
    collect,
    expanded,
    plain_names,
)
from ckptmap.protocols.file_systems import Mounts
from ckptmap.tensors import Leaf, Path, StateNote, TensorInfo

Rename: TypeAlias = Callable[[Collection[str]], Mapping[str, str]]
"""Returns the new name of every key, by key."""

AS_GIVEN = "as given"
BY_GROUPS = "param_names in the groups"
"""The sources of an order that state names; all others infer them."""


@dataclass(frozen=True)
class Model:
    """The weights that the state belongs to.

    weights  in stored order
    stored   key as stored -> plain FQN
    ordered  returns whether the stored order is that of the dict that was saved
    """

    weights: Sequence[Weight]
    stored: Mapping[str, str]
    ordered: Callable[[], bool]


class OptimizerReader:
    """Reads the optimizer state of a checkpoint, and names it when asked.

    form  the name of the key form; None: no form fits
    raw   the state in the keys of the file
    why   why the state cannot be read or named; "": it can
    count how many optimizers' states a list has that no form fits, as Lightning saves it; 0: it is none
    """

    def __init__(
        self,
        leaves: Mapping[Path, Leaf],
        forms: Sequence[KeyForm],
        make: MakeValue,
        model: Model,
        where: str,
        mounts: Mounts,
        config_dir: str | None = None,
    ) -> None:
        merged = expanded(merge_rank_groups(leaves))
        note = next((leaf for leaf in merged.values() if isinstance(leaf, StateNote)), StateNote())
        merged = {path: leaf for path, leaf in merged.items() if leaf is not note}
        self.form: str | None = None
        self.raw = Optimizer()
        keys, conflict = None, contradiction(merged)
        for form in forms if merged and not conflict else ():
            keys = form.read(merged)
            if keys is not None:
                self.form = form.name
                break
        if keys is not None:
            self.raw = collect(merged, keys, make)
        elif merged:
            self.raw = Optimizer(rest={path: make(path, leaf) for path, leaf in merged.items()})
        self._by_index = keys is not None and keys.by_index
        self._pickled = any(_is_pickled(path, leaf) for path, leaf in leaves.items())
        self._model = model
        self._where = where
        self._mounts = mounts
        self._config_dir = config_dir or where
        self._given_order: Order | None = None
        self._config_like: str | None = None
        self._named: Optimizer | None = None
        self._tried = False
        self._order = ""
        self._rename: Rename | None = None
        self._old_names: Mapping[str, str] = {}
        self._note = note
        self.count = count_of(merged) if self.form is None else 0
        several = f"it is the state of {self.count} optimizers, and ckptmap carries one"
        self.why = note.refused or conflict or (several if self.count > 1 else "")
        self._as_one = partial(
            OptimizerReader, joined(merged) if self.count else {}, forms, make, model, where, mounts, config_dir
        )  # fmt: skip

    @property
    def present(self) -> bool:
        return bool(self.raw.leaves or self.raw.groups or self.raw.rest or self.why)

    def as_one(self) -> OptimizerReader:
        """Return a reader of a list of states as one, with the groups of all; no name is looked up yet."""
        return self._as_one()

    def with_order(self, order: Order | None, config_like: str | None) -> OptimizerReader:
        """Return a reader that names state by this order of the parameters, or by the config.json
        in `config_like`; what is None stays as it was."""
        if order is None and config_like is None:
            return self
        reader = self._unnamed()
        if order is not None:
            reader._given_order = self._by_old_names(order)
        reader._config_like = self._config_like if config_like is None else config_like
        return reader

    def _unnamed(self) -> OptimizerReader:
        """Return a copy that has looked for no names yet."""
        reader = copy(self)
        reader._named, reader._tried, reader._order = None, False, ""
        reader.__dict__.pop("_order_in_file", None)
        return reader

    # ------------------------------------------------------------------ by name

    @property
    def by_index(self) -> bool:
        """Whether the state is keyed by index, and nothing in the checkpoint names the indices."""
        if not self._by_index or self._named is not None:
            return False
        return self._tried or isinstance(self._order_in_file, str)

    @property
    def config(self) -> FilePath | None:
        """The config.json whose transformers class may name the indices; None: there is none."""
        from ckptmap.sharding.transformers_param_order import find_config

        return find_config(self._config_dir, self._config_like)

    @property
    def order(self) -> str:
        """The source of the names behind indices; "": there are no indices, or no source of names."""
        self.named()
        return self._order or self._note.order

    def named(self) -> Optimizer:
        """Return the state by plain FQN; it is empty where no order is known."""
        if not self._tried:
            if self._by_index:
                self._named = self._named_by_order()
            else:
                self._named = self.raw.named(self._plain_names(self.raw.keys))
            if self._named is not None and self._rename is not None:
                self._named = self._named.named(self._rename(self._named.keys))
            self._tried = True
        return self._named if self._named is not None else Optimizer()

    def named_as(self, change: Callable[[Optimizer], Optimizer]) -> OptimizerReader:
        """Return a reader whose named state is changed: other names, moments that follow them."""
        reader = copy(self)
        reader._named, reader._tried = change(self.named()), True
        return reader

    def below(self, prefix: str, infos: Mapping[str, TensorInfo]) -> OptimizerReader:
        """Return a reader of the state of one of several models: of the parameters below `prefix`, by
        their names there. `infos` are the model's weights by these names."""
        head = f"{prefix}."
        state = self.named() if self._by_index else self.raw
        state = state.without(lambda key: not key.startswith(head))
        reader = self._unnamed()
        reader.raw = state.named({key: key.removeprefix(head) for key in state.keys})
        reader._by_index = False
        reader._take_names(infos)
        return reader

    def renamed(self, rename: Rename, weights: Mapping[str, str]) -> OptimizerReader:
        """Return a reader whose parameters have other names, which `rename` returns by plain FQN.

        `weights` has those of the weights: an order of parameters may name them as they are, or as
        they will be. No name is looked up yet.
        """
        reader = self._unnamed()
        before, earlier = self._rename, self._old_names
        if before is None:
            reader._rename = rename
        else:
            reader._rename = lambda keys: _in_turn(keys, before, rename)
        reader._old_names = {new: earlier.get(old, old) for old, new in weights.items()}
        return reader

    def of_weights(self, infos: Mapping[str, TensorInfo]) -> OptimizerReader:
        """Return a reader of state that belongs to weights of these names.

        It changes nothing unless the state is keyed by index: then an order of parameters will
        name them.
        """
        if not self.by_index:
            return self
        reader = self._unnamed()
        reader._take_names(infos)
        return reader

    def _take_names(self, infos: Mapping[str, TensorInfo]) -> None:
        """Belong to weights of these names, of which none is another's new name."""
        self._rename, self._old_names = None, {}
        weights = [Weight(name, info) for name, info in infos.items()]
        self._model = Model(weights, {name: name for name in infos}, lambda: False)
        self.__dict__.pop("_infos", None)

    def _named_by_order(self) -> Optimizer | None:
        guess = self._order_in_file
        if isinstance(guess, str):
            self.why = guess
            guess = self._by_class() or guess
        if isinstance(guess, str):
            return None
        self._order, order = guess
        return self.raw.named(self._names_by_index(order))

    @cached_property
    def _order_in_file(self) -> tuple[str, Order] | str:
        """(source, order) from what the user gave or the checkpoint holds; else why there is none."""
        if self._given_order is not None:
            orders.check_given(self.raw, self._given_order, self._where)
            self._check(self._given_order, must_exist=True)
            return AS_GIVEN, self._given_order
        named = orders.from_groups(self.raw)
        if named is not None:
            self._check(named, must_exist=False)
            return BY_GROUPS, named
        if not (self._pickled and self._model.ordered()):
            return "nothing in the checkpoint tells which parameter an index means"
        order = orders.from_model(self.raw, self._model.weights)
        return order if isinstance(order, str) else (orders.MODEL_ORDER, order)

    def _by_class(self) -> tuple[str, Order] | None:
        from ckptmap.sharding.transformers_param_order import from_config

        config = self.config
        if config is None:
            return None
        counts = [len(group[PARAMS]) for group in self.raw.groups]
        order: Order | None = from_config(config, self._mounts, counts, self._infos)
        if order is None and self._old_names:
            known = self._infos
            infos = {new: known[old] for new, old in self._old_names.items() if old in known}
            order = from_config(config, self._mounts, counts, infos)
            order = None if order is None else self._by_old_names(order)
        if order is None:
            return None
        try:
            self._check(order, must_exist=True)
        except SourceError:
            return None
        groups = "" if len(counts) == 1 else ", in Trainer's decay and no-decay groups"
        return f"the transformers class of {FilePath(config).name}{groups}", order

    def _by_old_names(self, order: Order) -> Order:
        """Return an order by the names that the weights had before they were renamed."""
        return [[self._old_names.get(name, name) for name in group] for group in order]

    @cached_property
    def _infos(self) -> dict[str, TensorInfo]:
        return {weight.fqn: weight.info for weight in self._model.weights}

    def _check(self, order: Order, must_exist: bool) -> None:
        """Raise SourceError CKM207 where shapes refute the order, or a name is no weight's."""
        names = self._names_by_index(order)
        strange = next((name for name in names.values() if name not in self._infos), None)
        if must_exist and strange is not None:
            raise SourceError(
                "CKM207",
                f"{self._where}: the parameter order names {strange!r}, which is not one of its weights",
                f"list the names with: ckptmap inspect {quote(self._where)}",
            )
        orders.check_fits(self.raw, names, self._infos, self._where)

    def _names_by_index(self, order: Order) -> dict[str, str]:
        """Return index -> plain FQN."""
        keys = [key for group in self.raw.groups for key in group[PARAMS]]
        names = [name for group in order for name in group]
        plain = self._plain_names(names)
        by_key = {key: plain[name] for key, name in zip(keys, names, strict=True)}
        lost = next((key for key in self.raw.keys if key not in by_key), None)
        if lost is not None:
            raise SourceError(
                "CKM207",
                f"{self._where}: optimizer state of index {lost} belongs to no group",
                "leave the optimizer behind with --optimizer drop",
            )
        if len(plain) != len(keys):
            raise SourceError(
                "CKM207",
                f"{self._where}: the parameter order names a parameter twice",
                "list every parameter once, or leave the optimizer behind with --optimizer drop",
            )
        return by_key

    def _plain_names(self, keys: Sequence[str]) -> dict[str, str]:
        return plain_names(keys, self._model.stored, _stripped, self._where)


def _is_pickled(path: Path, leaf: Leaf) -> bool:
    """Return whether the leaf has an integer key, or is a list of groups: pickles keep both."""
    if path == (GROUPS,):
        return bool(leaf)
    return len(path) > 1 and path[0] == STATE and isinstance(path[1], int)


def _stripped(key: str) -> Iterator[str]:
    """Yield the key without wrapper segments, then with one leading `module` less each time."""
    path = [segment for segment in key.split(".") if segment not in ANYWHERE]
    yield ".".join(path)
    while len(path) > 1 and path[0] == HEAD:
        path = path[1:]
        yield ".".join(path)


def _in_turn(keys: Collection[str], first: Rename, second: Rename) -> dict[str, str]:
    """Return key -> the name after both renamings."""
    once = first(keys)
    twice = second(list(once.values()))
    return {key: twice[name] for key, name in once.items()}
