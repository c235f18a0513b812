"""Hooks for Lightning, where a checkpoint is a dict that the trainer saves and later passes back.

    class Module(LightningModule):
        def on_save_checkpoint(self, checkpoint): hooks.on_save_checkpoint(checkpoint)
        def on_load_checkpoint(self, checkpoint): hooks.on_load_checkpoint(checkpoint)

Lightning need not be installed: any trainer that keeps `{"state_dict": ..., "optimizer_states":
[...]}` can call the hooks.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from ckptmap.core import argument_checks
from ckptmap.core.sizes import Size
from ckptmap.live.state_dict.translate import MAX_MEMORY, translate
from ckptmap.mapping.wrappers import strip_wrappers

if TYPE_CHECKING:
    import torch

__all__ = ["Hooks", "hooks"]  # fmt: skip

WEIGHTS = "state_dict"


class Hooks:
    """`on_save_checkpoint` and `on_load_checkpoint` for one model."""

    def __init__(
        self, model: torch.nn.Module, config: object = None, max_memory: int = MAX_MEMORY
    ) -> None:
        self._model, self._config, self._max_memory = model, config, max_memory

    def on_save_checkpoint(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Give the tensors that will be saved their plain names, so that any run can load them."""
        state = checkpoint[WEIGHTS]
        names = strip_wrappers(list(state), WEIGHTS)
        checkpoint[WEIGHTS] = {plain: state[key] for key, plain in names.items()}

    def on_load_checkpoint(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Replace the weights by those that the model's own `load_state_dict` takes: its names,
        encodings and shards. The model is not changed. Raises as `ckptmap.translate`."""
        checkpoint[WEIGHTS] = translate(
            checkpoint[WEIGHTS],
            like=self._model,
            config=self._config,
            max_memory=self._max_memory,
        )


def hooks(model: torch.nn.Module, *, config: object = None, max_memory: Size = MAX_MEMORY) -> Hooks:
    """Return hooks for `model` as its `load_state_dict` will be called; for the optimizer's state see
    `ckptmap.hooks.install(model, optimizer)`."""
    return Hooks(model, config, argument_checks.nbytes("max_memory", max_memory))
