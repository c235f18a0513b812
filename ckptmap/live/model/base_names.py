"""The weights of a base by the names that a load of a save of a part looks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.rename import renamed
from ckptmap.core.name_globs import matches_any
from ckptmap.live.model import name_scheme
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.mapping.renaming import Renaming

if TYPE_CHECKING:
    import torch


def as_loaded(
    base: Checkpoint,
    names: Sequence[Renaming],
    drop: Sequence[str],
    head: str,
    model: torch.nn.Module,
    targets: Sequence[LiveTensor],
    over: Checkpoint | None = None,
) -> Checkpoint:
    """Return the base by the model's names.

    names, drop  as it was renamed, and what was left out of it, when the run was begun with it
    head         the name of its model among several, which names begin with; empty: of all
    over         the checkpoint over it, as it is opened now: by a root, and by other names"""
    opened = base.renamings  # by the root
    for one in names[len(opened) :] if tuple(names[: len(opened)]) == opened else names:
        base = renamed(base, one, lenient=True)
    base = without(base, drop)
    if head:
        base = renamed(base, Renaming(add_prefix=head))
    if over is not None:
        if over.renamings[:1] == (Renaming(strip_prefix=over.root),):  # one of several models
            others = {name for name in base if not name.startswith(f"{over.root}.")}
            base = replace(base, groups=base.groups.without(others))
        for one in over.renamings:
            base = renamed(base, one, lenient=True)
    return name_scheme.by_model_names(base, model, targets).checkpoint


def without(checkpoint: Checkpoint, drop: Sequence[str]) -> Checkpoint:
    """Return the checkpoint without the weights that these patterns name, and their optimizer state."""
    if not drop:
        return checkpoint

    def is_dropped(name: str) -> bool:
        return matches_any(name, drop)

    dropped = {name for name in checkpoint if is_dropped(name)}
    reader = checkpoint.optimizer_reader
    if not reader.by_index:
        reader = reader.named_as(lambda state: state.without(is_dropped))
    groups = checkpoint.groups.without(dropped)
    return replace(checkpoint, groups=groups, optimizer_reader=reader)


def droppable(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the names that a pattern of `drop` may match: of weights, of keys that cannot be read, and of
    weights that are gone and have optimizer state."""
    yield from checkpoint
    yield from (one.key for one in checkpoint.refused)
    if not checkpoint.optimizer_reader.by_index:
        yield from (name for name in checkpoint.optimizer if name not in checkpoint)
