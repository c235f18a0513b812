"""A checkpoint under the names of another scheme: the same interface, other tensors.

    Checkpoint (meta names) --choose, resolve--> Translated (hf names)

Nothing is read. A tensor that is only renamed is the same group under another name; one that is
rearranged is a stored tensor woven of its sources' regions; one that must be decoded first (values
change, or a quantized tensor is rearranged across its blocks) is read through its sources.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.compare import same_parts
from ckptmap.checkpoint.groups import DENSE, Groups
from ckptmap.core.gc_pause import paused_gc
from ckptmap.errors import PlanError
from ckptmap.mapping.chain import translate
from ckptmap.mapping.config import config_beside
from ckptmap.mapping.detect import Choice, choose
from ckptmap.mapping.dims import Dims
from ckptmap.mapping.files import loads
from ckptmap.mapping.pulled import Pulled
from ckptmap.mapping.resolve import Made, Resolution
from ckptmap.mapping.rules import Scheme
from ckptmap.mapping.view import held
from ckptmap.optim.renaming import moved
from ckptmap.protocols import Group
from ckptmap.quantization.unsupported_schemes import RESTORE, naked_payloads
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import StoredTensor


@dataclass(frozen=True)
class Names:
    """How a checkpoint was translated: enough to do it again, from the manifest."""

    choice: Choice
    config: Mapping[str, Any] | None
    used: Mapping[str, Any]
    left: Mapping[str, str]
    """Keys of the source that stay behind, with the reason."""

    def record(self) -> dict[str, Any]:
        """JSON, with the mapping files themselves: they may be gone when it is read."""
        return {
            "from": _file(self.choice.source),
            "to": _file(self.choice.target),
            "left": dict(self.left),
            "config": None
            if self.config is None
            else {name: _plain(value) for name, value in self.used.items()},
        }


def _file(scheme: Scheme | None) -> dict[str, str] | None:
    return None if scheme is None else {"title": scheme.title, "text": scheme.text}


def _plain(value: Any) -> Any:
    """A fraction as the number that JSON has."""
    if hasattr(value, "denominator") and not isinstance(value, bool | int):
        return int(value) if value.denominator == 1 else float(value)
    return value


class Translated(Checkpoint):
    """`base` under other names. `dropped` and `unmapped` are what a plan must account for."""

    def __init__(self, base: Checkpoint, resolution: Resolution, names: Names) -> None:
        self.__dict__.update(base.__dict__)
        self.base = base
        self.translation = names
        self.dropped = {**names.left, **resolution.dropped}
        self.unmapped = tuple(resolution.unmapped)
        self.ties = dict(resolution.tied)
        self.translated = names.record()
        self._pulled: dict[str, Pulled] = {}
        groups: dict[str, Group | StoredTensor] = {}
        for name, made in resolution.made.items():
            groups[name] = self._held(made)
        self._groups = Groups(groups)
        self.names = {name: name for name in groups}
        keys = {n: [base.names[key] for key in m.sources] for n, m in resolution.made.items()}
        self._origins = {name: tuple(found) for name, found in keys.items() if found != [name]}
        self.notes = [*base.notes, f"names: {names.choice.text}", *_remarks(self._pulled)]
        reader = base.optimizer_reader
        if reader.present and reader.form is not None and not reader.by_index:
            infos = base.infos()
            self._left_state(resolution)
            self.optimizer_reader = reader.named_as(
                lambda found: moved(found, resolution, infos, DENSE)
            )
            values = (leaf.value for leaf in self.optimizer_reader.named().leaves)
            decoded = {lazy.fqn: lazy for lazy in values if isinstance(lazy, Pulled)}
            self.notes += [f"optimizer: {note}" for note in _remarks(decoded)]

    def _left_state(self, resolution: Resolution) -> None:
        """State of weights that have no place in the other scheme goes with them."""
        keys = self.base.optimizer_reader.named().keys
        used = {key for made in resolution.made.values() for key in made.sources}
        for key in keys:
            if key in self.base and key not in used:
                self.dropped[f"optimizer.{key}"] = "with its weight"

    def _held(self, made: Made) -> Group | StoredTensor:
        if made.source is not None and not made.ops:
            same = self.base._groups.held(made.source)
            return same._replace(fqn=made.name) if isinstance(same, Group) else same
        found = held(made, {key: self.base[key] for key in made.sources}, DENSE)
        if isinstance(found, Pulled):
            self._pulled[made.name] = found
            return found.group
        return found

    @property
    def origins(self) -> dict[str, tuple[str, ...]]:
        return self._origins

    @property
    def in_hub_names(self) -> bool:
        target = self.translation.choice.target
        return target is None or target.is_hub

    def unknown(self, key: str) -> tuple[str, str]:
        """Why a key has no name here, and what to do about it."""
        choice = self.translation.choice
        scheme = choice.source or choice.target
        where = scheme.title if scheme is not None else "the scheme"
        return (
            f"no rule of {choice.text} knows it",
            f"leave it behind with --drop '{key}', or add a rule to your own copy of {where}",
        )

    def dense(self) -> Mapping[str, StoredTensor]:
        return {fqn: held for fqn, held in super().dense().items() if fqn not in self._pulled}

    def __getitem__(self, fqn: str) -> LazyTensor:
        pulled = self._pulled.get(fqn)
        return pulled if pulled is not None else super().__getitem__(fqn)


def _remarks(pulled: Mapping[str, Pulled]) -> Iterator[str]:
    """One note for tensors that are decoded for the same reason."""
    by_reason: dict[str, list[str]] = {}
    for name, lazy in pulled.items():
        by_reason.setdefault(lazy.why, []).append(name)
    for why, found in by_reason.items():
        yield f"{found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''}: {why}"


def translated(
    ckpt: Checkpoint,
    names: str,
    names_from: str | None = None,
    config_from: str | None = None,
    leave: Callable[[str], str | None] = lambda key: None,
    config: Mapping[str, Any] | None = None,
) -> Translated:
    """The checkpoint under the names that are asked for; `leave` says why a key stays behind, if it
    does; `config` is taken where none lies beside it. Raises PlanError CKM601 to CKM617."""
    config = config_beside(ckpt.index.sidecar_dir or ckpt.path, config_from) or config
    with paused_gc():
        left = {key: why for key in ckpt if (why := leave(key)) is not None}
        infos = {key: info for key, info in ckpt.infos().items() if key not in left}
        choice = choose(infos, names, names_from, config)
        return _applied(ckpt, choice, config, left)


def translated_as(ckpt: Checkpoint, record: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint as it was translated once, by the record of a manifest."""
    source, target = (
        None if record[side] is None else loads(record[side]["text"], record[side]["title"])
        for side in ("from", "to")
    )
    return _applied(ckpt, Choice(source, target), record["config"], record["left"])


def named_alike(ckpt: Checkpoint, record: Mapping[str, Any], weights: Iterable[str]) -> Checkpoint:
    """`ckpt` as an output was translated; or as it is, if it has the output's `weights` by name
    already: a model that went to another scheme and back is held against the original."""
    try:
        return translated_as(ckpt, record)
    except PlanError:
        if not all(name in ckpt for name in weights):
            raise
        return ckpt


def tied_away(
    ckpt: Checkpoint, record: Mapping[str, Any] | None, known: Collection[str]
) -> set[str]:
    """Keys of `ckpt` beside `known` ones that the schemes of a translation tie to one of these, and
    that have its bytes: a head that is stored too, held against an output that leaves it out."""
    found = set()
    for side in ("from", "to") if record is not None else ():
        if record is None or record[side] is None:
            continue
        scheme = loads(record[side]["text"], record[side]["title"])
        dims = Dims(scheme.dims, record["config"])
        for tie in scheme.ties:
            name, kept = tie.name.text, tie.kept.text
            if name in known or name not in ckpt or kept not in known or kept not in ckpt:
                continue
            if dims.holds(tie.when) and same_parts(ckpt[kept], ckpt[name]) is None:
                found.add(name)
    return found


def _applied(
    ckpt: Checkpoint,
    choice: Choice,
    config: Mapping[str, Any] | None,
    left: Mapping[str, str],
) -> Translated:
    infos = {key: info for key, info in ckpt.infos().items() if key not in left}
    try:
        resolution = translate(infos, choice.source, choice.target, config, left=left)
    except PlanError as error:
        if error.code == "CKM606" and naked_payloads(infos):  # its shape is that of packed codes
            error.hint = RESTORE + error.hint
        raise
    if not resolution.made and infos:
        raise PlanError(
            "CKM609",
            f"{ckpt.path}: {choice.text}: no key is known, the first is {next(iter(infos))}",
            "see `ckptmap mappings list`; say which scheme it is in with --names-from",
        )
    return Translated(ckpt, resolution, Names(choice, config, resolution.used, left))
