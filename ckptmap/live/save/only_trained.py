"""A save of a part of the weights: those that are trained, or that a pattern names, over a recorded base.

only="trainable"   parameters that require gradients, and buffers
only="*.lora_*"    parameters and buffers with such names

Saved with them are weights that no base has: those that an optimizer has stepped, and those that a save of a
part held before, though they are frozen now.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckptmap.checkpoint.base_record import BaseRecord, content_digest
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open as open_checkpoint
from ckptmap.errors import ArgumentError
from ckptmap.live.model import loaded_bases, name_scheme, several_models
from ckptmap.live.model.live_form import logical_info
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.load_report import listed
from ckptmap.live.model.loaded_bases import LoadedBase
from ckptmap.live.optimizer.gradients import is_trained
from ckptmap.live.optimizer.local_state import ParamOwner
from ckptmap.storage.source_changes import require_unchanged

if TYPE_CHECKING:
    import torch

TRAINABLE = "trainable"


def chosen(
    targets: Sequence[LiveTensor], only: Sequence[str], owners: Iterable[ParamOwner]
) -> tuple[list[LiveTensor], list[str]]:
    """Return the tensors to save, and the names of those among them that `only` does not name.

    owners  parameters of the optimizer

    Raises ArgumentError CKM516 where `only` names none."""
    found = [target for target in targets if _is_chosen(target, only)]
    if not found:
        raise ArgumentError(
            "CKM516",
            f"only={only[0]!r}: no tensor of the model's {len(targets)} is such a one",
            "give a pattern of names, or only='trainable' with parameters that require gradients",
        )
    stepped = {target.fqn for one in owners if one.part.state for target, _ in one.members}
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
    return [f"{len(names)} that require gradients are not saved, as only= asks: {listed(names)}"]


def _is_chosen(target: LiveTensor, only: Sequence[str]) -> bool:
    if TRAINABLE in only and (target.is_buffer or is_trained(target)):
        return True
    return any(fnmatchcase(name, pattern) for name in target.names for pattern in only)


def bases_of(
    left: Sequence[LiveTensor],
    model: torch.nn.Module,
    given: str | os.PathLike[str] | None,
    digests: bool,
) -> dict[str, dict[str, object]]:
    """Return the records of the bases of the tensors that are left out, by the name of their model.

    model    that they are of, or the one module of several
    given    the base of all of them, in place of what `load` has loaded
    digests  whether to take digests, which one rank does

    Raises ArgumentError CKM516 where a base is not known, or has not the weights."""
    names = several_models.names_of(model)
    found: dict[str, LoadedBase] = {}
    unknown: list[str] = []
    if given is not None:
        with open_checkpoint(given) as ckpt:
            _require_all(ckpt, left, model)
            found[""] = LoadedBase(ckpt.shown, ckpt.fingerprints, several=True)
    for target in left if given is None else ():
        base = loaded_bases.known(target)
        head = target.fqn.split(".")[0] if names and base is not None and not base.several else ""
        if base is None or found.setdefault(head, base) != base:
            unknown.append(target.fqn)
    if unknown:
        raise ArgumentError(
            "CKM516",
            f"only: no one checkpoint is known that {len(unknown)} of the other weights were loaded"
            f" from: {listed(unknown)}",
            "load them by ckptmap.load, all from one checkpoint, or name it: base=PATH",
        )
    return {head: _record(base, digests) for head, base in found.items()}


def _require_all(base: Checkpoint, left: Sequence[LiveTensor], model: torch.nn.Module) -> None:
    """Raise ArgumentError CKM516 for weights that a base has not, by the names that `load` will look for."""
    named = name_scheme.by_model_names(base, model, left).checkpoint
    lacking = [target.fqn for target in left if not _has(named, target)]
    if lacking:
        raise ArgumentError(
            "CKM516",
            f"base={base.shown!r}: has not {len(lacking)} of the {len(left)} weights that are left out:"
            f" {listed(lacking)}",
            "give the base that has them by the model's names; one with other names is loaded by"
            " ckptmap.load, and saved without base=",
        )


def _has(base: Checkpoint, target: LiveTensor) -> bool:
    found = target.named_in(base)
    shape = (logical_info(target) or target.tensor).shape
    return bool(found) and tuple(base[found[0]].shape) == tuple(shape)


def _record(base: LoadedBase, digests: bool) -> dict[str, object]:
    digest = ""
    if digests:
        with open_checkpoint(base.path) as ckpt:
            require_unchanged(
                base.fingerprints, ckpt.files.mounts, "load the base again, then save"
            )
            digest = content_digest(ckpt)
    return BaseRecord(base.path, digest, base.names, base.drop).to_plain()
