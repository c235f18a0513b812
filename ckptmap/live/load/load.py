"""load(): any checkpoint into a live model, whatever wraps it, each rank reading only its part.

    model -> targets by plain FQN -> matched with the checkpoint -> one step a tensor -> run

Everything that can be refused is refused before the first parameter is touched, on all ranks or on
none: the ranks that hold a model together agree on errors after planning and at the end. Nothing
else is communicated.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core import argument_checks
from ckptmap.live.load.continuation import RANDOM, Continuation
from ckptmap.live.load.fingerprint import content_facts
from ckptmap.live.load.matcher import Choices, Matcher
from ckptmap.live.model import extra_state as module_state
from ckptmap.live.model import peft as peft_live
from ckptmap.live.model import renamed as naming
from ckptmap.live.model.caller_state import ordinary
from ckptmap.live.model.collective_errors import agreed, peer_groups
from ckptmap.live.model.find_targets import find_targets
from ckptmap.live.model.reader import Reader
from ckptmap.live.model.report import LoadReport
from ckptmap.live.optimizer.state_matcher import PRECISIONS, StateMatcher
from ckptmap.live.quantized import torchao_lowbit_fix as fix_lowbit
from ckptmap.storage.files import verified
from ckptmap.storage.unchanged import require_at_rest

if TYPE_CHECKING:
    import torch

MAX_MEMORY = 64 << 20
"""Bytes of host buffers by default."""
ROUNDINGS = ("nearest", "stochastic")
NF4_CLASSES = ("torchao", "bnb")


def load(
    path: str | os.PathLike[str] | Checkpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    strict: bool = True,
    strict_encoding: bool = False,
    exact: bool = False,
    precision: str = "keep",
    rounding: str = "nearest",
    nf4: str = "torchao",
    random: str = "auto",
    seed: int = 0,
    fix: bool = False,
    max_memory: int = MAX_MEMORY,
) -> LoadReport:
    """Load a checkpoint of any setup into a plain, DDP, compiled, FSDP1 or `fully_shard`ed model,
    with its optimizer and scheduler if they are given.

    Every rank of the model calls it; each reads the bytes of its own shards only. Dense weights are
    filled in place (created, where they are on meta) in the model's dtype. An NF4 weight of the
    checkpoint becomes torchao's NF4Tensor where the live one is frozen and belongs to a linear
    layer; where it cannot be cut for the mesh it is decoded into the dense shard and listed, or
    refused with `strict_encoding`. A dense weight is quantized where the live one is NF4. Under DDP
    all replicas read the same bytes, so NF4 weights are equal although DDP does not broadcast them.

    A model that peft has wrapped takes checkpoints of its base, by the base's names, and its
    adapter's directory: the report's `left` has the other half, which stays as it is.

    Names of another scheme become the model's where a mapping file knows both: Meta's, or those that
    transformers 5 saves of a model of experts; the report's `names` says so.

    Optimizer state is matched by FQN, whatever optimizer wrote it, and put into the classes of the
    live one: moments are copied as they are, codes too where scheme and block boundaries agree,
    else decoded and encoded anew, with the error in the report. Hyper-parameters become the
    checkpoint's; those that were different are in the report.

    strict       names must match; False: what does not is reported, and keeps its values (a
                 parameter whose state is missing begins without)
    exact        training goes on bit for bit as it would have, or LoadError CKM507 says why not;
                 for checkpoints of `ckptmap.save`. A DDP over three ranks or more builds its
                 buckets anew after its first step, and sums that one's gradients in another order
                 than a DDP that has run
    precision    of moments, where the optimizer leaves a choice: "keep" the checkpoint's, so that
                 another world size changes nothing; "target": what the optimizer would have made
                 of this rank's shard; "fp32"
    rounding     of float32 weights into bfloat16: "nearest", or "stochastic" with `seed`
    nf4          whose class holds an NF4 weight: "torchao", or "bnb" (bitsandbytes' Linear4bit)
    random       "auto": restore each rank's random streams, or, where they do not fit and the
                 optimizer rounds stochastically, make fresh ones from `seed` (see
                 `resume/streams.py`); "recorded": restore, or refuse; "fresh"; "leave"
    fix          mend torchao's low-bit states in this process where the installed release needs it
                 (see `resume/fix_lowbit.py`; `ckptmap doctor` tells)
    max_memory   bound of host buffers in bytes, beside the tensors themselves

    Raises LoadError before anything is touched: CKM501 names or meta tensors do not match, CKM502
    shapes differ, CKM503 an NF4 weight is trainable here, CKM504 cannot be cut, CKM505 a kind of
    model that it cannot load into, CKM506 state and parameters do not match, CKM507 not exact,
    CKM508 an optimizer of another model, CKM511 random streams, CKM512 no place for nf4="bnb",
    CKM514 and CKM515 a base or an adapter that does not belong to peft's model, CKM208 tied here
    but different in the checkpoint; RunError CKM310 ranks saved other values of one tensor;
    ArgumentError CKM516; SourceError where the checkpoint cannot be read.
    """
    import torch

    with ExitStack() as closing:
        closing.enter_context(ordinary(model))
        peers = peer_groups(model)
        with agreed(peers) as facts:
            _check(path, model, scheduler, max_memory, seed)
            for name, value, known in (
                ("precision", precision, PRECISIONS), ("rounding", rounding, ROUNDINGS),
                ("nf4", nf4, NF4_CLASSES), ("random", random, RANDOM),
            ):  # fmt: skip
                argument_checks.choice(name, value, known)
            if fix and optimizer is not None:
                fix_lowbit.apply()
            targets, homeless = find_targets(model)
            checkpoint, other = peft_live.opened(path, model, strict)
            if checkpoint is not path:
                closing.callback(checkpoint.close)
            facts |= content_facts(checkpoint)
            named = naming.by_the_models(checkpoint, model, targets)
            checkpoint = named.checkpoint
            reader = Reader(checkpoint.files, max_memory)
            plan = Matcher(checkpoint, reader, targets, Choices(nf4, rounding, seed)).plan()
            taken = module_state.setters(model)
            unknown = [*plan.unexpected, *named.unmapped]
            plan.unexpected = [name for name in unknown if name not in taken]
            plan.refuse(checkpoint.path, strict, strict_encoding, homeless)
            state = None
            if optimizer is not None:
                state = StateMatcher(checkpoint, targets, optimizer, precision).plan()
                state.refuse(checkpoint.path, strict)
            run = Continuation(checkpoint, model, optimizer, scheduler, targets)
            run.inexact += other
            run.judge(plan, state, precision)
            run.choose_streams(random, seed, exact)
            require_at_rest(checkpoint.fingerprints, "open it anew; the model is as it was")
        with agreed(peers), torch.no_grad(), verified(checkpoint.files):
            plan.run(reader)
            if state is not None:
                state.run(reader)
            require_at_rest(
                checkpoint.fingerprints, "the model has values of both: load it again, all of it"
            )
            run.finish()
    return run.report(replace(plan.report(reader, homeless), names=named.names), state)


def _check(path: Any, model: Any, scheduler: Any, max_memory: Any, seed: Any) -> None:
    if not isinstance(path, Checkpoint):
        argument_checks.path("path", path)
    argument_checks.module("model", model)
    argument_checks.scheduler(scheduler, "load_state_dict")
    argument_checks.integer("max_memory", max_memory, 1)
    argument_checks.integer("seed", seed, -(1 << 63))
