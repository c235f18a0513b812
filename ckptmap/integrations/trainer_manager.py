"""A `ckptmap.CheckpointManager` as the checkpoints of transformers' Trainer.

    step: optimizer, on_step_end | log, evaluate, scheduler by metric, <- here | next batch
    epoch: on_epoch_end          | log, evaluate, ...                  <- here | next epoch

A save comes after the evaluation of its step, as Trainer's own: evaluation draws random numbers, and only then are
its metrics known. No event of a callback is there, so that Trainer's private method is extended while it trains.
Why none of the public events will do:

    on_step_end, on_epoch_end  come before the evaluation
    on_log, on_evaluate        come inside of it, once for each of several data sets, and before a scheduler that steps
                               by the metric; on_evaluate also comes where a user calls `evaluate` between steps
    on_save                    comes after Trainer has written a checkpoint of its own, which `should_save` makes it write
    on_step_begin              comes after the next batch was drawn, and with it random numbers; not after the last step
    on_train_end               comes once, perhaps after the best model was loaded in place of the last

Events also show the model inside of DDP and torch.compile; how gradients are averaged, only the wrapper tells.

Source: transformers 5.x, trainer.py `_run_epoch`, `_maybe_log_save_evaluate`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptmap.errors import LoadError
from ckptmap.integrations import trainer_arguments
from ckptmap.live.manager.manager import CheckpointManager

if TYPE_CHECKING:
    from typing import Unpack

    from ckptmap.live.options import ValueKeywords

__all__ = ["trainer_callback"]  # fmt: skip

AFTER = "_maybe_log_save_evaluate"
"""Trainer's method, after which a step is complete."""


def trainer_callback(manager: CheckpointManager, **save_options: Unpack[ValueKeywords]) -> Any:
    """Return a TrainerCallback that saves each step that is due, with Trainer's own state, and waits
    for the last save when training ends.

    `ckptmap.integrations.transformers.resume(trainer, manager.latest())` goes on from there. Give Trainer
    `save_strategy="no"`. The metric of `keep_best` is that of Trainer's last log that has it. A step at the end
    of an epoch is saved again after the evaluation of the epoch.

    save_options  keywords of `CheckpointManager.save`: only, base, replicas, ...
    """
    return _callback_class()(manager, save_options)


@cache
def _callback_class() -> Any:
    from transformers import TrainerCallback

    class ManagerCallback(TrainerCallback):  # type: ignore[misc]
        """See `trainer_callback`."""

        def __init__(self, manager: CheckpointManager, save_options: Mapping[str, Any]) -> None:
            self.manager, self._options = manager, save_options
            self._trainer: Any = None
            self._saved = -1

        def on_train_begin(self, *args: object, **kwargs: object) -> None:
            trainer = self._trainer = _trainer_of(self)
            own = _method_of(trainer)
            if not (isinstance(own, _AndThen) and own.after == self.save):
                setattr(trainer, AFTER, _AndThen(trainer, own, self.save))

        def on_train_end(self, *args: object, **kwargs: object) -> None:
            vars(self._trainer).pop(AFTER, None)
            self._trainer = None
            self.manager.wait()

        def save(self, has_evaluated: bool) -> None:
            """Save the step, where it is not saved yet or something came after it."""
            trainer = self._trainer
            state = trainer.state
            if state.global_step == self._saved and not has_evaluated:
                return
            # What a rank logs of its own time is no other rank's: the state is that of rank 0, as Trainer's.
            extra = {
                "trainer_state": _plain(asdict(state)),
                trainer_arguments.KEY: trainer_arguments.described(trainer.args),
                **(self._options.get("extra") or {}),
            }
            self.manager.save(
                state.global_step, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler,
                metrics=self._metrics(state.log_history),
                **{**self._options, "extra": extra if state.is_world_process_zero else None},
            )  # fmt: skip
            self._saved = state.global_step

        def _metrics(self, history: Sequence[Mapping[str, float]]) -> dict[str, float]:
            name = (self.manager.retention.keep_best or ("",))[0]
            last = next((entry[name] for entry in reversed(history) if name in entry), None)
            return {} if last is None else {name: last}

    return ManagerCallback


@dataclass(frozen=True)
class _AndThen:
    """A method of Trainer's, and what is called after it with whether the model was evaluated."""

    trainer: Any
    own: Callable[..., object]
    after: Callable[[bool], None]

    def __call__(self, *args: object, **kwargs: object) -> object:
        evaluates = bool(self.trainer.control.should_evaluate)
        result = self.own(*args, **kwargs)
        self.after(evaluates)
        return result


def _method_of(trainer: object) -> Callable[..., object]:
    """Return the method that is extended. Raises LoadError CKM505 where this transformers has no such method."""
    found = getattr(trainer, AFTER, None)
    if found is None:
        from transformers import __version__ as version

        raise LoadError(
            "CKM505",
            f"trainer_callback: transformers {version} has no Trainer.{AFTER}, after which a step is complete",
            "install transformers 5, or save by CheckpointManager.save in a callback of your own",
        )
    method: Callable[..., object] = found
    return method


def _trainer_of(callback: object) -> Any:
    """Return the trainer that trains with a callback, which no event tells. Raises LoadError CKM505."""
    from transformers import Trainer

    trainers: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), Trainer)]
    for one in trainers:
        if getattr(one, "is_in_train", False) and callback in one.callback_handler.callbacks:
            return one
    raise LoadError(
        "CKM505",
        "trainer_callback: no transformers.Trainer trains with it, expected one",
        "pass it as Trainer(..., callbacks=[trainer_callback(manager)])",
    )


def _plain(value: Any) -> Any:
    """Return nested values with text in place of what is no plain value, as enums are."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
