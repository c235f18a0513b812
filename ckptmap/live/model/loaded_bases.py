"""Where the weights of a live model were loaded from, for a save that leaves out those that are not trained.

`load` notes it at the modules that hold the weights: they stay the same objects when peft, DDP or FSDP
wraps the model. Weights that such a save holds itself are no base's: a later save of a part has them, too,
though they are frozen by then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.live.model.live_form import form_of
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.local_digest import LocalDigest, local_digest
from ckptmap.mapping.renaming import Renaming
from ckptmap.protocols.file_systems import Fingerprint

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoadedBase:
    """A checkpoint that weights were loaded from.

    fingerprints  of its files when they were read
    names         how its names were changed, in turn
    root          that it was opened with; empty: none
    several       whether its names begin with those of several models
    """

    path: str
    fingerprints: Mapping[str, Fingerprint]
    names: tuple[Renaming, ...] = ()
    drop: tuple[str, ...] = ()
    several: bool = False
    root: str = ""


@dataclass(frozen=True)
class SameAsBase:
    """That this rank's part of a weight had the values of a base.

    fingerprints  of the files that held them then, other files perhaps among them
    digest        of the memory
    """

    fingerprints: Mapping[str, Fingerprint]
    names: tuple[Renaming, ...]
    drop: tuple[str, ...]
    digest: LocalDigest

    @classmethod
    def of(cls, base: LoadedBase, opened: Checkpoint, digest: LocalDigest) -> SameAsBase:
        return cls(opened.fingerprints, base.names, tuple(base.drop), digest)

    def is_of(self, base: LoadedBase, opened: Checkpoint) -> bool:
        """Return whether the proof is of the base as it is now."""
        now = opened.fingerprints
        same_names = (self.names, self.drop) == (base.names, tuple(base.drop))
        same_files = bool(now) and all(self.fingerprints.get(f) == now[f] for f in now)
        return same_names and same_files


PART: Final = "part"
"""In place of a base: the weight was saved in a part, so that no base has its values."""

_BASES: WeakKeyDictionary[torch.nn.Module, dict[str, LoadedBase | str]] = WeakKeyDictionary()
"""By the attribute of each module: a weight and its bias may come from different checkpoints."""
_PROOFS: WeakKeyDictionary[torch.nn.Module, dict[str, SameAsBase]] = WeakKeyDictionary()


def remember(
    targets: Iterable[LiveTensor],
    base: LoadedBase | None,
    part: Collection[str],
    fingerprints: Mapping[str, Fingerprint],
) -> None:
    """Note where weights were loaded from, and what a load has made of those that are quantized: another
    load need not make the same of them.

    base          None: it cannot be opened again by a path alone
    part          names of weights that a save of a part holds itself
    fingerprints  of the files that were read"""
    for target in targets:
        is_own = bool(target.named_in(part))
        _note(target, PART if is_own else base)
        if base is None or is_own or form_of(target) is None:
            continue
        digest = local_digest(target)
        if digest is not None:
            prove(target, SameAsBase(fingerprints, base.names, tuple(base.drop), digest))


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


def prove(target: LiveTensor, proof: SameAsBase) -> None:
    """Remember that this rank's part of a weight has the values of a base."""
    for module, name in target.places:
        _PROOFS.setdefault(module, {})[name] = proof


def proof_of(target: LiveTensor) -> SameAsBase | None:
    """Return the last proof of a weight."""
    found = (_PROOFS.get(module, {}).get(name) for module, name in target.places)
    return next((one for one in found if one is not None), None)


def _origins(target: LiveTensor) -> list[LoadedBase | str]:
    found = (_BASES.get(module, {}).get(name) for module, name in target.places)
    return [one for one in found if one is not None]


def of_checkpoint(checkpoint: Checkpoint, drop: tuple[str, ...], several: bool) -> LoadedBase:
    """Return what to remember of a checkpoint that can be opened again by its path."""
    names, root = checkpoint.renamings, checkpoint.root
    return LoadedBase(checkpoint.shown, checkpoint.fingerprints, names, drop, several, root)
