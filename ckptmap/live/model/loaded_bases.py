"""Where the weights of a live model were loaded from, for a save that leaves out those that are not trained.

`load` notes it at the modules that hold the weights: they stay the same objects when peft, DDP or FSDP
wraps the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.mapping.renaming import Renaming
from ckptmap.protocols.file_systems import Fingerprint

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoadedBase:
    """A checkpoint that weights were loaded from.

    fingerprints  of its files when they were read
    several       whether its names begin with those of several models
    """

    path: str
    fingerprints: Mapping[str, Fingerprint]
    names: Renaming = field(default_factory=Renaming)
    drop: tuple[str, ...] = ()
    several: bool = False


_BASES: WeakKeyDictionary[torch.nn.Module, LoadedBase] = WeakKeyDictionary()


def remember(targets: Iterable[LiveTensor], base: LoadedBase | None) -> None:
    """Note where weights were loaded from; None: it cannot be opened again by a path alone."""
    for target in targets:
        for module, _ in target.places:
            if base is None:
                _BASES.pop(module, None)
            else:
                _BASES[module] = base


def known(target: LiveTensor) -> LoadedBase | None:
    """Return where a weight was loaded from; None: `load` did not load it."""
    return next((_BASES[module] for module, _ in target.places if module in _BASES), None)


def of_checkpoint(
    checkpoint: Checkpoint, names: Renaming, drop: tuple[str, ...], several: bool
) -> LoadedBase:
    """Return what to remember of a checkpoint that was opened by its path."""
    return LoadedBase(checkpoint.shown, checkpoint.fingerprints, names, drop, several)
