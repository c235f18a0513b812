"""load(): any checkpoint into a live model, whatever wraps it; each rank reads only its own shards.

    find the model's tensors -> match them with the checkpoint -> match the optimizer's state
    -> judge the continuation -> read -> restore scheduler and random streams

Everything that can be refused is refused before the first parameter is touched, on all ranks or on
none: the ranks that hold a model together agree on errors after planning and at the end. They
communicate nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptmap.checkpoint import base_record
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.rename import renamed
from ckptmap.core import argument_checks
from ckptmap.core.signatures import spelled_out
from ckptmap.errors import ArgumentError
from ckptmap.execution.check_source import begin as begin_check
from ckptmap.live.load import check_source
from ckptmap.live.load.continuation import Continuation, refuse_changes
from ckptmap.live.load.load_plan import LoadPlan
from ckptmap.live.load.mending_names import arguments_hint, other_models_hint
from ckptmap.live.load.over_base import with_bases
from ckptmap.live.load.same_checkpoint import content_facts
from ckptmap.live.load.tensor_matcher import TensorMatcher
from ckptmap.live.model import (
    loaded_bases,
    module_extra_state,
    name_scheme,
    peft,
    several_models,
    stateful,
)
from ckptmap.live.model.base_names import without
from ckptmap.live.model.caller_state import cpu_outside_inference_mode
from ckptmap.live.model.collective_errors import agreed, peer_groups
from ckptmap.live.model.find_targets import find_targets
from ckptmap.live.model.live_tensor import LiveTensor, devices_of
from ckptmap.live.model.load_report import LoadReport
from ckptmap.live.model.loaded_bases import LoadedBase
from ckptmap.live.model.rank_group import said_if_lost
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.optimizer import listed_states, rank_settings
from ckptmap.live.optimizer.several_optimizers import check_scheduler, one_scheduler
from ckptmap.live.optimizer.state_matcher import StateMatcher, StatePlan
from ckptmap.live.options import LoadOptions
from ckptmap.live.quantized import torchao_lowbit_fix
from ckptmap.live.save.save_handle import settle_save_of
from ckptmap.storage.files import verified_copies
from ckptmap.storage.source_changes import require_unchanged

if TYPE_CHECKING:
    from typing import Unpack

    import torch

    from ckptmap.live.model.several_models import Models
    from ckptmap.live.options import LoadKeywords, Optimizers, Schedulers


HALF_LOADED = "some ranks may have loaded their shards, others not: load it again, on all ranks"


@spelled_out(LoadOptions)
def load(
    path: str | os.PathLike[str] | Checkpoint,
    model: Models,
    optimizer: Optimizers | None = None,
    scheduler: Schedulers | None = None,
    **keywords: Unpack[LoadKeywords],
) -> LoadReport:
    """Load a checkpoint of any setup into a plain, DDP, compiled, FSDP1 or FSDP2 model, with its
    optimizer and scheduler if they are given. A save of this process that still writes `path` is waited for.

    Several models, optimizers and schedulers are dicts of them by name, as in `ckptmap.save`, or lists, as in a
    Lightning checkpoint. One of several models is opened by its name: `ckptmap.open(path, root="policy")`.
    A stage of a pipeline, or a list of a rank's stages, takes its part; other stages than saved it with `strict=False`.

    Every rank of the model calls it; each reads the bytes of its own shards only. Dense weights are
    filled in place (created, where they are on meta) in the model's dtype. An NF4 weight of the
    checkpoint becomes torchao's NF4Tensor where the live one is frozen and belongs to a linear
    layer; where it cannot be cut for the mesh it is decoded into the dense shard and listed, or
    refused with `strict_encoding`. A dense weight is quantized where the live one is NF4. Under DDP
    all replicas read the same bytes, so NF4 weights are equal although DDP does not broadcast them.

    A model that peft has wrapped takes checkpoints of its base, by the base's names, and its
    adapter's directory: the report's `left` lists the other half, which keeps its values.

    Where a prefix is all that keeps names from matching, CKM501 says which argument mends it. Names of
    another scheme become the model's where a mapping file knows both; the report's `names` says so.
    Optimizer state is matched by FQN, whatever optimizer wrote it, and put into the classes of the
    live one: moments are copied, codes too where scheme and block boundaries agree, else decoded
    and encoded anew, with the error in the report. Hyper-parameters become the checkpoint's; the
    report lists those that were different.

    `ckptmap.live.options.LoadOptions` describes the keywords.
    Raises LoadError before anything is touched: CKM501 names or meta tensors do not match, CKM502
    shapes differ, CKM503 an NF4 weight is trainable here, CKM504 cannot be cut, CKM505 a kind of
    model that it cannot load into, CKM506 state and parameters do not match, CKM507 not exact,
    CKM508 an optimizer of another model, CKM511 random streams, CKM512 no place for nf4="bnb",
    CKM514 and CKM515 a base or an adapter that does not belong to peft's model, CKM208 tied here
    but different in the checkpoint, CKM206 a pattern of `drop` matches nothing; RunError CKM310 ranks saved other values of one tensor;
    RunError CKM307 a rank died or did not come in time; ArgumentError CKM516; SourceError where the checkpoint cannot be read.
    """
    with ExitStack() as closing:
        one = several_models.as_one(model)
        closing.enter_context(cpu_outside_inference_mode(one))
        with said_if_lost("the model is as it was"):
            peers = peer_groups(one, _timeout(keywords))
            with agreed(peers) as facts:
                options = LoadOptions.of(keywords)
                _check(path, model, optimizer, scheduler, options)
                planned = _plan(path, one, optimizer, scheduler, options, facts, closing)
        verify = "full" if options.exact else options.verify
        closing.callback(setattr, planned.checkpoint.files.sums, "is_on", True)
        with said_if_lost(HALF_LOADED):
            with agreed(peers):
                begin_check(planned.checkpoint, verify)
                planned.run()
            with agreed(peers):
                check = check_source.finish(planned.checkpoint, peers, verify)
                planned.finish()
                report = planned.report(options.exact)
    return replace(report, source=check)


@dataclass(frozen=True)
class PlannedLoad:
    """A load that passed every check.

    buffers_on_meta  names of non-persistent buffers on meta, which no checkpoint has
    names            the schemes of names that were translated; empty: none were
    base             what to remember of the place that the weights came from
    part             names of the weights that the checkpoint holds over its base; empty: it has none
    """

    checkpoint: Checkpoint
    reader: TensorReader
    weights: LoadPlan
    state: StatePlan | None
    continuation: Continuation
    buffers_on_meta: Sequence[str]
    names: str
    base: LoadedBase | None
    part: frozenset[str]

    def run(self) -> None:
        """Fill the model and the optimizer's state."""
        import torch

        whole = verified_copies(self.checkpoint.files)
        with torch.no_grad(), whole, closing(self.reader):
            self.weights.run(self.reader)
            if self.state is not None:
                self.state.run(self.reader)
            self.continuation.gradients.run(self.reader)
            require_unchanged(
                self.checkpoint.fingerprints,
                self.checkpoint.files.mounts,
                "the model has values of both: load it again, all of it",
            )

    def finish(self) -> None:
        """Restore modules' extra state, the scheduler and the random streams."""
        import torch

        with torch.no_grad():
            self.continuation.finish()
        fingerprints = self.checkpoint.fingerprints
        loaded_bases.remember(self.weights.targets, self.base, self.part, fingerprints)

    def report(self, exact: bool) -> LoadReport:
        """Return the report. Raises LoadError CKM507 where `exact` was promised and something has changed."""
        report = self.weights.report(self.reader, self.buffers_on_meta)
        how = ", ".join(one.arguments for one in self.checkpoint.renamings)
        report = replace(report, names=self.names, renamed=how)
        report = self.continuation.report(report, self.state)
        if exact:
            refuse_changes(report, self.checkpoint.path)
        return report


def _settle_save_of(path: str | os.PathLike[str] | Checkpoint) -> None:
    if not isinstance(path, Checkpoint):
        settle_save_of(path)


def _timeout(keywords: LoadKeywords) -> float | None:
    """Return the timeout of a call; None for a value that means nothing, which is refused later."""
    try:
        argument_checks.timeout(keywords.get("timeout"))
    except ArgumentError:
        return None
    return keywords.get("timeout")


def _check(
    path: str | os.PathLike[str] | Checkpoint,
    model: Models,
    optimizer: object,
    scheduler: object,
    options: LoadOptions,
) -> None:
    """Raise ArgumentError CKM516 for an argument that means nothing."""
    if not isinstance(path, Checkpoint):
        argument_checks.path("path", path)
    several_models.check("model", model)
    argument_checks.optimizer(optimizer)
    check_scheduler(scheduler, "load_state_dict")
    stateful.check(options.stateful)
    options.check()


def _plan(
    path: str | os.PathLike[str] | Checkpoint,
    model: torch.nn.Module,
    optimizer: Optimizers | None,
    scheduler: Schedulers | None,
    options: LoadOptions,
    facts: dict[str, str],
    closing: ExitStack,
) -> PlannedLoad:
    """Return the plan of a load, decided from headers. Raises for all that can be refused.

    facts    receives the fingerprints of files, which must be equal on every rank
    closing  will close the checkpoint that is opened here
    """
    if options.fix and optimizer is not None:
        torchao_lowbit_fix.apply()
    _settle_save_of(path)
    targets, buffers_on_meta = find_targets(model)
    checkpoint, differences = peft.open_base_or_adapter(path, model, options.strict)
    if checkpoint is not path:
        closing.callback(checkpoint.close)
    facts |= content_facts(checkpoint)
    stored = list(checkpoint)
    part = _part(checkpoint, options)
    checkpoint = with_bases(
        checkpoint, model, targets, options.base, options.drop, options.renaming
    )
    named = name_scheme.by_model_names(checkpoint, model, targets)
    checkpoint = named.checkpoint
    devices = devices_of(targets)
    reader = TensorReader(checkpoint.files, options.memory(bool(devices)), devices)
    closing.callback(reader.close)
    reader.prepare(target.local.nbytes for target in targets)
    weights = TensorMatcher(checkpoint, reader, targets, options).plan()
    _leave_to_modules(weights, model, named.unmapped)
    of_others = _of_other_ranks(weights, checkpoint, targets)
    weights.refuse(
        checkpoint.path, options.strict, options.strict_encoding, buffers_on_meta,
        lambda: (
            other_models_hint(checkpoint, model)
            or arguments_hint(stored, targets, options.renaming)
        ),
    )  # fmt: skip
    checkpoint = listed_states.of_all(checkpoint, model, optimizer, targets)
    state = _plan_state(checkpoint, targets, optimizer, options, of_others, weights.unfit)
    continuation = Continuation(
        checkpoint, model, optimizer, one_scheduler(scheduler), targets, options.stateful
    )
    continuation.refuse(options.strict)
    continuation.inexact += differences
    continuation.judge(weights, state, options.precision)
    continuation.choose_streams(options.random, options.seed, options.exact)
    require_unchanged(
        checkpoint.fingerprints, checkpoint.files.mounts, "open it anew; the model is as it was"
    )
    return PlannedLoad(
        checkpoint, reader, weights, state, continuation, buffers_on_meta, named.names,
        _base(checkpoint, model, options) if _can_be_opened_again(path) else None, part,
    )  # fmt: skip


def _can_be_opened_again(path: str | os.PathLike[str] | Checkpoint) -> bool:
    """Return whether the path, the root and the changes of names of a checkpoint are all of it."""
    if not isinstance(path, Checkpoint):
        return True
    return bool(path.fingerprints) and path.translation is None and path.merged is None


def _base(
    checkpoint: Checkpoint, model: torch.nn.Module, options: LoadOptions
) -> LoadedBase | None:
    """Return what a later save of the trained weights alone records as its base: of such a save, its
    own base, if it has one."""
    several, bases = bool(several_models.names_of(model)), base_record.recorded(checkpoint)
    if not bases:
        return loaded_bases.of_checkpoint(checkpoint, options.drop, several)
    if len(bases) > 1 or (checkpoint.renamings and [*bases] != [""]):
        return None
    ((head, base),) = bases.items()
    place = base.places(checkpoint.path)[0] if options.base is None else os.fspath(options.base)
    names = (*base.names, *checkpoint.renamings)
    return LoadedBase(place, {}, names, tuple(base.drop), several and not head, base.root)


def _part(checkpoint: Checkpoint, options: LoadOptions) -> frozenset[str]:
    """Return the names of the weights that a checkpoint over a base holds itself; none where it has none."""
    if not base_record.recorded(checkpoint):
        return frozenset()
    return frozenset(without(renamed(checkpoint, options.renaming, lenient=True), options.drop))


def _leave_to_modules(weights: LoadPlan, model: torch.nn.Module, unmapped: Sequence[str]) -> None:
    """Drop the names that modules load by `set_extra_state` from the unexpected ones."""
    taken = module_extra_state.setters(model)
    weights.unexpected = [name for name in (*weights.unexpected, *unmapped) if name not in taken]


def _of_other_ranks(
    weights: LoadPlan, checkpoint: Checkpoint, targets: Sequence[LiveTensor]
) -> frozenset[str]:
    """Remove the weights of other ranks, as the stages of a pipeline have, from the unexpected ones, and return their
    names: a rank that has all that it had when it saved the checkpoint has no use for them."""
    names = frozenset(weights.unexpected)
    if not names or not rank_settings.is_same_layout(checkpoint, targets, weights.becomes):
        return frozenset()
    weights.unexpected = []
    return names


def _plan_state(
    checkpoint: Checkpoint, targets: Sequence[LiveTensor], optimizer: Optimizers | None,
    options: LoadOptions, of_others: frozenset[str], unfit: Sequence[LiveTensor],
) -> StatePlan | None:  # fmt: skip
    if optimizer is None:
        return None
    state = StateMatcher(checkpoint, targets, optimizer, options.precision, unfit).plan()
    state.unexpected = [name for name in state.unexpected if name not in of_others]
    state.refuse(checkpoint.path, options.strict)
    return state
