"""transformers: Trainer resumes from any setup, and exports to one every N steps.

resume(trainer, "runs/fsdp/step-2000")      in place of trainer.train(resume_from_checkpoint=...)

Trainer(..., callbacks=[
    callback(resume_from="runs/fsdp/step-2000"),                      weights, moments and step alone
    callback(export_dir="out", export_to="hf-bf16", every=500),
])
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckptmap.core.formatting import some
from ckptmap.core.sizes import Size
from ckptmap.errors import LoadError
from ckptmap.integrations import trainer_arguments
from ckptmap.live.load.continuation import NEW_STREAMS, NO_STREAMS, OTHER_DROPOUT
from ckptmap.live.load.load import load
from ckptmap.live.model import name_scheme, peft, rng_state
from ckptmap.live.model.find_targets import find_targets
from ckptmap.live.model.load_report import LoadReport
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.optimizer.run_settings import MODE_ADVICE
from ckptmap.live.optimizer.unwrap import unwrapped
from ckptmap.live.options import MAX_MEMORY
from ckptmap.live.save.save import save
from ckptmap.live.state_dict.hooks import name_by_live
from ckptmap.operations.convert import convert
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.hub.resolve import locate

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.optimizer_types import Scheduler

__all__ = ["callback", "export", "resume"]  # fmt: skip

PURPOSE = "export"
STATE = "trainer_state.json"
_STREAMS = re.compile(r"rng_state(_\d+)?\.pth")
"""Matches the files of Trainer's own random streams: one of a process, or one a rank."""
ANEW = (
    "the data begins anew: a callback cannot skip what was seen; "
    "ckptmap.integrations.transformers.resume(trainer, path) does"
)

logger = logging.getLogger(__name__)


class TrainingArguments(Protocol):
    """What is used of transformers' TrainingArguments."""

    @property
    def max_steps(self) -> int: ...
    @property
    def ignore_data_skip(self) -> bool: ...
    @property
    def world_size(self) -> int: ...


class TrainerState(Protocol):
    """What is used of transformers' TrainerState."""

    global_step: int


class RunningTrainer(Protocol):
    """What is used of transformers' Trainer."""

    @property
    def args(self) -> TrainingArguments: ...
    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def model_wrapped(self) -> torch.nn.Module: ...
    @property
    def optimizer(self) -> object: ...
    @property
    def lr_scheduler(self) -> Scheduler: ...
    @property
    def _train_batch_size(self) -> int: ...
    @property
    def train(self) -> Callable[..., object]: ...


@dataclass(frozen=True)
class Resumed:
    """The result of `resume`: the report of the load, and the result of `trainer.train`."""

    report: LoadReport
    output: Any


def resume(
    trainer: RunningTrainer,
    path: str | os.PathLike[str],
    *,
    load_options: Mapping[str, object] | None = None,
    **train_options: object,
) -> Resumed:
    """Run `trainer.train(resume_from_checkpoint=path)`, where `path` is a checkpoint of any setup.

    Trainer continues its count of steps and epochs, and skips the batches that were seen, as
    `ignore_data_skip` says. The random streams are restored after that. A step is one of this run's
    batch size and world size, whatever those of the other run were: the report's `inexact` says so where they
    differ. With as many rows a step, and without dropout, runs on 3, 2 and 1 ranks differ by rounding alone.

    load_options   of `ckptmap.load`: strict, precision, rounding, ...
    train_options  of `trainer.train`

    Raises LoadError CKM505 under DeepSpeed, which loads by itself, CKM517 where the checkpoint does
    not say its step; and as `ckptmap.load` does, before the first step.
    """
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise LoadError(
            "CKM505",
            "trainer: runs under DeepSpeed, expected one process, DDP or FSDP",
            "convert the checkpoint, and resume by DeepSpeed itself",
        )
    with tempfile.TemporaryDirectory(prefix="ckptmap-") as folder:
        loader = _TrainerLoader(trainer, path, dict(load_options or {}))
        loader.put_state(Path(folder))
        with loader.in_place():
            output = trainer.train(resume_from_checkpoint=folder, **train_options)
    assert loader.report is not None, "train() returned before it loaded anything"
    return Resumed(loader.report, output)


class _TrainerLoader:
    """Replaces the trainer's own methods for loading while it resumes."""

    def __init__(
        self, trainer: RunningTrainer, path: str | os.PathLike[str], options: Mapping[str, object]
    ) -> None:
        self._trainer, self._path, self._options = trainer, path, options
        self._random: dict[str, object] | None = None
        self._changed: list[str] = []
        self.report: LoadReport | None = None

    def put_state(self, folder: Path) -> None:
        """Write trainer_state.json: that of the checkpoint, or one with its step alone."""
        from transformers import TrainerState

        args = self._trainer.args
        checkpoint, _ = peft.open_base_or_adapter(self._path, self._trainer.model, True)
        with checkpoint:
            known, step = _saved_state(checkpoint.extra)
            saved = checkpoint.extra.get(trainer_arguments.KEY)
        self._changed = [*trainer_arguments.differences(saved, args)]
        if self._changed and self._options.get("exact"):
            raise LoadError(
                "CKM507",
                f"{self._path}: training cannot go on bit for bit: {some(self._changed)}",
                "give TrainingArguments these values, or resume without exact",
            )
        if step is None:
            raise LoadError(
                "CKM517",
                f"{self._path}: does not say at which step it was saved",
                "load it by ckptmap.load, and begin with trainer.train()",
            )
        known = {k: v for k, v in known.items() if k in TrainerState.__dataclass_fields__}
        state = TrainerState(**{**known, "global_step": step})
        if not known:
            state.train_batch_size = self._trainer._train_batch_size
            state.compute_steps(args, max(args.max_steps, 1))
        state.save_to_json(str(folder / STATE))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        ours = {
            "_load_from_checkpoint": lambda *args, **kwargs: None,
            "_load_optimizer_and_scheduler": self._load,
            "_load_rng_state": self._streams,
            "_load_scaler": self._scaler,
        }
        for name, method in ours.items():
            setattr(self._trainer, name, method)
        try:
            yield
        finally:
            for name in ours:
                delattr(self._trainer, name)

    def _load(self, folder: str | None) -> None:
        """Load everything except the random streams: this run's seed decides the skipped batches."""
        trainer, before = self._trainer, rng_state.captured()
        report, _ = resumed(
            self._path, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler,
            **self._options,
        )  # fmt: skip
        self.report = replace(report, inexact=(*report.inexact, *self._changed))
        if self.report.streams == "restored" or self._options.get("random") == "fresh":
            self._random = rng_state.captured()
        rng_state.restore(before)

    def _streams(self, folder: str | None) -> None:
        """Restore the random streams, after skipping batches, which draws random numbers."""
        if self._random is not None:
            rng_state.restore(self._random)
        elif self._options.get("random") != "leave" and self._own("_load_rng_state"):
            self._tell_of_own_streams()

    def _tell_of_own_streams(self) -> None:
        """Say in the report that Trainer has restored its own streams, where as many ranks saved them."""
        args = self._trainer.args
        with closing(Mounts()) as mounts:
            names = {entry.name for entry in locate(self._path, mounts).path.iterdir()}
        many = {f"rng_state_{rank}.pth" for rank in range(args.world_size)}
        wanted = {"rng_state.pth"} if args.world_size == 1 else many
        if self.report is None or {name for name in names if _STREAMS.fullmatch(name)} != wanted:
            return
        of_streams = (NO_STREAMS, OTHER_DROPOUT, NEW_STREAMS)
        rest = (text for text in self.report.inexact if not text.startswith(of_streams))
        self.report = replace(self.report, inexact=tuple(rest), streams="restored by Trainer")

    def _scaler(self, folder: str | None) -> None:
        self._own("_load_scaler")

    def _own(self, name: str) -> bool:
        """Call Trainer's own method, for a checkpoint of Trainer's; return whether it is one."""
        with closing(Mounts()) as mounts:
            place = locate(self._path, mounts).path
            if is_trainers := (place / STATE).is_file():
                getattr(type(self._trainer), name)(self._trainer, str(place))
        return is_trainers


def callback(
    *,
    resume_from: str | os.PathLike[str] | None = None,
    export_dir: str | os.PathLike[str] | None = None,
    export_to: str = "hf",
    every: int = 0,
    max_memory: Size = MAX_MEMORY,
    load_options: Mapping[str, object] | None = None,
    **options: object,
) -> Any:
    """Return a TrainerCallback. Every rank has one.

    resume_from   checkpoint that is loaded when training begins, after Trainer has built model and
                  optimizer; its step continues. A callback cannot skip the data that was seen, so
                  that the data starts again at epoch 0, and `callback.report` says so. Call `resume`
                  in place of `trainer.train` where that matters
    export_dir    directory in which `step-N` is written every `every` steps, and when training ends
    export_to     the setup of these exports, as of `ckptmap convert --to`
    options       keywords of `ckptmap.convert`
    load_options  keywords of `ckptmap.load`: strict, precision, rounding, ...
    """
    return _callback_class()(
        resume_from, export_dir, export_to, every, max_memory, load_options or {}, options
    )


@cache
def _callback_class() -> Any:
    from transformers import TrainerCallback

    class CkptmapCallback(TrainerCallback):  # type: ignore[misc]
        """See `callback`."""

        def __init__(
            self, resume_from: str | os.PathLike[str] | None,
            export_dir: str | os.PathLike[str] | None, export_to: str, every: int,
            max_memory: Size, load_options: Mapping[str, object], options: dict[str, Any],
        ) -> None:  # fmt: skip
            self._resume_from = resume_from
            self._export_dir = None if export_dir is None else Path(export_dir)
            self._export_to, self._every, self._max_memory = export_to, every, max_memory
            self._load_options, self._options = load_options, options
            self._exported = -1
            self.report: LoadReport | None = None

        def on_train_begin(
            self, args: TrainingArguments, state: TrainerState, control: object,
            model: torch.nn.Module, optimizer: object = None, lr_scheduler: Scheduler | None = None,
            **kwargs: object,
        ) -> None:  # fmt: skip
            if self._resume_from is None:
                return
            outcome = resumed(
                self._resume_from, model, optimizer, lr_scheduler,
                max_memory=self._max_memory, **self._load_options,
            )  # fmt: skip
            self.report, step = outcome
            if step is not None:
                state.global_step = step
            if step and not args.ignore_data_skip:
                self.report = replace(self.report, inexact=(*self.report.inexact, ANEW))
                logger.warning("resumed at step %d, but %s", step, ANEW)

        def on_step_end(
            self, args: object, state: TrainerState, control: object, model: torch.nn.Module,
            **kwargs: object,
        ) -> None:  # fmt: skip
            if self._every and state.global_step % self._every == 0:
                self._export(model, state.global_step)

        def on_train_end(
            self, args: object, state: TrainerState, control: object, model: torch.nn.Module,
            **kwargs: object,
        ) -> None:  # fmt: skip
            if self._exported != state.global_step:
                self._export(model, state.global_step)

        def _export(self, model: torch.nn.Module, step: int) -> None:
            if self._export_dir is None:
                return
            export(model, self._export_dir / f"step-{step}", self._export_to, **self._options)
            self._exported = step

    return CkptmapCallback


def resumed(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: object,
    scheduler: Scheduler | None,
    **options: Any,
) -> tuple[LoadReport, int | None]:
    """Load a checkpoint; return the report and the step. Without optimizer state only weights load.

    Trainer sets the mode of the model before each step: no note tells of evaluation mode."""
    checkpoint, other = peft.open_base_or_adapter(path, model, options.get("strict", True))
    with checkpoint:
        optimizer = unwrapped(optimizer) if optimizer is not None else None
        named = name_scheme.by_model_names(checkpoint, model, find_targets(model)[0])
        if named.names and not named.unmapped:  # `load` says which key is unknown
            checkpoint = named.checkpoint
        if not checkpoint.optimizer_reader.present:
            optimizer = scheduler = None
        if optimizer is not None:
            checkpoint = name_by_live(checkpoint, model, optimizer)
        if "scheduler" not in checkpoint.extra:
            other = [*other, "the checkpoint has no scheduler: its schedule begins anew"]
            scheduler = None
        report = load(checkpoint, model, optimizer, scheduler, **options)
        _, step = _saved_state(checkpoint.extra)
    notes = (note for note in report.notes if not note.endswith(MODE_ADVICE))
    inexact = (*report.inexact, *other)
    return replace(report, names=named.names, inexact=inexact, notes=tuple(notes)), step


def _saved_state(extra: Mapping[str, object]) -> tuple[dict[str, object], int | None]:
    """Return (Trainer's own state, the step) of a checkpoint, each where it has one."""
    state = extra.get("trainer_state")
    known = dict(state) if isinstance(state, Mapping) else {}
    step = extra.get("step", known.get("global_step"))
    return known, step if isinstance(step, int) else None


def export(
    model: torch.nn.Module, dst: Path, to: str, overwrite: bool = False, **options: Any
) -> None:
    """Write the live model as a checkpoint of another setup. Every rank calls it.

    Each rank writes its shards into a directory beside the destination, and rank 0 converts it.
    Raises as `ckptmap.save` and `ckptmap.convert`, on all ranks.
    """
    peers = RankGroup.join(PURPOSE)
    live = dst.parent / f".{dst.name}.live"
    with peers.together():
        dst.parent.mkdir(parents=True, exist_ok=True)
    save(live, model, overwrite=True, background=False).wait()
    try:
        with peers.together():
            if peers.rank == 0:
                _put_config(live, model)
                convert(live, dst, to, overwrite=overwrite, **options)
    finally:
        if peers.rank == 0:
            shutil.rmtree(live, ignore_errors=True)


def _put_config(live: Path, model: object) -> None:
    """Save the model's config, if it has one, beside the weights, so that it is copied too."""
    save = getattr(getattr(model, "config", None), "save_pretrained", None)
    if save is not None:
        save(live)
