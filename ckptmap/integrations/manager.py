"""A `ckptmap.CheckpointManager` as the checkpoints of a framework, in one line each.

Trainer(..., callbacks=[trainer_callback(manager)])        transformers; resume(trainer, manager.latest())
pl.Trainer(..., callbacks=[lightning_callback(manager)])   Lightning; it restores when training begins
TitanManager(manager, model_parts, ...)                    torchtitan: save(step), load(), close()
manager.save(step, model, optimizer, scheduler)            accelerate: what `prepare` returned

Nothing of a framework is imported before a callback of it is made.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptmap.checkpoint.open import open as open_checkpoint
from ckptmap.errors import ArgumentError
from ckptmap.integrations.trainer_manager import trainer_callback
from ckptmap.live.manager.manager import CheckpointManager
from ckptmap.live.model.load_report import LoadReport
from ckptmap.live.model.stateful import Stateful, state_of

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.optimizer_types import Scheduler

__all__ = ["TitanManager", "lightning_callback", "trainer_callback"]  # fmt: skip

LOOPS = "fit_loop"
"""Name of Lightning's progress among the saved states."""


def lightning_callback(manager: CheckpointManager, **load_options: Any) -> Any:
    """Return a Callback of Lightning that restores the newest checkpoint when training begins, and saves
    each step that is due, with Lightning's own progress. `callback.report` is the report of the load.

    A loader of Lightning's that has no state begins its epoch anew: save at the end of epochs, or pass
    loaders with `state_dict`. The metric of `keep_best` is taken from `trainer.callback_metrics`. Give
    Lightning's Trainer `enable_checkpointing=False`.

    load_options  of `ckptmap.load`: strict, precision, ...
    """
    return _lightning_class()(manager, load_options)


@cache
def _lightning_class() -> Any:
    class ManagerCallback(_base()):  # type: ignore[misc]
        """See `lightning_callback`."""

        def __init__(self, manager: CheckpointManager, load_options: Mapping[str, Any]) -> None:
            self.manager, self._load_options = manager, load_options
            self.report: LoadReport | None = None
            self._step: object = None

        def setup(self, trainer: Any, pl_module: torch.nn.Module, stage: str) -> None:
            """Restore Lightning's progress, before its loops look at it."""
            path = self.manager.latest() if stage == "fit" else None
            if path is None:
                return
            with open_checkpoint(path) as checkpoint:
                self._step = checkpoint.extra.get("step")
                progress = state_of(checkpoint, LOOPS)
            if progress is not None:
                trainer.fit_loop.load_state_dict(progress)

        def on_train_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:
            """Restore all else, of the step that the progress is of."""
            if isinstance(self._step, int):
                self.report = self.manager.restore(
                    pl_module, _named(trainer.optimizers), _schedulers(trainer), step=self._step,
                    stateful={LOOPS: _AlreadyLoaded()}, **self._load_options,
                )  # fmt: skip

        def on_train_batch_end(
            self, trainer: Any, pl_module: torch.nn.Module, *args: object, **kwargs: object
        ) -> None:
            self._save(trainer, pl_module)

        def on_train_end(self, trainer: Any, pl_module: torch.nn.Module) -> None:
            self.manager.wait()

        def _save(self, trainer: Any, pl_module: torch.nn.Module) -> None:
            name = (self.manager.retention.keep_best or ("",))[0]
            known = trainer.callback_metrics
            self.manager.save(
                trainer.global_step, pl_module, _named(trainer.optimizers), _schedulers(trainer),
                metrics={name: float(known[name])} if name in known else None,
                stateful={LOOPS: trainer.fit_loop},
            )  # fmt: skip

    return ManagerCallback


def _lightning() -> str:
    """Return the package that Lightning is imported from, by the name that the program uses where it has imported
    one already. Raises ArgumentError CKM516 where none is installed."""
    names = ("lightning.pytorch", "pytorch_lightning")
    found = [name for name in names if name in sys.modules]
    found += [name for name in names if importlib.util.find_spec(name.partition(".")[0])]
    if not found:
        raise ArgumentError(
            "CKM516", "lightning_callback: Lightning is not installed", "pip install lightning"
        )
    return found[0]


def _base() -> Any:
    """Return the class Callback of the Lightning that the program uses."""
    if _lightning() == "lightning.pytorch":
        from lightning.pytorch import callbacks
    else:
        from pytorch_lightning import callbacks
    return callbacks.Callback


class _AlreadyLoaded:
    """Stands for an object whose state was loaded before."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def _named(optimizers: Sequence[Any]) -> Any:
    """Return the only optimizer, or several by their number."""
    return (
        optimizers[0] if len(optimizers) == 1 else {str(n): one for n, one in enumerate(optimizers)}
    )


def _schedulers(trainer: Any) -> Any:
    found = [config.scheduler for config in trainer.lr_scheduler_configs]
    return _named(found) if found else None


class TitanManager:
    """A manager with the methods that torchtitan's trainer calls of its own checkpoint manager.

    model_parts    one model, or the stages of a pipeline that this rank has
    optimizers     torchtitan's container, or one optimizer
    lr_schedulers  torchtitan's container, or one scheduler
    dataloader     an object with `state_dict` and `load_state_dict`; its state is of each rank
    states         further such objects by name: `{"train_state": trainer}`
    load_options   of `ckptmap.load`: exact, strict, ... On other stages than saved it, strict=False

    The step that is saved is due as the manager says, and always where it is the last one. Tested with
    torchtitan 0.3.0: its trainer under FSDP2, its containers, its data loader, and the calls `load(step)`,
    `save(curr_step, last_step)`, `maybe_wait_for_staging()`, `maybe_wait_for_saving()`, `close()`. In a
    script the line is `trainer.checkpointer = TitanManager(manager, trainer.model_parts, ...)`.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        model_parts: Sequence[torch.nn.Module],
        optimizers: Any = None,
        lr_schedulers: Scheduler | None = None,
        dataloader: Stateful | None = None,
        states: Mapping[str, Stateful] | None = None,
        **load_options: Any,
    ) -> None:
        if not model_parts:
            raise ArgumentError(
                "CKM516", "model_parts: is empty, expected a model", "pass trainer.model_parts"
            )
        self.manager = manager
        self._load_options = load_options
        self.report: LoadReport | None = None
        model = model_parts[0] if len(model_parts) == 1 else [*model_parts]
        self._run = (model, optimizers, lr_schedulers)
        loader = {} if dataloader is None else {"dataloader": dataloader}
        self._stateful = {**loader, **(states or {})}

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save a step where it is due or the last one, and return whether."""
        handle = self.manager.save(curr_step, *self._run, force=last_step, stateful=self._stateful)
        if last_step:
            self.manager.wait()
        return handle is not None

    def load(self, step: int = -1) -> bool:
        """Restore a step, the newest for -1, and return whether there is one."""
        wanted: int | str = "latest" if step == -1 else step
        self.report = self.manager.restore(
            *self._run, step=wanted, stateful=self._stateful, **self._load_options
        )
        return self.report is not None

    def maybe_wait_for_staging(self) -> None:
        """Return at once: `save` has copied the values before it returned."""

    def maybe_wait_for_saving(self) -> None:
        """Wait until the last save is published. Raises its error."""
        self.manager.wait()

    def close(self) -> None:
        """Wait for the last save, and give signals back."""
        self.manager.close()
