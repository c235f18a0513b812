"""transformers: a TrainerCallback that resumes from any setup, and exports to one every N steps.

Trainer(..., callbacks=[
    ckptmap.integrations.transformers.callback(resume_from="runs/fsdp/step-2000"),
    ckptmap.integrations.transformers.callback(export_dir="out", export_to="hf-bf16", every=500),
])
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmap.checkpoint import open as open_checkpoint
from ckptmap.conversion import convert
from ckptmap.resume.hooks import name_by_live
from ckptmap.resume.load import MAX_MEMORY, load
from ckptmap.resume.optimizers import unwrapped
from ckptmap.resume.peers import Peers
from ckptmap.resume.report import LoadReport
from ckptmap.resume.save import save

if TYPE_CHECKING:
    import torch

PURPOSE = "export"


def callback(
    *,
    resume_from: str | os.PathLike[str] | None = None,
    export_dir: str | os.PathLike[str] | None = None,
    export_to: str = "hf",
    every: int = 0,
    max_memory: int = MAX_MEMORY,
    load_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A TrainerCallback.

    resume_from   loaded when training begins, after Trainer has built model and optimizer; steps
                  are counted on from its own, where it has them. Which examples were seen is not
                  known: the data begins anew. `callback.report` says what was loaded
    export_dir    `export_dir/step-N` is written every `every` steps, and when training ends, as
    export_to     a setup of `ckptmap convert --to`; `options` are those of `ckptmap.convert`
    load_options  of `ckptmap.load`: strict, precision, rounding, ...

    On many ranks each of them has one.
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
            self, resume_from: Any, export_dir: Any, export_to: str, every: int, max_memory: int,
            load_options: dict[str, Any], options: dict[str, Any],
        ) -> None:  # fmt: skip
            self._resume_from = resume_from
            self._export_dir = None if export_dir is None else Path(export_dir)
            self._export_to, self._every, self._max_memory = export_to, every, max_memory
            self._load_options, self._options = load_options, options
            self._exported = -1
            self.report: LoadReport | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self._resume_from is None:
                return
            found = resumed(
                self._resume_from, kwargs["model"], kwargs.get("optimizer"),
                kwargs.get("lr_scheduler"), max_memory=self._max_memory, **self._load_options,
            )  # fmt: skip
            self.report, step = found
            if step is not None:
                state.global_step = step

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self._every and state.global_step % self._every == 0:
                self._export(kwargs["model"], state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self._exported != state.global_step:
                self._export(kwargs["model"], state.global_step)

        def _export(self, model: torch.nn.Module, step: int) -> None:
            if self._export_dir is None:
                return
            export(model, self._export_dir / f"step-{step}", self._export_to, **self._options)
            self._exported = step

    return CkptmapCallback


def resumed(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Any,
    scheduler: Any,
    **options: Any,
) -> tuple[LoadReport, int | None]:
    """The report and the step that the checkpoint is of; weights alone where it has no more."""
    with open_checkpoint(path) as checkpoint:
        optimizer = unwrapped(optimizer) if optimizer is not None else None
        if not checkpoint.optimizer_reader.present:
            optimizer = scheduler = None
        if optimizer is not None:
            name_by_live(checkpoint, model, optimizer)
        if "scheduler" not in checkpoint.extra:
            scheduler = None
        report = load(checkpoint, model, optimizer, scheduler, **options)
        trainer = checkpoint.extra.get("trainer_state")
    step = report.step
    if step is None and isinstance(trainer, dict):
        step = trainer.get("global_step")
    return report, step if isinstance(step, int) else None


def export(
    model: torch.nn.Module, dst: Path, to: str, overwrite: bool = False, **options: Any
) -> None:
    """The live model as a checkpoint of another setup; every rank calls it.

    Each rank writes its shards into a directory beside the destination, rank 0 converts that.
    Raises what `ckptmap.save` and `ckptmap.convert` do, on all ranks.
    """
    peers = Peers.join(PURPOSE)
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


def _put_config(live: Path, model: Any) -> None:
    """Where the model has a config, it lies beside the weights, to be carried along."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(live)
