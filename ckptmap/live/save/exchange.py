"""What ranks tell each other of a save: before it returns whether they were given the same values, and before it
writes what each holds that all must know, as plain values, records and settings.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Any

from ckptmap.checkpoint import base_record
from ckptmap.core.formatting import some
from ckptmap.errors import ArgumentError
from ckptmap.live.model import module_walk, unsaved_buffers
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.optimizer import own_values, rank_settings, run_settings
from ckptmap.live.optimizer.local_state import STATE, HeldGroup, LocalState
from ckptmap.live.options import SaveOptions
from ckptmap.live.rounding import record as rounding
from ckptmap.live.save import extra_values, group_values, merged_groups, pending_gradients
from ckptmap.live.save.assign_writers import Drifted
from ckptmap.live.save.collect import put
from ckptmap.live.save.merged_groups import MergedGroups
from ckptmap.live.save.replica_digests import Digest, tensors_of
from ckptmap.operations.step_directories import MANAGER
from ckptmap.protocols import OutTensor
from ckptmap.tensors import Box, Path

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Told:
    """What a rank tells the others before anything is planned: values of JSON, some hundred bytes.

    only           the patterns of `only`; where a rank has any, nothing else is told yet
    extra, states  names and digests of the caller's values
    pending        what tells of gradients that are pending, and their digest
    is_decided     whether the caller says what becomes of such gradients
    seeds          of optimizers that round by position
    replicas       one digest of all tensors that this rank compares with others
    plans          tokens of the plans that this rank knows for what it holds
    managed        the metrics of a manager, which all ranks have
    unmatched      patterns of `only` that match nothing on this rank, each with what may be meant
    groups         digest of which parameters are in which group of the optimizer
    modules        one digest of the extra state of modules
    """

    only: Sequence[str] = ()
    step: int | None = None
    extra: Sequence[tuple[str, str]] = ()
    states: Sequence[tuple[str, str]] = ()
    pending: tuple[str, Sequence[str]] = ("", ())
    is_decided: bool = True
    seeds: Sequence[int | None] = ()
    replicas: str = ""
    plans: Sequence[str] = ()
    managed: str = ""
    unmatched: Mapping[str, str] = field(default_factory=dict)
    groups: str = ""
    modules: str = ""

    @classmethod
    def of(
        cls, options: SaveOptions, states: Mapping[str, object], found: pending_gradients.Evidence,
        held: LocalState, digests: Sequence[Digest], plans: Sequence[str], managed: str | None,
        modules: str,
    ) -> Told:  # fmt: skip
        """Return what this rank tells. managed: None where no manager saves, whose record rank 0 alone has."""
        extra = extra_values.digests(options.extra or {})
        if managed is not None:
            extra.pop(MANAGER, None)
        return cls(
            (), None if options.step is None else index(options.step), [*extra.items()], [*extra_values.digests(states).items()],
            (found.text, found.digest), options.gradients is not None,
            rounding.seeds(held.settings), one_digest(digests), plans, managed or "",
            groups=merged_groups.told(held.groups), modules=modules,
        )  # fmt: skip

    @property
    def evidence(self) -> pending_gradients.Evidence:
        text, digest = self.pending
        return pending_gradients.Evidence(text, tuple(digest))


def one_digest(digests: Sequence[Digest]) -> str:
    """Return a digest of digests, by which ranks see that all are equal."""
    text = repr([*map(tuple, digests)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def told_by_all(peers: RankGroup, make: Callable[[], Told]) -> list[Told]:
    """Return what every rank tells. Raises on all ranks what `make` raises on one."""
    return [Told(**one) for one in peers.told(lambda: asdict(make()))]


def require_same_values(held: LocalState, told: Sequence[Told], with_gradients: bool) -> None:
    """Compare what all ranks told; every rank finds the same.

    Raises ArgumentError CKM516 where they differ, CKM518 where gradients are pending, RunError CKM509 where ranks
    round with different seeds."""
    for rank, one in enumerate(told):
        if one.managed != told[0].managed:
            raise ArgumentError(
                "CKM516",
                f"metrics: are {told[0].managed} on rank 0, {one.managed} on rank {rank}",
                "pass numbers that all ranks have: a loss that is averaged over ranks",
            )
    extra_values.require_same_step([one.step for one in told])
    extra_values.require_same([dict(one.extra) for one in told])
    pending = pending_gradients.told([one.evidence for one in told])
    if not all(one.is_decided for one in told):
        pending_gradients.refuse(pending)
    if pending and not with_gradients:
        held.settings[run_settings.WITHOUT] = pending
    rounding.require_one_seed([tuple(one.seeds) for one in told])


@dataclass(frozen=True)
class Shared:
    """What each rank holds that all must know before a save is written. Nothing of it is live.

    groups  of the optimizer, on other ranks than 0 without their parameters where these are the same on all
    token   of the plan that is made of it
    """

    values: Mapping[Path, object]
    records: Mapping[str, Mapping[str, object]]
    settings: Mapping[str, object]
    is_decoded: bool
    placements: Mapping[str, Mapping[str, object]]
    simplified: Sequence[str]
    groups: Sequence[HeldGroup]
    own: Mapping[Path, torch.Tensor]
    replicas: str
    token: str = field(default_factory=lambda: os.urandom(16).hex())

    @classmethod
    def of(cls, held: LocalState, replicas: str, has_params: bool) -> Shared:
        groups = held.groups if has_params else merged_groups.without_params(held.groups)
        return cls(
            dict(held.values), dict(held.records), dict(held.settings), bool(held.decoded),
            held.placements, held.simplified, groups, held.own, replicas,
        )  # fmt: skip

    def settled(self) -> tuple[Shared, Exception | None]:
        """Return it with the digests that devices compute meanwhile, for which it waits; and what a device has raised:
        this rank tells the others all the same, who wait for it."""
        try:
            return replace(self, settings=unsaved_buffers.settled(self.settings)), None
        except Exception as error:
            return replace(self, settings={}), error


@dataclass(frozen=True)
class FoundTogether:
    """What no rank holds before all have told what they do: tensors that rank 0 writes, and their values."""

    tensors: Sequence[OutTensor]
    values: Mapping[tuple[Path, Box], torch.Tensor]


def merge(
    held: LocalState, everything: Sequence[Shared], drifted: Drifted, same_groups: bool
) -> FoundTogether:
    """Give this rank the plain values, records and settings of all ranks; those of the lowest go first.

    drifted      names of what differs between ranks
    same_groups  are the same parameters in the same groups of each rank's optimizer?"""
    settings = [one.settings for one in everything]
    groups = _groups([one.groups for one in everything], same_groups)
    unlike = _unlike([one.values for one in everything])
    described = {
        **settings[0],
        "layout": [one["layout"] for one in settings],
        **unsaved_buffers.of_all_ranks([one.get(unsaved_buffers.KEY) for one in settings]),
        **rank_settings.of_all_ranks(settings),
        **_bases(settings),
        **({rank_settings.GROUPS: groups.numbers} if groups.numbers else {}),
        "decoded": any(one.is_decoded for one in everything),
        run_settings.PLACEMENTS: {k: v for one in everything for k, v in one.placements.items()},
        run_settings.FORMS: list(dict.fromkeys(n for one in everything for n in one.simplified)),
        "buffers": [*drifted.buffers],
        run_settings.UNLIKE: [
            *unlike,
            *groups.titles(),
            *drifted.others,
        ],
    }
    put(held, ("extra", run_settings.KEY), described)
    for one in reversed(everything):
        held.records.update(one.records)
        held.values |= one.values
    own = dict(groups.own())
    for rank, one in enumerate(everything if unlike or drifted.others else ()):
        own |= _own_state(rank, one, {*unlike, *drifted.others})
    return _with_groups(held, groups.groups, own)


def _bases(settings: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return the records of the bases of all ranks: stages of a pipeline may leave out weights, or not.

    Raises ArgumentError CKM516 where the weights of one model are from two bases."""
    found: dict[str, Any] = {}
    for rank, one in enumerate(settings):
        for head, record in one.get(base_record.KEY, {}).items():
            known = found.setdefault(head, record)
            if record["digest"] and record["digest"] != known["digest"]:
                raise ArgumentError(
                    "CKM516",
                    f"only: the weights that rank {rank} leaves out are from {record['path']}, those of a lower rank"
                    f" from {known['path']}, expected one base of equal values",
                    "load all from one checkpoint by ckptmap.load, or name it: base=PATH",
                )
    return {base_record.KEY: found} if found else {}


def _groups(by_rank: Sequence[Sequence[HeldGroup]], are_same: bool) -> MergedGroups:
    of_all = merged_groups.of_same_params if are_same else merged_groups.of_other_params
    return of_all(by_rank)


def _own_state(rank: int, one: Shared, unlike: Collection[str]) -> dict[Path, object]:
    """Return the entries of optimizer state in which a rank differs from others."""
    found: dict[Path, object] = {
        path[len(STATE) :]: value for path, value in one.values.items() if path[:2] == STATE
    }
    found.update(one.own)
    return {
        own_values.place_in_state(rank, str(fqn), str(name)): value
        for (fqn, name), value in found.items()
        if f"{fqn}.{name}" in unlike
    }


def _with_groups(
    held: LocalState, groups: Sequence[object], own: Mapping[Path, object]
) -> FoundTogether:
    """Add the groups, and what each rank has of its own, to what is stored, and return the tensors in them."""
    found = LocalState()
    stored: Mapping[Path, object] = {group_values.GROUPS: groups} if groups else {}
    for path, value in {**stored, **own}.items():
        put(found, path, value)
    held.values |= found.values
    pieces = [(one, piece) for one in found.holdings for piece in one.pieces]
    return FoundTogether(
        [OutTensor(one.path, one.info, [(0, piece.box)]) for one, piece in pieces],
        {(one.path, piece.box): tensor for one, piece in pieces for tensor in tensors_of(piece)},
    )


def told_of(drifted: Drifted, model: torch.nn.Module) -> Drifted:
    """Return what differs between ranks without the buffers that DDP broadcasts from rank 0 before each forward: of
    these no values are lost."""
    modules = module_walk.modules(model) if drifted.buffers else ()
    is_broadcast = any(getattr(m, "broadcast_buffers", False) for m in modules)
    return drifted._replace(buffers=()) if is_broadcast else drifted


def lost_buffers(buffers: Sequence[str]) -> tuple[str, ...]:
    """Return the note of buffers that differ between ranks; none where there are none."""
    if not buffers:
        return ()
    what = "buffer differs" if len(buffers) == 1 else "buffers differ"
    return (
        f"{len(buffers)} {what} between ranks, those of the lowest were saved: {some(buffers)}",
    )


def _unlike(values_of: Sequence[Mapping[Path, object]]) -> list[str]:
    """Return the names of the plain values of optimizer state that differ between ranks."""
    first: dict[Path, object] = {}
    differing = {
        ".".join(map(str, path[len(STATE) :])): None
        for values in values_of
        for path, value in values.items()
        if path[: len(STATE)] == STATE and repr(first.setdefault(path, value)) != repr(value)
    }
    return [*differing]
