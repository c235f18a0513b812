"""One rank's part of a save, from what it holds to what it is about to write.

told     what it holds, and what it tells the others: one collective
planned  known structure:  copies; the rest is exchanged in the background, where nothing live is needed
         new structure:    offers and values of all ranks, who writes what, the layout of the files, copies
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from ckptmap.checkpoint import base_record
from ckptmap.core import argument_checks
from ckptmap.live.model import module_extra_state, rng_state, stateful
from ckptmap.live.model.find_targets import find_targets
from ckptmap.live.model.live_tensor import LiveTensor, SettledTensor
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.optimizer import run_settings
from ckptmap.live.optimizer.local_state import LocalState
from ckptmap.live.options import SaveOptions
from ckptmap.live.save import known_plan, module_states, only_trained, pending_gradients
from ckptmap.live.save.assign_writers import (
    Assigner,
    Drifted,
    bare_offers,
    compared_digests,
    drifted,
    is_compared,
    with_digests,
)
from ckptmap.live.save.collect import collect, collect_states, put
from ckptmap.live.save.exchange import Shared, Told, merge, told_of
from ckptmap.live.save.known_plan import KnownPlan, Structure
from ckptmap.live.save.module_states import Digested
from ckptmap.live.save.overlapping_meshes import require_alike
from ckptmap.live.save.replica_digests import Digest
from ckptmap.live.save.staged_values import Snapshot, snapshot
from ckptmap.live.save.write_dcp import FileLayout
from ckptmap.operations.step_directories import MANAGER
from ckptmap.protocols import OutState
from ckptmap.tensors import Path

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.optimizer_types import Scheduler
    from ckptmap.live.options import Optimizers


@dataclass(frozen=True)
class Managed:
    """What a manager adds to a save.

    metrics  as text, which ranks compare
    begin    called on rank 0: whether the save may replace what is there, and the manager's record of it
    """

    metrics: str
    begin: Callable[[], tuple[bool, Mapping[str, object]]]


@dataclass(frozen=True)
class Ready:
    """A save of which nothing live is needed any more: `layout` is called once, on all ranks.

    drifted  names of the buffers that differ between ranks
    """

    layout: Callable[[RankGroup], FileLayout]
    copies: Snapshot
    drifted: Sequence[str]


@dataclass
class Mine:
    """What this rank brings to a save."""

    path: str | os.PathLike[str]
    model: torch.nn.Module
    optimizer: Optimizers | None
    scheduler: Scheduler | None
    options: SaveOptions
    peers: RankGroup
    managed: Managed | None = None
    targets: Sequence[LiveTensor] = ()
    states: Mapping[str, object] = field(default_factory=dict)
    """Of the caller's objects, and the scheduler's."""
    modules: Mapping[str, object] = field(default_factory=dict)
    """Extra state of modules by key."""
    digested: Digested = field(default_factory=Digested)
    random_state: Mapping[str, object] = field(default_factory=dict)
    held: LocalState = field(default_factory=LocalState)
    digests: Sequence[Digest] = ()
    """Of the tensors that ranks compare."""
    structure: Structure | None = None
    plans: Sequence[KnownPlan] = ()
    same_groups: bool = True
    """Are the same parameters in the same groups of each rank's optimizer?"""

    def told(self) -> Told:
        """Collect what this rank holds, and return what it tells the others. Raises as `save` does."""
        self.states = stateful.states_of(self.options.stateful)
        if self.scheduler is not None:
            self.states = {**self.states, run_settings.SCHEDULERS: self.scheduler.state_dict()}
        self.random_state = rng_state.captured(self.model)  # a loader's first state draws its seed
        self.targets = [*map(SettledTensor.of, find_targets(self.model)[0])]
        if self.managed is not None:
            self._ask(self.managed)
        if self.options.only is not None:
            only = self.options.patterns
            return Told(only, unmatched=only_trained.unmatched(self.targets, only))
        return self.collected(only_trained.everything(self.path, self.targets))

    def _ask(self, manager: Managed) -> None:
        extra = argument_checks.extra(self.options.extra, (MANAGER,))
        if self.peers.rank == 0:
            overwrite, record = manager.begin()
            extra[MANAGER] = record
            self.options = replace(self.options, overwrite=overwrite, extra=extra)

    def collected(self, part: only_trained.SavedPart) -> Told:
        """Collect what this rank holds, of the model a part, and return what it tells the others."""
        options, peers = self.options, self.peers
        self.held = collect(
            self.model, self.targets, part, self.optimizer, self.scheduler, peers,
            self.random_state, self.states, options,
        )  # fmt: skip
        only_trained.refuse_to_replace(self.held.settings.get(base_record.KEY), self.path)
        self.modules = module_states.of_model(self.model)
        self.held.settings |= module_states.settings(self.modules)
        if peers.world > 1:
            self.digested = Digested.of(self.modules)
        states = LocalState()
        collect_states(states, self.states, (), peers)
        put(states, ("extra", module_extra_state.KEY), self.modules, private=True)
        self.structure = Structure.of(self.held, states, options.replicas)
        self.plans = known_plan.find(self.structure, peers.group)
        holdings = self.held.holdings
        nobody = peers.world == 1  # a digest reads all bytes once
        self.digests = (
            [()] * sum(map(is_compared, holdings)) if nobody else compared_digests(holdings)
        )
        found = pending_gradients.evidence(self.model, self.targets)
        return Told.of(
            options, self.states, found, self.held, self.digests,
            [plan.token for plan in self.plans], self.managed.metrics if self.managed else None,
            self.digested.of_all,
        )  # fmt: skip

    def planned(self, told: Sequence[Told]) -> Ready:
        """Return the save, ready to be written. Raises on all ranks RunError CKM509 where replicas differ, CKM510
        where the ranks' parts do not make whole tensors, and what else one rank raises."""
        self.same_groups = all(one.groups == told[0].groups for one in told)
        shared = stateful.shared_names([dict(one.states) for one in told])
        collect_states(self.held, self.states, shared, self.peers)
        shared |= self._hold_modules([one.modules for one in told])
        plan = known_plan.agreed(self.plans, [one.plans for one in told])
        if plan and plan.shared == shared:
            unlike = self._drifted(plan, told)
            if unlike is not None:
                return self._as_known(plan, told_of(unlike, self.model))
        return self._anew(shared)

    def _hold_modules(self, told: Sequence[str]) -> frozenset[str]:
        """Add the extra state of modules that this rank saves, and return who saves which: by the digests of every
        rank, which are exchanged where they differ."""
        mine = self.digested.by_key or dict.fromkeys(self.modules, "")
        are_same = all(one == told[0] for one in told)
        by_rank = [mine] * self.peers.world if are_same else self.peers.all(mine)
        for key, path in module_states.places(self.peers.rank, by_rank).items():
            put(self.held, path, self.modules[key], private=True)
        return module_states.kept(by_rank)

    def _drifted(self, plan: KnownPlan, told: Sequence[Told]) -> Drifted | None:
        """Return what differs between ranks; None: replicas do that must not."""
        if plan.is_alike and all(one.replicas == told[0].replicas for one in told):
            return Drifted()
        return plan.drifted(self.peers.all(self.digests), self.options.replicas == "check")

    def _as_known(self, plan: KnownPlan, unlike: Drifted) -> Ready:
        """Copy what this rank writes. An error of it is raised on all ranks by `layout`: no rank waits for it here."""
        error, copies = None, Snapshot({})
        try:
            mine = {key: place.values(self.held.holdings) for key, place in plan.places.items()}
            copies = snapshot(mine, copied=self.options.background)
        except Exception as caught:
            error = caught
        held, told, name = self.held, self._shared(""), FilePath(self.path).name
        same_groups = self.same_groups

        def layout(writers: RankGroup) -> FileLayout:
            mine, failed = told.settled()
            everything = writers.all(mine)
            with writers.together():
                if (first := error or failed) is not None:
                    raise first
                merged = merge(held, everything, unlike, same_groups)
                records = {**held.records, **plan.records}
                tensors = [*plan.tensors, *merged.tensors]
                state = OutState(tensors, _ordered(held.values), records, writers.world)
                return FileLayout.of(state, name, merged.values)

        return Ready(layout, copies, unlike.buffers)

    def _shared(self, replicas: str) -> Shared:
        return Shared.of(self.held, replicas, self.peers.rank == 0 or not self.same_groups)

    def _anew(self, shared: frozenset[str]) -> Ready:
        """Plan a save of a new structure, and keep the plan for later ones."""
        held, peers, structure = self.held, self.peers, self.structure
        assert structure is not None, "it was collected"
        offered = with_digests(bare_offers(held.holdings), self.digests)
        mine, failed = self._shared(self.options.replicas).settled()
        answers = peers.all((offered, mine))
        offers, everything = [one for one, _ in answers], [one for _, one in answers]
        is_checked = any(one.replicas == "check" for one in everything)
        overlaps = is_checked and require_alike(held, offers, peers)
        with peers.together(), argument_checks.hints_of_saves():
            if failed is not None:
                raise failed
            unlike = told_of(drifted(offers), self.model)
            merged = merge(held, everything, unlike, self.same_groups)
            taken = offers  # which differ, is looked at in later saves, too
            if self.options.replicas != "check":
                taken = [[replace(one, checked=False) for one in some] for some in offers]
            assignment = Assigner(peers.rank, peers.world, held).assign(taken)
            state = assignment.state(_ordered(held.values), peers.world, merged.tensors)
            layout = FileLayout.of(state, FilePath(self.path).name, merged.values)
            copies = snapshot(assignment.mine, copied=self.options.background)
            plan = KnownPlan.of(
                everything[0].token, peers.group, structure, shared, offers, assignment, held
            )
        if not overlaps:  # whose values would have to be compared in every save
            known_plan.keep(plan)
        return Ready(lambda _: layout, copies, unlike.buffers)


def _ordered(values: Mapping[Path, object]) -> dict[Path, object]:
    return {path: values[path] for path in sorted(values, key=lambda path: tuple(map(str, path)))}
