"""A save of a part of the weights: those that are trained, or that a pattern names, over a recorded base.

only="trainable"   parameters that require gradients, and buffers
only="*.lora_*"    parameters and buffers with such names

Saved with them are weights that no base has: those that an optimizer has stepped, those that a save of a
part held before, though they are frozen now, and those whose values are not the base's, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from ckptmap.checkpoint.base_record import BaseRecord, content_digest, path_beside
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open as open_checkpoint
from ckptmap.core.formatting import counted, some
from ckptmap.core.name_globs import matches, matches_any, suggestion
from ckptmap.errors import ArgumentError
from ckptmap.live.model import loaded_bases, name_scheme, several_models
from ckptmap.live.model.live_form import logical_info
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.loaded_bases import LoadedBase
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.optimizer.gradients import is_trained
from ckptmap.live.optimizer.local_state import ParamOwner, owners
from ckptmap.live.optimizer.unwrap import unwrapped
from ckptmap.live.options import SaveOptions
from ckptmap.live.save import same_as_base
from ckptmap.storage.source_changes import require_unchanged

if TYPE_CHECKING:
    import torch

TRAINABLE = "trainable"
LOAD_AGAIN = "load the base again, then save"


def chosen(
    targets: Sequence[LiveTensor], only: Sequence[str], stepped_by: Iterable[ParamOwner]
) -> tuple[list[LiveTensor], list[str]]:
    """Return the tensors to save, and the names of those among them that `only` does not name.

    stepped_by  parameters of the optimizer"""
    found = [target for target in targets if _is_chosen(target, only)]
    stepped = {target.fqn for one in stepped_by if one.part.state for target, _ in one.members}
    further = [
        target
        for target in targets
        if target not in found and (target.fqn in stepped or loaded_bases.is_of_part(target))
    ]
    kept = [target for target in targets if target in found or target in further]
    return kept, [target.fqn for target in further]


def refuse_to_replace(bases: object, path: str | os.PathLike[str]) -> None:
    """Raise ArgumentError CKM516 where the save would take the place of a base that it needs."""
    place = os.path.realpath(path)
    for record in bases.values() if isinstance(bases, Mapping) else ():
        base = os.path.realpath(record["path"])
        if base == place or base.startswith(f"{place}{os.sep}"):
            raise ArgumentError(
                "CKM516",
                f"only: {os.fspath(path)} is the base of the weights that are left out, and this save"
                " would replace it",
                "save to another path, or without only=",
            )


def note_of_trained(left: Sequence[LiveTensor]) -> list[str]:
    """Return a note of weights that require gradients, and that `load` takes from the base nevertheless."""
    names = [target.fqn for target in left if not target.is_buffer and is_trained(target)]
    if not names:
        return []
    return [f"{len(names)} that require gradients are not saved, as only= asks: {some(names)}"]


def _is_chosen(target: LiveTensor, only: Sequence[str]) -> bool:
    if TRAINABLE in only and (target.is_buffer or is_trained(target)):
        return True
    return any(matches_any(name, only) for name in target.names)


def bases_of(
    left: Sequence[LiveTensor], model: torch.nn.Module, given: str | os.PathLike[str] | None
) -> dict[str, LoadedBase]:
    """Return the bases of the tensors that are left out, by the name of their model.

    model  that they are of, or the one module of several
    given  the base of all of them, in place of what `load` has loaded

    Raises ArgumentError CKM516 where a base is not known, or has not the weights."""
    found: dict[str, LoadedBase] = {}
    unknown: list[str] = []
    if given is not None and left:
        with open_checkpoint(given) as ckpt:
            _require_all(ckpt, left, model)
            found[""] = LoadedBase(ckpt.shown, ckpt.fingerprints, several=True)
    for target in left if given is None else ():
        base = loaded_bases.known(target)
        head = _head(target, model, base)
        if base is None or found.setdefault(head, base) != base:
            unknown.append(target.fqn)
    if unknown:
        raise ArgumentError(
            "CKM516",
            f"only: no one checkpoint is known that {len(unknown)} of the other weights were loaded"
            f" from: {some(unknown)}",
            "load them by ckptmap.load, all from one checkpoint, or name it: base=PATH",
        )
    return found


def _head(target: LiveTensor, model: torch.nn.Module, base: LoadedBase | None) -> str:
    """Return the name of the model among several that a base is of; empty: of all."""
    is_of_one = bool(several_models.names_of(model)) and base is not None and not base.several
    return target.fqn.split(".")[0] if is_of_one else ""


def changed(
    left: Sequence[LiveTensor], bases: Mapping[str, LoadedBase], model: torch.nn.Module
) -> list[str]:
    """Return the names of the tensors whose values on this rank are not those of their base.

    Raises RunError CKM308 for a base that was written anew since it was read."""
    found: list[LiveTensor] = []
    for head, base in bases.items():
        mine = [t for t in left if not head or t.fqn.split(".")[0] == head]
        with open_checkpoint(base.path, root=base.root or None) as ckpt:
            require_unchanged(base.fingerprints, ckpt.files.mounts, LOAD_AGAIN)
            found += same_as_base.changed(mine, base, ckpt, model, head)
    return [target.fqn for target in found]


@dataclass(frozen=True)
class SavedPart:
    """A choice of tensors to save, and the bases of the others.

    path     of the checkpoint to be
    further  names of those that `only` does not name, and that no base has
    changed  names of those that this rank does not find in their base
    digests  names of the models of whose bases this rank takes digests, the lowest that needs one at its place
    """

    path: str | os.PathLike[str]
    kept: Sequence[LiveTensor]
    left: Sequence[LiveTensor]
    bases: Mapping[str, LoadedBase]
    further: Sequence[str]
    changed: Sequence[str]
    digests: Collection[str] = ()

    @classmethod
    def of(
        cls, path: str | os.PathLike[str], targets: Sequence[LiveTensor], model: torch.nn.Module,
        optimizer: object, only: Sequence[str], base: str | os.PathLike[str] | None,
    ) -> SavedPart:  # fmt: skip
        """Return the choice of this rank. Raises ArgumentError CKM516, and as `changed` does."""
        stepped = [] if optimizer is None else owners(unwrapped(optimizer), targets)
        kept, further = chosen(targets, only, stepped)
        names = {target.fqn for target in kept}
        left = [target for target in targets if target.fqn not in names]
        bases = bases_of(left, model, base)
        return cls(path, kept, left, bases, further, changed(left, bases, model))

    def with_changed(self, names: Collection[str]) -> SavedPart:
        """Return the choice with those saved, too, that any rank does not find in their base."""
        kept = [*self.kept, *(target for target in self.left if target.fqn in names)]
        left = [target for target in self.left if target.fqn not in names]
        return replace(self, kept=kept, left=left, changed=sorted(names))

    def _needed(self, model: torch.nn.Module) -> dict[str, LoadedBase]:
        """Return the bases that are needed."""
        heads = {_head(t, model, loaded_bases.known(t)) for t in self.left}
        found = self.bases if self.left else {}
        return {head: base for head, base in found.items() if not head or head in heads}

    def places(self, model: torch.nn.Module) -> dict[str, str]:
        """Return where the bases are that are needed."""
        return {head: base.path for head, base in self._needed(model).items()}

    def records(self, model: torch.nn.Module) -> dict[str, dict[str, object]]:
        """Return the records of the bases that are needed; without a digest, where another rank takes it."""
        needed = self._needed(model).items()
        return {head: _record(base, self.path, head in self.digests) for head, base in needed}

    def notes(self) -> list[str]:
        """Return what is said of tensors that are saved although `only` does not name them, or not."""
        found = []
        for why, names in (
            ("since they were trained and only= does not name them", self.further),
            ("since their values are not those of the base", self.changed),
        ):
            if names:
                text = f"{counted(len(names), 'weight')}: {some(list(names))}"
                found.append(f"saved, too, {why}: {text}")
        return [*found, *note_of_trained(self.left)]


def everything(path: str | os.PathLike[str], targets: Sequence[LiveTensor]) -> SavedPart:
    """Return the choice of all tensors."""
    return SavedPart(path, targets, [], {}, [], [])


def part_of_all(
    path: str | os.PathLike[str], targets: Sequence[LiveTensor], model: torch.nn.Module,
    optimizer: object, options: SaveOptions, peers: RankGroup,
    only_of: Sequence[Sequence[str]], unmatched_of: Sequence[Mapping[str, str]],
) -> SavedPart:  # fmt: skip
    """Return the part of this rank, with all weights that any rank does not find in their base.

    only_of, unmatched_of  the patterns of every rank, and what `unmatched` has told of them

    Raises on all ranks ArgumentError CKM516 where they give different `only`, and where a pattern of it matches
    no name on any of them, and as `SavedPart.of` does."""
    only = options.patterns
    for rank, theirs in enumerate(only_of):
        if [*theirs] != [*only_of[0]]:
            raise ArgumentError(
                "CKM516",
                f"only: is {[*only_of[0]]} on rank 0 and {[*theirs]} on rank {rank}, expected the same on"
                " all ranks",
                "pass the same only= on every rank",
            )
    _require_matches(only, unmatched_of, len(targets))
    parts: list[SavedPart] = []

    def found_here() -> tuple[list[str], dict[str, str]]:
        parts.append(SavedPart.of(path, targets, model, optimizer, only, options.base))
        return [*parts[0].changed], parts[0].places(model)

    found = peers.told(found_here)
    changed_anywhere = {name for names, _ in found for name in names}
    part = parts[0].with_changed(changed_anywhere)
    places_of = [places for _, places in found]
    if changed_anywhere:  # then some rank may need no base
        places_of = peers.told(lambda: part.places(model))
    first: dict[tuple[str, str], int] = {}
    for rank, places in enumerate(places_of):
        for place in places.items():
            first.setdefault(place, rank)
    return replace(part, digests=[head for (head, _), at in first.items() if at == peers.rank])


def unmatched(targets: Sequence[LiveTensor], only: Sequence[str]) -> dict[str, str]:
    """Return the patterns that match no tensor on this rank, each with what may be meant."""
    names = [name for target in targets for name in target.names]
    found = {
        pattern: suggestion(pattern, names)
        for pattern in only
        if pattern != TRAINABLE and not any(matches(name, pattern) for name in names)
    }
    if [*only] == [TRAINABLE] and not any(_is_chosen(target, only) for target in targets):
        found[TRAINABLE] = "give a pattern of names, or let parameters require gradients"
    return found


def _require_matches(
    only: Sequence[str], unmatched_of: Sequence[Mapping[str, str]], count: int
) -> None:
    """Raise ArgumentError CKM516 for a pattern that matches no tensor on any rank: of a pipeline, each rank has
    other names."""
    for pattern in only:
        if all(pattern in one for one in unmatched_of):
            meant = (one[pattern] for one in unmatched_of)
            raise ArgumentError(
                "CKM516",
                f"only={pattern!r}: no tensor of the model's {count} is such a one",
                next(filter(None, meant), "give a pattern of names, or only='trainable'"),
            )


def _require_all(base: Checkpoint, left: Sequence[LiveTensor], model: torch.nn.Module) -> None:
    """Raise ArgumentError CKM516 for weights that a base has not, by the names that `load` will look for."""
    named = name_scheme.by_model_names(base, model, left).checkpoint
    lacking = [target.fqn for target in left if not _has(named, target)]
    if lacking:
        raise ArgumentError(
            "CKM516",
            f"base={base.shown!r}: has not {len(lacking)} of the {len(left)} weights that are left out:"
            f" {some(lacking)}",
            "give the base that has them by the model's names; one with other names is loaded by"
            " ckptmap.load, and saved without base=",
        )


def _has(base: Checkpoint, target: LiveTensor) -> bool:
    found = target.named_in(base)
    shape = (logical_info(target) or target.tensor).shape
    return bool(found) and tuple(base[found[0]].shape) == tuple(shape)


def _record(base: LoadedBase, path: str | os.PathLike[str], digests: bool) -> dict[str, object]:
    digest = ""
    if digests:
        with open_checkpoint(base.path, root=base.root or None) as ckpt:
            require_unchanged(base.fingerprints, ckpt.files.mounts, LOAD_AGAIN)
            digest = content_digest(ckpt)
    place = base.path if "://" in base.path else str(FilePath(base.path).absolute())
    beside = path_beside(base.path, path)
    return BaseRecord(place, digest, base.names, base.drop, beside, base.root).to_plain()
