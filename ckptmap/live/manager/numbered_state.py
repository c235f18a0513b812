"""Directories of frameworks whose optimizer state is keyed by number: accelerate's, Trainer's.

The program that restores one built the optimizer as the program that saved it, so that the order of the
live parameters names the numbers, as the framework's own load takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckptmap.checkpoint.checkpoint import Checkpoint
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
            yield name_by_live(checkpoint, model, optimizer)
            return
    yield path
