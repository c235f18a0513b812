"""Find the parts of a directory `checkpoint-N/` that transformers' Trainer wrote.

    pytorch_model_fsdp_0/ optimizer_0/                          FSDP, SHARDED_STATE_DICT
    model.safetensors pytorch_model_fsdp.bin optimizer.bin      FSDP, FULL_STATE_DICT: weights twice
    model.safetensors (or shards and index) optimizer.pt        DDP, one process
    adapter_model.safetensors (.bin)                            the weights of a model that peft has wrapped
    scheduler.pt scaler.pt rng_state[_R].pth trainer_state.json training_args.bin    beside each

R is a rank. Config and tokenizer files lie beside these; the carrier of Hugging Face files takes
them. Source: transformers 5.23, trainer.py `_save_checkpoint`.
"""

from __future__ import annotations

import re

from ckptmap.formats.frameworks import accelerate_names as parts
from ckptmap.protocols import Member, Members, Place

STATE = "trainer_state.json"
_EXTRA = re.compile(r"(scheduler|scaler)\.pt")
_RNG = re.compile(r"rng_state_(\d+)\.pth")
_PICKLED = re.compile(r".*\.(bin|pt|pth|pkl)")
_FOREIGN = re.compile(r"adapter_config\.json|zero_to_fp32\.py")
"""Files that mark a directory of a peft adapter, or of DeepSpeed."""


def _weights(place: Place) -> list[Member]:
    """Return every copy of the weights; those of an adapter where there are no others. Its adapter_config.json is
    left out of the place by whoever has its base."""
    return parts.weights(place) or parts.adapter(place)


class Trainer:
    """Names the parts of the directory: weights and optimizer, and as extra values the scheduler, the
    scaler and the trainer's own state."""

    name = "trainer"

    def claims(self, place: Place) -> bool:
        """Return True for a directory with trainer_state.json and weights, unless it holds a peft
        adapter or a DeepSpeed checkpoint."""
        if not place.is_dir or STATE not in place.names or parts.matching(_FOREIGN, place):
            return False
        return bool(_weights(place))

    def members(self, place: Place) -> Members:
        """Return the members. If there are two copies of the weights, the first is the one that
        Trainer loads when it resumes, and the conversion compares the other with it."""
        models, optimizers = _weights(place), parts.optimizers(place)
        members = (*models, *optimizers, *parts.extras(place, _EXTRA))
        return Members(
            members,
            documents={"trainer_state": STATE},
            unread_files=parts.unused(place, members, _PICKLED),
            world=parts.world_of(place, _RNG),
        )
