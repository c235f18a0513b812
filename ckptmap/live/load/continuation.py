"""The rest of a resumed run: scheduler, random streams, modules' extra state, and whether training
goes on bit for bit as it would have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.module_extra_state import as_live
from ckptmap.core.formatting import counted, some
from ckptmap.core.state_paths import PER_RANK, nest
from ckptmap.errors import LoadError
from ckptmap.live.load import pending_gradients
from ckptmap.live.load.load_plan import LoadPlan
from ckptmap.live.load.scheduler_state import SchedulerState, pop_dict
from ckptmap.live.model import (
    dropout,
    integer_keys,
    module_extra_state,
    plain_attributes,
    rng_state,
    stateful,
    unsaved_buffers,
)
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.load_report import LoadReport
from ckptmap.live.model.rank_group import rank_and_world
from ckptmap.live.model.stateful import SavedStates, Stateful
from ckptmap.live.optimizer import (
    beside_params,
    flat_lowbit,
    gradient_hooks,
    gradients,
    lbfgs,
    own_values,
    rank_settings,
    run_settings,
)
from ckptmap.live.optimizer.state_matcher import StatePlan
from ckptmap.live.optimizer.unwrap import unwrapped
from ckptmap.live.rounding.continuing import RoundingContinuation
from ckptmap.storage.own_files import MANIFEST

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.optimizer_types import Scheduler


NO_STREAMS = "no random streams are recorded for this rank and world size"
OTHER_DROPOUT = "dropout draws other numbers than the saved run would"
NEW_STREAMS = "random streams are made anew"
"""Reasons why training does not go on bit for bit, of the streams alone: who restores them later drops these."""


class Continuation:
    """What a resumed run goes on with beside weights and optimizer state: the scheduler, the modules'
    extra state and the random streams. `judge` runs before anything is touched, `finish` last."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: torch.nn.Module,
        optimizer: object,
        scheduler: Scheduler | None,
        targets: Sequence[LiveTensor],
        objects: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._model = model
        self._objects = objects
        self._targets = targets
        taken = () if objects is None else objects.values()
        self._unsaved = [] if optimizer is None else beside_params.unsaved(optimizer, taken)
        self._unsaved_hooks = [
            *gradient_hooks.unsaved(model, taken),
            *module_extra_state.unsaved_keys(model),
        ]
        self._optimizer = None if optimizer is None else unwrapped(optimizer)
        self._rank, world = rank_and_world()
        self._dropping = dropout.names(model)
        self._live = run_settings.describe(model, self._optimizer, targets, world)
        values = {**checkpoint.plain, **checkpoint.other}
        everything = nest(module_extra_state.without(values, checkpoint))
        saved = pop_dict(everything, run_settings.KEY)
        as_many = saved.get("world_size") == world
        self._saved = rank_settings.of_rank(saved, self._rank) if as_many else saved
        own = f"rank{self._rank}" if as_many else ""
        self._scheduler = SchedulerState.of(everything, scheduler, self._saved, own)
        self._rounding = RoundingContinuation()
        self._rounding_note = ""
        self._takers = module_extra_state.setters(model)
        self._states, self._of_other_ranks = module_extra_state.of_this_rank(
            checkpoint, pop_dict(everything, module_extra_state.OF_RANKS), own,
            None if how_renamed(checkpoint) else self._saved.get(module_extra_state.NAMES),
            self._takers,
        )  # fmt: skip
        for key in (rng_state.KEY, flat_lowbit.KEY, lbfgs.KEY, beside_params.KEY, own_values.KEY):
            everything.pop(key, None)
        self._per_rank = self._own_extra(pop_dict(everything, PER_RANK))
        everything.pop(gradients.PENDING, None)
        self._stateful = SavedStates(
            pop_dict(everything, stateful.KEY) if self._saved else {},
            own,
            [everything, self._per_rank],
        )
        self._extra: dict[str, object] = everything
        self.gradients = pending_gradients.plan(checkpoint, targets, self._rank, as_many)
        self.inexact: list[str] = []
        self._notes = [
            *run_settings.mode_note(self._saved, self._live),
            *pending_gradients.counting_note(self.gradients.names, optimizer),
        ]
        self._is_exact = False
        self._streams: dict[str, object] = {}
        self._fresh: bytes | None = None
        self._streams_note = ""

    def _own_extra(self, by_rank: Mapping[str, object]) -> Mapping[str, object]:
        """Return what the rank of this number gave as `extra_per_rank`; empty where other ranks saved."""
        saved = self._saved.get("world_size", len(by_rank))
        if not by_rank or saved != self._live["world_size"]:
            return {}
        own = by_rank.get(f"rank{self._rank}")
        return own if isinstance(own, Mapping) else {}

    # ------------------------------------------------------------------ before

    def refuse(self, strict: bool) -> None:
        """Raise for an object of the caller's whose state is not in the checkpoint, or another's."""
        self._stateful.refuse(self._objects, self._checkpoint.path, strict)
        self._scheduler.refuse()

    def judge(self, plan: LoadPlan, state: StatePlan | None, precision: str) -> None:
        """Collect the reasons why training would not go on bit for bit."""
        self._live["layout"] = run_settings.layout_digest(self._targets, plan.becomes)
        own = self._own(self._saved)
        self._rounding = RoundingContinuation.of(self._optimizer, own, self._live)
        self._rounding_note = self._rounding.note()
        self._notes = [*self._notes, *self._rounding.caveats()]
        self.inexact += self._changed_settings(own)
        self.inexact += self._rounding.reasons([] if state is None else state.other_blocks)
        self.inexact += _changed_weights(plan)
        if self._saved.get("decoded") and not (state is not None and state.kept):
            self.inexact.append("codes of moments were decoded when it was saved")
        if state is not None:
            self.inexact += _changed_state(state, precision)
        elif self._checkpoint.optimizer_groups:
            self.inexact.append("the optimizer state is not loaded: no optimizer was given")
        self.inexact += self._scheduler.reasons()
        self.inexact += [f"no {name}" for name in self._takers if name not in self._states]
        self.inexact += [f"nobody takes {n}" for n in self._states if n not in self._takers]
        self.inexact += [
            f"each rank had its own {name}, that of the lowest is taken"
            for name in self._of_other_ranks
        ]
        self.inexact += [
            f"nobody takes the state of {n!r}" for n in self._stateful.unused(self._objects)
        ]
        self.inexact += [f"no state of {name!r}" for name in self._stateful.absent(self._objects)]
        rounds = bool((self._live.get("optimizer") or {}).get("rounds"))
        why, notes = self._stateful.judged(self._objects, dropout.drawing(self._dropping, rounds))
        self.inexact, self._notes = [*self.inexact, *why], [*self._notes, *notes]

    def _changed_settings(self, own: Mapping[str, object]) -> Iterator[str]:
        """Yield the settings of the run that differ from the recorded ones."""
        if self._saved and (how := how_renamed(self._checkpoint)):
            yield f"names were changed ({how}), and settings are recorded by the saved names"
            saved, live = map(run_settings.without_names, (own, self._live))
            yield from run_settings.differences(saved, live, self._rounding.settled)
        elif self._saved:
            yield from run_settings.differences(own, self._live, self._rounding.settled)
        else:
            yield "the checkpoint records no settings: ckptmap.save did not write it"
        if self._saved and not self._checkpoint.has_manifest:
            yield f"its {MANIFEST} is missing, so that nothing proves that it is as it was saved"
        if isinstance(drifted := self._saved.get("buffers"), list) and drifted:
            yield f"each rank had its own of {counted(len(drifted), 'buffer')}, one was saved"
        if self._saved.get("world_size") == self._live["world_size"]:
            was = unsaved_buffers.of_rank(self._saved.get(unsaved_buffers.KEY), self._rank)
            if was:
                yield from unsaved_buffers.changed(was, unsaved_buffers.described(self._model, was))
        yield from plain_attributes.changed(self._saved.get(plain_attributes.KEY), self._model)
        if text := self._saved.get(run_settings.WITHOUT):
            yield f"gradients of an accumulation were left out when it was saved ({text})"
        yield from (f"gradient of {name}" for name in self.gradients.left)
        yield from self._of_other_shards()
        forms = self._saved.get(run_settings.FORMS)
        for name in forms if isinstance(forms, list | tuple) else ():
            yield f"{name} is no longer of the class that it was when it was saved"
        was_left = self._saved.get(run_settings.UNSAVED)
        texts = was_left if isinstance(was_left, list | tuple) else ()
        yield from (f"optimizer: {text}, which is not saved" for text in (*texts, *self._unsaved))
        yield from self._unsaved_hooks
        if self._saved.get("rounded_scales"):
            yield "a forward on the CPU rounded the scales of quantized weights before it was saved"

    def _of_other_shards(self) -> Iterator[str]:
        """Yield what of the optimizer's values is another rank's, or of other elements than this rank has."""
        unlike = self._saved.get(run_settings.UNLIKE)
        own = own_values.OwnValues.recorded(self._checkpoint, self._targets).titles()
        for name in unlike if isinstance(unlike, list | tuple) else ():
            if name not in own:
                yield f"each rank had its own {name}, one was saved"

    def _own(self, saved: Mapping[str, object]) -> Mapping[str, object]:
        """Return the recorded settings with the layout of this rank alone."""
        layouts = saved.get("layout")
        if isinstance(layouts, list) and self._rank < len(layouts):
            return {**saved, "layout": layouts[self._rank]}
        return {key: value for key, value in saved.items() if key != "layout"}

    def choose_streams(self, wanted: str, seed: int, exact: bool) -> None:
        """Decide where this rank's random streams come from.

        Raises LoadError CKM507 where `exact` is asked for and impossible, CKM511 where `wanted` is
        "recorded" and no state is recorded for this rank."""
        own = rng_state.recorded(self._checkpoint.other, self._checkpoint.plain, self._rank)
        fits = bool(own) and self._saved.get("world_size") == self._live["world_size"]
        if not fits and wanted != "leave" and not self._rounding.goes_on_elsewhere:
            self.inexact.append(NO_STREAMS)
        if not fits and self._dropping:
            names = f"{counted(len(self._dropping), 'module')}: {some(self._dropping, 3)}"
            self.inexact.append(f"{OTHER_DROPOUT} ({names})")
        rounds = bool((self._live.get("optimizer") or {}).get("rounds"))
        if wanted in ("recorded", "auto") and fits:
            self._streams, self._streams_note = own, "restored"
            if "numpy" not in own:
                self.inexact.append("no random state of NumPy is recorded")
            lacking = rng_state.not_recorded(own, self._live["devices"])
            self.inexact += [f"no random stream of {kind} is recorded" for kind in lacking]
        elif wanted == "recorded":
            raise LoadError(
                "CKM511",
                f"{self._checkpoint.path}: has no random streams of rank {self._rank} of"
                f" {self._live['world_size']}",
                "load with random='fresh', or with the world size of the save",
            )
        elif wanted == "fresh" or (wanted == "auto" and rounds):
            self._fresh = self._base(seed)
            self.inexact.append(NEW_STREAMS)
        else:
            self._streams_note = "left as they are"
        if wanted == "leave":
            self.inexact.append("random streams are left as they are")
        self.inexact, self._is_exact = list(dict.fromkeys(self.inexact)), exact
        if exact and self.inexact:
            raise LoadError(
                "CKM507",
                f"{self._checkpoint.path}: training cannot go on bit for bit: "
                + some(self.inexact),
                "build the model with the saved names, or load without exact=True"
                if how_renamed(self._checkpoint)
                else "restore these settings, or load without exact=True",
            )

    def _base(self, seed: int) -> bytes:
        """Return the base of every rank's fresh streams: the recorded state of rank 0, and the seed."""
        import torch

        first = rng_state.recorded(self._checkpoint.other, self._checkpoint.plain, 0).get("cpu")
        recorded = first.numpy().tobytes() if isinstance(first, torch.Tensor) else b""
        return recorded + seed.to_bytes(8, "big", signed=True)

    # ------------------------------------------------------------------ after

    def finish(self) -> None:
        """Restore the seed of rounding, modules' extra state, the scheduler, and last the random streams:
        the steps before may draw random numbers."""
        self._rounding.finish()
        for name, module in self._takers.items():
            if name in self._states:
                module.set_extra_state(_read(self._states[name]))
        self._scheduler.load()
        self._stateful.load(self._objects, _read, self._is_exact)
        if self._streams:
            rng_state.restore(self._streams)
        elif self._fresh is not None:
            shard = rng_state.shard_of(self._targets)
            made = rng_state.fresh(self._fresh, shard)
            self._streams_note = f"fresh, seed {made} for shard {list(shard)}"

    def report(self, report: LoadReport, state: StatePlan | None) -> LoadReport:
        """Return the report of the weights, with all that was restored beside them."""
        step = self._extra.get("step")
        extra = cast(
            dict[str, object], _read({k: v for k, v in self._extra.items() if k != "step"})
        )
        per_rank = cast(Mapping[str, object], _read(self._per_rank))
        lost = [name for name in self._takers if name not in self._states]
        strange = [name for name in self._states if name not in {*self._takers, *report.unexpected}]
        return replace(
            report, missing=(*report.missing, *lost), unexpected=(*report.unexpected, *strange),
            state=None if state is None else state.report(), streams=self._streams_note,
            inexact=tuple(self.inexact), step=step if isinstance(step, int) else None, extra=extra,
            extra_per_rank=per_rank, gradients=tuple(self.gradients.names),
            rounding=self._rounding_note, notes=tuple(self._notes),
        )  # fmt: skip


def refuse_changes(report: LoadReport, path: str) -> None:
    """Raise LoadError CKM507 for a load that was to be exact, and left out or changed something. What
    headers show is refused before; this is what only the load itself has shown."""
    if report.changes:
        raise LoadError(
            "CKM507",
            f"{path}: the load was not exact, although nothing showed it before it: "
            + "; ".join(report.changes),
            "the model and the optimizer are loaded all the same: go on if these differences do not matter"
            " to you, or load without exact=True",
        )


def how_renamed(checkpoint: Checkpoint) -> str:
    """Return how names were changed, as arguments; "": they are those of the file."""
    texts = [one.arguments for one in checkpoint.renamings]
    if checkpoint.translation is not None:
        texts.append(checkpoint.translation.choice.text)
    return ", ".join(texts)


def _changed_weights(plan: LoadPlan) -> Iterator[str]:
    """Yield how many weights will not be the saved ones, by what the load does with them."""
    for what, items in (
        ("cast", plan.cast),
        ("decoded", plan.decoded),
        ("quantized here", plan.quantized),
        ("missing", plan.missing),
        ("left as they are", plan.left),
        ("not loaded", plan.mismatched),
    ):
        if items:
            yield f"{counted(len(items), 'weight')} {what}"


def _changed_state(state: StatePlan, precision: str) -> Iterator[str]:
    """Yield the entries of optimizer state that will not be the saved ones."""
    yield from (*state.lossy, *state.choices)
    yield from (f"no state of {name}" for name in state.missing)
    yield from (f"state of {name} is not loaded" for name in state.unexpected)
    if precision != "keep":
        yield f"precision={precision!r} may change moments"


def _read(value: object) -> object:
    """Return nested values with their lazy tensors read."""
    from ckptmap.storage.lazy_tensor import LazyTensor

    if isinstance(value, LazyTensor):
        return value.read()
    if isinstance(value, Mapping):
        return integer_keys.restored({key: _read(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(map(_read, value))
    return as_live(value)
