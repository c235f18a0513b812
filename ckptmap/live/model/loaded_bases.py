"""Where the weights of a live model were loaded from, for a save that leaves out those that are not trained.

`load` notes it at the modules that hold the weights: they stay the same objects when peft, DDP or FSDP
wraps the model. Weights that such a save holds itself are no base's: a later save of a part has them, too,
though they are frozen by then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
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


PART: Final = "part"
"""In place of a base: the weight was saved in a part, so that no base has its values."""

_BASES: WeakKeyDictionary[torch.nn.Module, dict[str, LoadedBase | str]] = WeakKeyDictionary()
"""By the attribute of each module: a weight and its bias may come from different checkpoints."""


def remember(
    targets: Iterable[LiveTensor], base: LoadedBase | None, part: Collection[str] = ()
) -> None:
    """Note where weights were loaded from.

    base  None: it cannot be opened again by a path alone
    part  names of weights that a save of a part holds itself"""
    for target in targets:
        _note(target, PART if target.named_in(part) else base)


def saved_in_part(targets: Iterable[LiveTensor]) -> None:
    """Note that a save of a part holds these weights: their values are no base's."""
    for target in targets:
        _note(target, PART)


def _note(target: LiveTensor, origin: LoadedBase | str | None) -> None:
    for module, name in target.places:
        noted = _BASES.setdefault(module, {})
        if origin is None:
            noted.pop(name, None)
        else:
            noted[name] = origin


def known(target: LiveTensor) -> LoadedBase | None:
    """Return where a weight was loaded from; None: `load` did not load it."""
    return next((one for one in _origins(target) if isinstance(one, LoadedBase)), None)


def is_of_part(target: LiveTensor) -> bool:
    """Return whether a save of a part held the weight: this run's, or the one that it was loaded from."""
    return PART in _origins(target)


def _origins(target: LiveTensor) -> list[LoadedBase | str]:
    found = (_BASES.get(module, {}).get(name) for module, name in target.places)
    return [one for one in found if one is not None]


def of_checkpoint(
    checkpoint: Checkpoint, names: Renaming, drop: tuple[str, ...], several: bool
) -> LoadedBase:
    """Return what to remember of a checkpoint that was opened by its path."""
    return LoadedBase(checkpoint.shown, checkpoint.fingerprints, names, drop, several)
