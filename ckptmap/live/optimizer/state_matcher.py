"""Match the optimizer state of a checkpoint with a live optimizer, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.formatting import counted, some
from ckptmap.errors import LoadError
from ckptmap.live.model.collective_errors import explain
from ckptmap.live.model.live_tensor import LiveTensor, local_boxes
from ckptmap.live.model.load_report import StateReport
from ckptmap.live.model.rank_group import rank_and_world
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.optimizer import flat_lowbit, lbfgs, rank_settings, state_placement
from ckptmap.live.optimizer.as_saved import AsSaved, SavedClasses
from ckptmap.live.optimizer.family import STEP
from ckptmap.live.optimizer.local_state import ParamOwner, owners
from ckptmap.live.optimizer.own_values import OwnValues
from ckptmap.live.optimizer.param_groups import ParamGroups
from ckptmap.live.optimizer.param_order_check import refuse_other_order
from ckptmap.live.optimizer.state_loader import Policy, StateLoader, StateNotes
from ckptmap.live.optimizer.stored_state import Source, derivation, step_of
from ckptmap.live.optimizer.unwrap import each_of, groups_of, is_offloaded, unwrapped
from ckptmap.live.rounding.carried import OTHER_BLOCKS, has_other_blocks, is_cut_anew
from ckptmap.optim.lowbit import LowBit
from ckptmap.optim.optimizer_reader import AS_GIVEN, BY_GROUPS
from ckptmap.storage.lazy_tensor import LazyTensor


@dataclass
class StatePlan:
    """The steps that load the optimizer's state, and the state that does not match.

    lossy  entries that cannot be loaded bit for bit, and why
    kept   True: every entry that was saved decoded is loaded from its own codes
    other_blocks
           moments of an optimizer that rounds by position, which another number of ranks would have in
           other blocks
    """

    steps: list[Callable[[TensorReader], None]] = field(default_factory=list)
    notes: StateNotes = field(default_factory=StateNotes)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    lossy: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    kept: bool = False
    other_blocks: list[str] = field(default_factory=list)

    def refuse(self, path: str, strict: bool) -> None:
        """Raise LoadError for state that must not be loaded: CKM502 where shapes differ, CKM506 where
        parameters and state do not match and `strict` is set."""
        if self.mismatched:
            raise LoadError(
                "CKM502",
                f"{path}: optimizer state does not fit: {some(self.mismatched)}",
                "build the model of this checkpoint, or load the model alone",
            )
        if strict and (self.missing or self.unexpected):
            seen = []
            if self.missing:
                seen.append(f"{len(self.missing)} missing: {some(self.missing)}")
            if self.unexpected:
                seen.append(f"{len(self.unexpected)} unexpected: {some(self.unexpected)}")
            raise LoadError(
                "CKM506",
                f"{path}: optimizer state does not match the optimizer's parameters,"
                f" {'; '.join(seen)}",
                "load with strict=False to take what matches, or the model alone",
            )

    def run(self, reader: TensorReader) -> None:
        """Run every step, after the weights are loaded."""
        try:
            for reads, steps in groupby(self.steps, lambda step: isinstance(step, StateLoader)):
                if not reads:
                    for step in steps:
                        reader.run(step)
                    continue
                loaders = [step for step in steps if isinstance(step, StateLoader)]
                sizes = (loader.param_nbytes for loader in loaders)
                for install in reader.run_all([loader.read for loader in loaders], sizes):
                    install()
        except Exception as error:
            loaded = f"{counted(len(self.notes.loaded), 'entry')} of the optimizer's state"
            explain(error, f"the weights are loaded, and {loaded}: load both again")
            raise

    def report(self) -> StateReport:
        notes = self.notes
        return StateReport(
            tuple(notes.loaded), tuple(notes.copied), tuple(notes.cast), tuple(notes.recoded),
            tuple(notes.derived),
            (*(f"{fqn}: the checkpoint has none" for fqn in self.missing), *notes.initialised),
            (*(f"{fqn}: not in the optimizer" for fqn in self.unexpected), *notes.left),
            (*self.settings, *self.choices),
        )  # fmt: skip


class StateMatcher:
    """Decides for every parameter how its state is loaded, without reading any state."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        targets: Sequence[LiveTensor],
        optimizer: object,
        precision: str,
        unfit: Collection[LiveTensor] = (),
    ) -> None:
        """`unfit` are the weights that keep their values, because the checkpoint's do not fit: their state begins anew."""
        self._checkpoint = checkpoint
        self._unfit_names = {target.fqn for target in unfit}
        self._optimizer = unwrapped(optimizer)
        self._owners = owners(self._optimizer, targets)
        self._tensors, self._values = checkpoint.optimizer, checkpoint.optimizer_nested_values
        encodings = (lazy.encoding_ for state in self._tensors.values() for lazy in state.values())
        schemes = frozenset(e.name for e in encodings if isinstance(e, LowBit))
        self._targets = targets
        self._policy = Policy(precision, schemes)
        flat = precision == "keep" and any(owner.is_flat for owner in self._owners)
        rank, _ = rank_and_world()
        self._exact = flat_lowbit.saved_entries(checkpoint, targets, rank) if flat else None
        self._used_exact: set[str] = set()
        self._placements = state_placement.recorded(checkpoint)
        self._own = OwnValues.recorded(checkpoint, targets)
        self._classes = SavedClasses(checkpoint, self._optimizer)
        self._plan = StatePlan()

    def plan(self) -> StatePlan:
        """Return the plan. Raises LoadError CKM506 where the state cannot be read, or has no FQNs."""
        plan = self._plan
        self._refuse_unnamed()
        refuse_other_order(self._checkpoint, self._owners, self._targets)
        stored = self._own.over(self._checkpoint.optimizer_groups)
        empty = rank_settings.without_params(
            self._checkpoint, [*groups_of(self._optimizer)], stored
        )
        groups = ParamGroups(self._owners, stored, self._tensors, empty, self._classes.is_same)
        grouped_fqns = {fqn for group in stored for fqn in group["params"]}
        used: set[str] = set()
        # First, since amsgrad and momentum decide which entries the state of a parameter has.
        plan.steps.append(lambda reader: groups.apply())
        if any(map(is_offloaded, each_of(self._optimizer))):
            plan.steps.append(self._refresh_copies)
        for owner in self._owners:
            family = owner.part.family
            sources = [family.named(self._source(target, used)) for target, _ in owner.members]
            own = self._own.state.get(owner.fqn, {})
            sources = [source and {**source, **own} for source in sources]
            sources = self._of_fitting(owner, sources)
            self._decide(owner, sources, groups, grouped_fqns)
        plan.steps.append(lambda reader: self._classes.restore_keys())
        vectors = lbfgs.Loading(self._checkpoint, self._owners)
        plan.steps.append(lambda reader: plan.notes.loaded.extend(vectors.run()))
        plan.missing += vectors.lacking
        plan.unexpected = [fqn for fqn in (*self._tensors, *self._values) if fqn not in used]
        plan.unexpected = list(dict.fromkeys(plan.unexpected))
        plan.settings = [*self._by_order(), *groups.settings, *plan.settings]
        plan.choices = groups.choices
        plan.lossy += groups.inexact
        plan.kept = self._exact is not None and self._used_exact == self._exact.keys()
        return plan

    def _by_order(self) -> list[str]:
        """Return the order by which numbered parameters got their FQNs, where no caller stated it."""
        order = self._checkpoint.optimizer_order
        is_stated = order in ("", AS_GIVEN, BY_GROUPS)
        return [] if is_stated else [f"parameters are named by {order}: the file has no names"]

    def _refuse_unnamed(self) -> None:
        reader = self._checkpoint.optimizer_reader
        if self._tensors or self._values or self._checkpoint.optimizer_groups:
            return
        reason, hint = reader.why or "it has none", "load the model alone"
        if reader.count > 1:
            hint += ", or give all optimizers in the order in which they were saved: load(path, model, [first, second])"
        elif reader.why:
            hint += f", or {self._naming()}"
        raise LoadError(
            "CKM506",
            f"{self._checkpoint.path}: no optimizer state can be loaded from it: {reason}",
            hint,
        )

    def _naming(self) -> str:
        """Return how a caller names the parameters. An adapter alone is opened with its model only."""
        adapted = (
            t for t in self._targets if t.adapted is not None and t.fqn not in self._checkpoint
        )
        if any(target.named_in(self._checkpoint) for target in adapted):
            root = str(Path(self._checkpoint.path).parent)
            return f"in the order of your optimizer: ckptmap.CheckpointManager({root!r}).restore(model, optimizer)"
        return "say which parameter is which: ckptmap.open(path, param_order=...)"

    def _source(self, target: LiveTensor, used: set[str]) -> Source:
        """Return the checkpoint's state of one parameter, under the first of its names."""
        first_state: dict[str, object] = {}
        for name in target.known:
            state = {**self._values.get(name, {}), **self._tensors.get(name, {})}
            if state:
                used.add(name)
                first_state = first_state or state
        return first_state

    def _of_fitting(self, owner: ParamOwner, sources: Sequence[Source]) -> list[Source]:
        """Return the state of the tensors of a parameter, none for one whose weight is not loaded."""
        found = list(sources)
        for at, (target, _) in enumerate(owner.members):
            if found[at] and target.fqn in self._unfit_names:
                found[at] = {}
                self._plan.notes.initialised.append(f"{target.fqn}: the weight does not fit")
                self._plan.lossy.append(f"{target.fqn}: state begins anew")
        return found

    def _decide(
        self,
        owner: ParamOwner,
        sources: Sequence[Source],
        groups: ParamGroups,
        grouped_fqns: set[str],
    ) -> None:
        plan = self._plan
        plan.missing += _unlisted(owner, sources, grouped_fqns)
        if not any(sources):
            plan.steps.append(lambda reader: _forget(owner))
            return
        if owner.part.is_elsewhere or (owner.is_flat and not owner.part.param.numel()):
            return  # all of it is on other ranks: this rank does not step it
        as_built, (owner, sources, beside, extra) = owner, self._classes.of_param(owner, sources)
        if isinstance(owner.part.family, AsSaved):
            self._note_other_shapes(as_built, sources)
        placed = state_placement.of_param(self._placements, owner)
        if beside is not None:
            loader = StateLoader(beside, extra, self._policy, plan.notes, placements=placed)
            if not any(sources) and not owner.part.family.needs(owner.part):
                plan.steps += [lambda reader: _forget(owner), loader]
                return
        betas = groups.betas(owner)
        reason = self._unfit(owner, sources, betas) or groups.why_momentum_differs(owner)
        if reason:
            plan.notes.initialised.append(f"{owner.fqn}: {reason}")
            plan.lossy.append(f"{owner.fqn}: state begins anew")
            plan.steps.append(lambda reader: _forget(owner))
            return
        _require_replicas(owner, sources)
        self._foresee(owner, sources)
        plan.lossy += [
            f"{owner.fqn}.{name}: placed in a way that is not recorded"
            for name, how in placed.items()
            if how == state_placement.UNKNOWN
        ]
        exact = self._exact_entries_of(owner)
        plan.steps.append(
            StateLoader(owner, sources, self._policy, plan.notes, betas, exact, placed)
        )
        if beside is not None:
            plan.steps.append(loader)

    def _exact_entries_of(self, owner: ParamOwner) -> Mapping[str, flat_lowbit.FlatCodes]:
        exact = (self._exact or {}).get(owner.fqn, {}) if owner.is_flat else {}
        if not flat_lowbit.fits(exact, owner.part):
            return {}
        self._used_exact.add(owner.fqn)
        return exact

    def _unfit(self, owner: ParamOwner, sources: Sequence[Source], betas: Sequence[float]) -> str:
        """Return why this optimizer cannot use the state; empty: it can. Notes shapes that differ."""
        family = owner.part.family
        for (target, _), source in zip(owner.members, sources, strict=True):
            for name in family.needs(owner.part) if source else ():
                origin, _ = derivation(name, source, betas)
                lazy = source.get(origin)
                if not isinstance(lazy, LazyTensor):
                    kind = type(owner.part.optimizer).__name__
                    return f"{kind} needs {name}, the checkpoint has {', '.join(source)}"
                self._note_shapes(owner, target, source, {name: origin})
        return ""

    def _note_other_shapes(self, owner: ParamOwner, sources: Sequence[Source]) -> None:
        """Note the shapes of entries that are like the parameter in a trial step, where one can be made, and
        of another shape in the checkpoint."""
        with suppress(LoadError):
            for (target, _), source in zip(owner.members, sources, strict=True):
                names = owner.part.family.needs(owner.part) if source else ()
                self._note_shapes(owner, target, source, {name: name for name in names})

    def _note_shapes(
        self, owner: ParamOwner, target: LiveTensor, source: Source, origins: Mapping[str, str]
    ) -> None:
        """Note the entries that must have the parameter's shape and have another; each is read from the entry
        that `origins` names."""
        shape = tuple(target.tensor.shape)
        for name, origin in origins.items():
            lazy = source.get(origin)
            if not isinstance(lazy, LazyTensor) or lazy.shape == shape:
                continue
            if owner.part.family.like_param(owner.part, name):
                self._plan.mismatched.append(
                    f"{target.fqn}.{name}: model {list(shape)}, checkpoint {list(lazy.shape)}"
                )

    def _foresee(self, owner: ParamOwner, sources: Sequence[Source]) -> None:
        """Note the entries that will not be the same bits, as far as headers show."""
        family = owner.part.family
        self._foresee_shared(owner, sources)
        for (target, _), source in zip(owner.members, sources, strict=True):
            if not source:
                self._plan.lossy.append(f"{target.fqn}: state begins anew")
                continue
            unused = self._unused(owner, source)
            self._plan.lossy += [f"{target.fqn}.{name}: not loaded" for name in unused]
            for name in family.needs(owner.part):
                lazy = source.get(name)
                dtype = str(family.dtype_of(owner.part, name)).removeprefix("torch.")
                if not isinstance(lazy, LazyTensor):
                    self._plan.lossy.append(f"{target.fqn}.{name}: derived")
                elif has_other_blocks(owner.part, target, name, lazy):
                    self._plan.other_blocks.append(f"{target.fqn}.{name}")
                    if is_cut_anew(owner.part):
                        self._plan.lossy.append(f"{target.fqn}.{name}: {OTHER_BLOCKS}")
                elif not family.mixed and (lazy.encoding != "dense" or lazy.dtype != dtype):
                    was = lazy.dtype if lazy.encoding == "dense" else lazy.encoding
                    self._plan.lossy.append(f"{target.fqn}.{name}: {was} becomes {dtype}")

    def _unused(self, owner: ParamOwner, source: Source) -> list[str]:
        """Return the entries that the optimizer has no place for."""
        family = owner.part.family
        if isinstance(family, AsSaved):
            return []
        used = {*family.needs(owner.part), *family.scratch}
        if family.counts_steps:
            used.add(STEP)
        plain = family.name == "other"  # it takes plain values of the names that a trial step shows
        return [
            name
            for name, value in source.items()
            if name not in used and (isinstance(value, LazyTensor) or not plain)
        ]

    def _foresee_shared(self, owner: ParamOwner, sources: Sequence[Source]) -> None:
        """Note step counts that differ between the tensors of a flat parameter, which counts once."""
        if len(sources) < 2:
            return  # no count is read here
        counts = sorted({number for number in map(step_of, sources) if number is not None})
        if len(counts) > 1:
            counts_text = ", ".join(f"{number:g}" for number in counts)
            problem = (
                f"{owner.fqn}.step: its flat parameter counts one, the checkpoint has {counts_text}"
            )
            self._plan.settings.append(f"{problem}; is {counts[-1]:g}")
            self._plan.lossy.append(problem)

    def _refresh_copies(self, reader: TensorReader) -> None:
        """Copy the loaded weights to CPUOffloadOptimizer's own copies, which it steps."""
        import torch

        with torch.no_grad():
            for optimizer in filter(is_offloaded, each_of(self._optimizer)):
                for device, host in optimizer.param_d2h_map.items():
                    host.copy_(device)


def _unlisted(owner: ParamOwner, sources: Sequence[Source], grouped_fqns: set[str]) -> list[str]:
    """Return the tensors without state that are in no group of the checkpoint; a tensor that is in one
    had no state yet when it was saved."""
    if not owner.part.model.requires_grad:
        return []
    members = zip(owner.members, sources, strict=True)
    return [
        target.fqn
        for (target, _), source in members
        if not source and not grouped_fqns & {*target.known}
    ]


def _require_replicas(owner: ParamOwner, sources: Sequence[Source]) -> None:
    """Raise RunError CKM310 where ranks saved different values of one entry."""
    for (target, _), source in zip(owner.members, sources, strict=True):
        shape = tuple(target.tensor.shape)
        for lazy in source.values():
            if isinstance(lazy, LazyTensor):
                boxes = (box for box, _ in local_boxes(target)) if lazy.shape == shape else None
                lazy.require_replicas(boxes)


def _forget(owner: ParamOwner) -> None:
    """Drop the state of a parameter; the optimizer makes it at its next step."""
    owner.part.optimizer.state.pop(owner.part.param, None)
