"""Directories of frameworks whose optimizer state is keyed by number: accelerate's, Trainer's.

The program that restores one built the optimizer as the program that saved it, so that the order of the
live parameters names the numbers, as the framework's own load takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.errors import SourceError
from ckptmap.live.model.peft import open_base_or_adapter
from ckptmap.live.model.several_models import Models
from ckptmap.live.options import Optimizers
from ckptmap.live.state_dict.hooks import name_by_live


@contextmanager
def named_by_live(
    path: Path, model: Models, optimizer: Optimizers | None, strict: bool = True
) -> Iterator[Path | Checkpoint]:
    """Yield the path of a checkpoint; where its optimizer state is keyed by number and nothing in it
    names the numbers, the opened checkpoint with names in the live optimizer's order.

    Raises SourceError CKM207 where shapes refute the order."""
    if optimizer is None or isinstance(model, Mapping | Sequence) or isinstance(optimizer, Mapping):
        yield path
        return
    checkpoint, differences = open_base_or_adapter(path, model, strict)
    with checkpoint:
        is_numbered = checkpoint.optimizer_reader.present and checkpoint.optimizer_by_index
        if is_numbered and not differences:  # of which `load` tells
            named = _named(checkpoint, model, optimizer)
            if named is not None:
                yield named
                return
    yield path


def _named(checkpoint: Checkpoint, model: Any, optimizer: Any) -> Checkpoint | None:
    """Return the checkpoint named by the live order; None where the groups are others and a config.json names the
    numbers, as of Trainer's two groups for an optimizer with one."""
    try:
        return name_by_live(checkpoint, model, optimizer)
    except SourceError:
        if checkpoint.optimizer_reader.config is None:
            raise
        return None
