"""What a caller of `ckptmap.load` or `ckptmap.save` may choose, each as one frozen value.

    load(path, model, strict=False)  ->  LoadOptions(strict=False), every other field its default

`LoadKeywords` and `SaveKeywords` have the same fields for type checkers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from ckptmap.core import argument_checks
from ckptmap.errors import ArgumentError
from ckptmap.live.model.stateful import Stateful
from ckptmap.mapping.renaming import Patterns as RenamePatterns
from ckptmap.mapping.renaming import Renaming

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.optimizer_types import Scheduler

Optimizers: TypeAlias = (
    "torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | Sequence[torch.optim.Optimizer]"
)
"""An optimizer, or several by name."""
Schedulers: TypeAlias = "Scheduler | Mapping[str, Scheduler] | Sequence[Scheduler]"
"""A scheduler, or several by name."""

MAX_MEMORY = 64 << 20
"""Bytes of host buffers by default."""
DEVICE_MEMORY = 256 << 20
"""The same where the model is on a device: several threads fill it, each through buffers of its own."""
PRECISIONS = ("keep", "target", "fp32")
ROUNDINGS = ("nearest", "stochastic")
NF4_CLASSES = ("torchao", "bnb")
VERIFY = ("stored", "full", "none")
RANDOM = ("auto", "recorded", "fresh", "leave")


class LoadKeywords(TypedDict, total=False):
    """The keywords of `ckptmap.load`; `LoadOptions` says what they mean."""

    strict: bool
    strict_encoding: bool
    exact: bool
    precision: str
    rounding: str
    nf4: str
    random: str
    seed: int
    fix: bool
    verify: str
    max_memory: int | str | None
    strip_prefix: str | None
    rename: RenamePatterns
    add_prefix: str | None
    drop: Sequence[str]
    stateful: Mapping[str, Stateful] | None
    base: str | os.PathLike[str] | None
    timeout: float | None


@dataclass(frozen=True)
class LoadOptions:
    """How `ckptmap.load` treats a checkpoint that is not exactly what the model would have saved.

    strict           True: names and shapes must match. False: tensors that do not match keep their
                     values and are in the report; a parameter without state begins without
    strict_encoding  True: refuse a quantized weight that must be decoded to fit the model
    exact            training goes on bit for bit as it would have, or LoadError CKM507 says why
                     not; for checkpoints of `ckptmap.save`. A DDP over three ranks or more builds
                     its buckets anew after its first step, and sums the gradients of that step in
                     another order than a DDP that has run. Numbers that modules keep in plain
                     attributes must be as they were; not seen: other such values, flags and private
                     ones, what schedulers keep in closures, and workers of a data loader that is
                     not given as `stateful`. Those of one that is refuse rows that draw random
                     numbers in the middle of an epoch, once they do
    precision        of moments, where the optimizer leaves a choice: "keep" the checkpoint's, so
                     that another world size changes nothing; "target": what the optimizer would
                     have made of this rank's shard; "fp32"
    rounding         of float32 weights into bfloat16: "nearest", or "stochastic" with `seed`
    nf4              the class that holds an NF4 weight: "torchao", or "bnb" (bitsandbytes' Linear4bit)
    random           "auto": restore each rank's random streams, or, where they do not fit and the
                     optimizer rounds stochastically, make fresh ones from `seed`; "recorded":
                     restore, or refuse; "fresh"; "leave"
    fix              repair torchao's low-bit states in this process where the installed release
                     needs it (`ckptmap doctor` tells)
    verify           "stored": compare every checksum that the checkpoint states with the bytes that
                     the ranks read; "full": also read the rest of what a checksum covers where
                     only a part is needed; "none". With `exact`, "stored" is "full"
    strip_prefix, rename, add_prefix
                     change the checkpoint's names, in this order, as in `ckptmap.open`
    drop             patterns of weights of the checkpoint, by their new names, that are left out, and
                     their optimizer state with them. One that matches nothing is refused (CKM206)
    base             where the base of a checkpoint of `save(only=...)` is now; None: at the recorded
                     path. Its digest must be the recorded one
    stateful         objects that take back the states that `save` was given under these names, as
                     `stateful=`, or as dicts among `extra` and `extra_per_rank`. The next iterator of
                     torchdata's StatefulDataLoader gives back what it draws from random streams
    max_memory       bound of host buffers, beside the tensors themselves: bytes, or `"64MiB"`; None:
                     64 MiB, and 256 MiB where the model is on a device
    timeout          seconds that a rank waits for the other ranks of the model before it raises
                     RunError CKM307; None: as long as the model's process groups do
    """

    strict: bool = True
    strict_encoding: bool = False
    exact: bool = False
    precision: str = "keep"
    rounding: str = "nearest"
    nf4: str = "torchao"
    random: str = "auto"
    seed: int = 0
    fix: bool = False
    verify: str = "stored"
    max_memory: int | None = None
    strip_prefix: str | None = None
    rename: tuple[str, ...] = ()
    add_prefix: str | None = None
    drop: tuple[str, ...] = ()
    stateful: Mapping[str, Stateful] | None = None
    base: str | os.PathLike[str] | None = None
    timeout: float | None = None

    def memory(self, is_on_device: bool) -> int:
        """Return the bytes of host buffers that a load may have."""
        if self.max_memory is not None:
            return self.max_memory
        return DEVICE_MEMORY if is_on_device else MAX_MEMORY

    @property
    def renaming(self) -> Renaming:
        """What `strip_prefix`, `rename` and `add_prefix` do to the checkpoint's names."""
        return Renaming.of(self.strip_prefix, self.rename, self.add_prefix)

    @classmethod
    def of(cls, given: Mapping[str, object]) -> LoadOptions:
        """Return the options of a call.

        Raises ArgumentError CKM516 with the nearest name for a keyword that `load` does not have,
        PlanError CKM618 for a prefix or a pattern that is none.
        """
        argument_checks.known_keywords(given, [field.name for field in fields(cls)], "load()")
        read: dict[str, object] = {"drop": argument_checks.patterns("drop", given.get("drop", ()))}
        if given.get("max_memory") is not None:
            read["max_memory"] = argument_checks.nbytes("max_memory", given["max_memory"])
        options = cls(**{**given, **read})  # type: ignore[arg-type]
        return replace(options, rename=options.renaming.rename)

    def check(self) -> None:
        """Raise ArgumentError CKM516 for a value that means nothing."""
        argument_checks.timeout(self.timeout)
        argument_checks.integer("seed", self.seed, -(1 << 63))
        argument_checks.choice("precision", self.precision, PRECISIONS)
        argument_checks.choice("rounding", self.rounding, ROUNDINGS)
        argument_checks.choice("nf4", self.nf4, NF4_CLASSES)
        for name in ("strict", "strict_encoding", "exact", "fix"):
            argument_checks.flag(name, getattr(self, name))
        argument_checks.choice("random", self.random, RANDOM)
        argument_checks.choice("verify", self.verify, VERIFY)
        if self.base is not None:
            argument_checks.path("base", self.base)
        if self.exact and self.verify == "none":
            raise ArgumentError(
                "CKM516",
                'verify: expected "stored" or "full" with exact=True, got "none"',
                "a damaged byte would make the run another one; leave out one of them",
            )


class ValueKeywords(TypedDict, total=False):
    """Those keywords of `ckptmap.save` that `CheckpointManager.save` takes, too."""

    extra: Mapping[str, object] | None
    extra_per_rank: Mapping[str, object] | None
    stateful: Mapping[str, Stateful] | None
    only: str | Sequence[str] | None
    base: str | os.PathLike[str] | None
    replicas: str
    timeout: float | None
    gradients: bool | None


class SaveKeywords(ValueKeywords, total=False):
    """The keywords of `ckptmap.save`; `SaveOptions` says what they mean."""

    step: int | None
    overwrite: bool
    background: bool
    bandwidth: int | str | None


@dataclass(frozen=True)
class SaveOptions:
    """What `ckptmap.save` saves beside the model and its optimizer, and how.

    step, extra     plain values and tensors, the same on all ranks, or given on rank 0 alone;
                    `ckptmap.load` returns them in its report
    extra_per_rank  plain values and tensors of this rank, such as the state dict of its data
                    loader; the report of `load` has them where the world size is the same
    stateful        objects with `state_dict` and `load_state_dict` by name (torch's Stateful): data
                    loaders, samplers, a GradScaler. A state that differs between ranks is saved for
                    each of them
    only            "trainable": of the weights, save parameters that require gradients, and buffers;
                    or patterns of names, each of which some rank has; and weights that were trained and are frozen now, or whose
                    values are not those of the base. The others are equal to a base bit for bit, whose
                    path and digest are recorded, and which `load` reads too: the first save compares
                    them with the base, each rank its own boxes, later ones by digests of memory
    base            that base; None: the checkpoint that `ckptmap.load` has loaded them from
    overwrite       True: replace the checkpoint at the path
    replicas        "check": parameters that several ranks hold whole, or several meshes hold, must
                    be equal; "first": those of the lowest rank are saved
    background      True: copy values to the CPU, return, and write in a thread; the handle's
                    `wait()` returns once they are published. The memory of the copies is kept for
                    the next save. False: write before returning, without a copy
    bandwidth       bytes a second, or `"200MiB"`, that each rank writes in the background at most
    timeout         seconds that a rank waits for the others before it raises RunError CKM307;
                    None: as torch's default group does, and half an hour at least while files are
                    written
    gradients       True: save the gradients of all parameters, too, for a save in the middle of an
                    accumulation; `load` restores them. False: leave them out. None: leave them out,
                    and refuse where an accumulation is evident (CKM518)
    """

    step: int | None = None
    extra: Mapping[str, object] | None = None
    extra_per_rank: Mapping[str, object] | None = None
    stateful: Mapping[str, Stateful] | None = None
    only: str | Sequence[str] | None = None
    base: str | os.PathLike[str] | None = None
    overwrite: bool = False
    replicas: str = "check"
    background: bool = True
    bandwidth: int | str | None = None
    timeout: float | None = None
    gradients: bool | None = None

    @classmethod
    def of(cls, given: SaveKeywords) -> SaveOptions:
        """Return the options of a call.

        Raises ArgumentError CKM516 with the nearest name for a keyword that `save` does not have, or
        for a timeout that means nothing.
        """
        argument_checks.known_keywords(given, [field.name for field in fields(cls)], "save()")
        options = cls(**given)
        argument_checks.timeout(options.timeout)
        return options

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of `only`."""
        return argument_checks.patterns("only", self.only or ())

    @property
    def pace(self) -> int | None:
        """Bytes a second that a rank may write; None: no limit. A save that training waits for has none."""
        if self.bandwidth is None or not self.background:
            return None
        return argument_checks.nbytes("bandwidth", self.bandwidth)

    def check(self) -> None:
        """Raise ArgumentError CKM516 for a value that means nothing."""
        if self.bandwidth is not None:
            argument_checks.nbytes("bandwidth", self.bandwidth)
        if self.only is None and self.base is not None:
            raise ArgumentError(
                "CKM516", "base: expected only= with it", 'for example only="trainable"'
            )
        if self.only is not None and not self.patterns:
            raise ArgumentError(
                "CKM516",
                f"only={self.only!r}: names no weight",
                'give "trainable" or patterns of names, or leave it out to save all weights',
            )
        argument_checks.choice("replicas", self.replicas, ("check", "first"))
        for name in (
            "overwrite",
            "background",
            *(["gradients"] if self.gradients is not None else []),
        ):
            argument_checks.flag(name, getattr(self, name))
        if self.step is not None:
            argument_checks.integer("step", self.step, 0)
