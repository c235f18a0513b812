"""A checkpoint that holds a part of the weights, together with the base that has the others.

step-100: layers.0.lora_A.weight, over /models/llama: layers.0.weight  ->  one checkpoint of both
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptmap.checkpoint import base_record
from ckptmap.checkpoint.base_record import BaseRecord
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open_in
from ckptmap.checkpoint.rename import renamed
from ckptmap.core.formatting import some
from ckptmap.core.name_globs import matches, suggestion
from ckptmap.errors import ArgumentError, CkptmapError, LoadError
from ckptmap.live.model.base_names import as_loaded, droppable, without
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.rank_group import rank_and_world
from ckptmap.mapping.renaming import Renaming

if TYPE_CHECKING:
    import torch


def with_bases(
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    targets: Sequence[LiveTensor],
    given: str | os.PathLike[str] | None,
    dropped: Sequence[str],
    renaming: Renaming,
) -> Checkpoint:
    """Return the checkpoint, by the names that this load gives it, with the weights of its bases by these
    names, too; without weights of bases where it records none.

    given     the place of the base, where it is not at its recorded path any more
    dropped   patterns of this load, by the new names
    renaming  of this load: a prefix or pattern may match names of the checkpoint, or of a base

    Raises LoadError CKM521 where the base has another digest than the recorded one, or is not there, and
    CKM206 for a pattern of `dropped` that matches no name.
    """
    bases = base_record.recorded(checkpoint)
    if given is not None and len(bases) != 1:
        raise ArgumentError(
            "CKM516",
            f"base={os.fspath(given)!r}: the checkpoint records {len(bases)} bases, expected one",
            "leave base= out",
        )
    given_as, over = checkpoint, renamed(checkpoint, renaming, lenient=bool(bases))
    stored, checkpoint = list(checkpoint), without(over, dropped)
    names = list(droppable(over)) if dropped else []
    known = {name for target in targets for name in target.known}
    for head, record in bases.items():
        base = _opened(checkpoint, record, given)
        if renaming:
            stored += as_loaded(base, record.names, record.drop, head, model, [], given_as)
        base = as_loaded(base, record.names, record.drop, head, model, targets, over)
        names += base if dropped else ()
        base = without(base, dropped)
        own = {*checkpoint}
        wanted = [name for name in base if name in known and name not in own]
        groups = {name: base.group(name) for name in wanted}
        prints = {**checkpoint.fingerprints, **base.fingerprints}
        checkpoint = replace(checkpoint.with_groups(groups, base.index.files), fingerprints=prints)
    if bases:
        renaming.names(stored, checkpoint.shown)  # refuses what matches nothing at all
    _require_matches(dropped, names, checkpoint.shown)
    return checkpoint


def _require_matches(dropped: Sequence[str], names: Sequence[str], shown: str) -> None:
    """Raise LoadError CKM206 for a pattern that matches no name: it is misspelt, and what it should leave out
    would be loaded."""
    for pattern in dropped:
        if not any(matches(name, pattern) for name in names):
            meant = suggestion(pattern, names)
            raise LoadError(
                "CKM206",
                f"drop={pattern!r}: nothing in {shown} is named so",
                f"{meant} If not, leave it out"
                if meant
                else f"names here are such as {some(names)}; or leave it out",
            )


def _opened(
    checkpoint: Checkpoint, record: BaseRecord, given: str | os.PathLike[str] | None
) -> Checkpoint:
    """Return the base, read by the files of the checkpoint. The first rank compares its digest."""
    place = record.places(checkpoint.path)[0] if given is None else given
    try:
        base = open_in(checkpoint.files, place, root=record.root or None)
    except CkptmapError as error:
        raise LoadError(
            "CKM521",
            f"{checkpoint.path}: its base cannot be opened: {error.message}",
            "say where the base is: base=PATH",
        ) from error
    if rank_and_world()[0] == 0:
        digest = base_record.content_digest(base)
        if digest != record.digest:
            raise LoadError(
                "CKM521",
                f"{base.shown}: is not the base of {checkpoint.path}: expected {record.digest}, got"
                f" {digest}",
                "give the base that the run was begun with: base=PATH",
            )
    return base
