"""What ranks tell each other of a save: before it returns whether they were given the same values, and before it
writes what each holds that all must know, as plain values, records and settings.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import index
from typing import TYPE_CHECKING

from ckptmap.checkpoint import base_record
from ckptmap.errors import ArgumentError
from ckptmap.live.model import module_walk, unsaved_buffers
from ckptmap.live.model.load_report import listed
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.optimizer import run_settings
from ckptmap.live.optimizer.local_state import STATE, LocalState
from ckptmap.live.options import SaveOptions
from ckptmap.live.rounding import record as rounding
from ckptmap.live.save import extra_values, pending_gradients
from ckptmap.live.save.collect import put
from ckptmap.live.save.replica_digests import Digest
from ckptmap.operations.step_directories import MANAGER
from ckptmap.tensors import Path

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

    @classmethod
    def of(
        cls, options: SaveOptions, states: Mapping[str, object], found: pending_gradients.Evidence,
        held: LocalState, digests: Sequence[Digest], plans: Sequence[str], managed: str | None,
    ) -> Told:  # fmt: skip
        """Return what this rank tells. managed: None where no manager saves, whose record rank 0 alone has."""
        extra = extra_values.digests(options.extra or {})
        if managed is not None:
            extra.pop(MANAGER, None)
        return cls(
            (), None if options.step is None else index(options.step), [*extra.items()], [*extra_values.digests(states).items()],
            (found.text, found.digest), options.gradients is not None,
            rounding.seeds(held.settings), one_digest(digests), plans, managed or "",
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


OF_EACH_RANK = ("layout", base_record.KEY, unsaved_buffers.KEY)
"""Settings that ranks may have unlike ones of."""


@dataclass(frozen=True)
class Shared:
    """What each rank holds that all must know before a save is written. Nothing of it is live.

    token  of the plan that is made of it
    """

    values: Mapping[Path, object]
    records: Mapping[str, Mapping[str, object]]
    settings: Mapping[str, object]
    is_decoded: bool
    placements: Mapping[str, Mapping[str, object]]
    simplified: Sequence[str]
    replicas: str
    token: str = field(default_factory=lambda: os.urandom(16).hex())

    @classmethod
    def of(cls, held: LocalState, replicas: str) -> Shared:
        settings = {key: held.settings.get(key) for key in OF_EACH_RANK}
        return cls(
            dict(held.values), dict(held.records), settings, bool(held.decoded),
            held.placements, held.simplified, replicas,
        )  # fmt: skip


def merge(held: LocalState, everything: Sequence[Shared], drifted: Sequence[str]) -> None:
    """Give this rank the plain values, records and settings of all ranks; those of the lowest go first.

    drifted  names of the buffers that differ between ranks"""
    if bases := everything[0].settings[base_record.KEY]:  # rank 0 has taken the digests
        held.settings[base_record.KEY] = bases
    described = {
        **held.settings,
        "layout": [one.settings["layout"] for one in everything],
        **unsaved_buffers.of_all_ranks([one.settings[unsaved_buffers.KEY] for one in everything]),
        "decoded": any(one.is_decoded for one in everything),
        run_settings.PLACEMENTS: {k: v for one in everything for k, v in one.placements.items()},
        run_settings.FORMS: list(dict.fromkeys(n for one in everything for n in one.simplified)),
        "buffers": list(drifted),
        run_settings.UNLIKE: _unlike([one.values for one in everything]),
    }
    put(held, ("extra", run_settings.KEY), described)
    for one in reversed(everything):
        held.records.update(one.records)
        held.values |= one.values


def told_of(drifted: Sequence[str], model: torch.nn.Module) -> list[str]:
    """Return the buffers that differ between ranks and of which other ranks' values are lost: not those that DDP
    broadcasts from rank 0 before each forward."""
    if not drifted or any(
        getattr(m, "broadcast_buffers", False) for m in module_walk.modules(model)
    ):
        return []
    return list(drifted)


def lost_buffers(buffers: Sequence[str]) -> tuple[str, ...]:
    """Return the note of buffers that differ between ranks; none where there are none."""
    if not buffers:
        return ()
    what = "buffer differs" if len(buffers) == 1 else "buffers differ"
    return (
        f"{len(buffers)} {what} between ranks, those of the lowest were saved: {listed(buffers)}",
    )


def _unlike(values_of: Sequence[Mapping[Path, object]]) -> list[str]:
    """Return the names of the plain values of optimizer state that differ between ranks."""
    first: dict[Path, object] = {}
    differing = {
        ".".join(map(str, path[2:])): None
        for values in values_of
        for path, value in values.items()
        if path[: len(STATE)] == STATE and repr(first.setdefault(path, value)) != repr(value)
    }
    return [*differing]
