"""What transformers' Trainer leaves: `checkpoint-N/` with trainer_state.json.

    pytorch_model_fsdp_0/ optimizer_0/                          FSDP, SHARDED_STATE_DICT
    model.safetensors pytorch_model_fsdp.bin optimizer.bin      FSDP, FULL_STATE_DICT: weights twice
    model.safetensors (or shards and index) optimizer.pt        DDP, one process
    scheduler.pt scaler.pt rng_state[_R].pth trainer_state.json training_args.bin    beside each

Source: transformers 5.23, trainer.py `_save_checkpoint`. Config and tokenizer lie among these files
and are found there by who has a place for them.
"""

from __future__ import annotations

import re

from ckptmap.formats.frameworks import accelerate_names as parts
from ckptmap.protocols import Members, Place

STATE = "trainer_state.json"
_EXTRA = re.compile(r"(scheduler|scaler)\.pt")
_RNG = re.compile(r"rng_state_(\d+)\.pth")
_PICKLED = re.compile(r".*\.(bin|pt|pth|pkl)")
_FOREIGN = re.compile(r"adapter_config\.json|zero_to_fp32\.py")
"""Marks of weights that are not here, or not in a form of Trainer's own."""


class Trainer:
    """Weights, optimizer, scheduler, and the trainer's own state as extra values."""

    name = "trainer"

    def claims(self, place: Place) -> bool:
        """trainer_state.json and weights; an adapter's or DeepSpeed's directory is neither."""
        if not place.is_dir or STATE not in place.names or parts.matching(_FOREIGN, place):
            return False
        return bool(parts.weights(place))

    def members(self, place: Place) -> Members:
        """Of weights that are there twice the copy that resuming loads is taken, and compared
        with the other."""
        models, optimizers = parts.weights(place), parts.optimizers(place)
        members = (*models, *optimizers, *parts.extras(place, _EXTRA))
        return Members(
            members,
            documents={"trainer_state": STATE},
            unread_files=parts.unused(place, members, _PICKLED),
            world=parts.world_of(place, _RNG),
        )
