"""In which files accelerate and Trainer keep what is neither weight nor optimizer state.

    accelerate                                        Trainer
      scheduler.bin scheduler_1.bin ...                 scheduler.pt
      custom_checkpoint_0.pkl ...                       trainer_state.json
      sampler.bin dl_state_dict.bin (one a loader)      training_args.bin
      scaler.pt                                         scaler.pt
      random_states_R.pkl                               rng_state.pth  rng_state_R.pth

Source: accelerate 1.15, checkpointing.py and accelerator.py `load_state`, which counts the custom
objects and demands a scheduler's file for each scheduler; transformers 5.23, trainer.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ckptmap import registry
from ckptmap.formats.torch_save.reader import load
from ckptmap.protocols import OutState
from ckptmap.storage.files import Files
from ckptmap.storage.sidecar import Sidecar

STATE = "trainer_state"
_NUMBERED = re.compile(r"(scheduler|sampler|dl_state_dict)(_[1-9]\d*)?")
_ALWAYS = re.compile(r"(custom_checkpoint|random_states)_\d+")
_RANDOM = re.compile(r"random_states_(\d+)")
_RNG = re.compile(r"rng_state(_\d+)?")
STEP = "step"


class AccelerateFiling:
    """As `save_state` names its files."""

    def file_of(self, key: str) -> str | None:
        if key == "scaler":
            return "scaler.pt"
        if _NUMBERED.fullmatch(key):
            return f"{key}.bin"
        return f"{key}.pkl" if _ALWAYS.fullmatch(key) else None

    def rank_of(self, key: str) -> int | None:
        found = _RANDOM.fullmatch(key)
        return int(found[1]) if found else None

    def new_rank(self, rank: int, first: str) -> tuple[str, Sidecar] | None:
        """The count of steps alone, by which ranks gather gradients together: random states are
        nobody else's, and `load_state` goes on without them."""
        tree = load(Files(), first).tree
        step = tree.get(STEP) if isinstance(tree, dict) else None
        if not isinstance(step, int):
            return None
        name = f"random_states_{rank}.pkl"
        (out,) = registry.writer("torch-zip").files(OutState((), {(STEP,): step}), name)
        content = bytearray(out.nbytes)
        for offset, piece in out.seal((), None):
            content[offset : offset + len(piece)] = piece
        return name, Sidecar.made(bytes(content))

    def notes(self, keys: Collection[str], before: int, after: int) -> list[str]:
        """Random states are a rank's own; a loader's state counts the batches of each rank."""
        found = []
        if any(map(_RANDOM.fullmatch, keys)):
            found.append(
                f"random states: of ranks 0 to {min(before, after) - 1}, there were {before}"
            )
        loaders = [key for key in keys if key.startswith("dl_state_dict")]
        if loaders:
            found.append(
                f"{', '.join(loaders)}: counts what each of {before} ranks had drawn, not of {after}; "
                f"leave it behind with --drop 'dl_state_dict*' to begin the epoch anew"
            )
        return found


class TrainerFiling:
    """As Trainer names them; its state is JSON."""

    def file_of(self, key: str) -> str | None:
        if key == STATE:
            return f"{STATE}.json"
        if key in ("scheduler", "scaler"):
            return f"{key}.pt"
        if key == "training_args":
            return f"{key}.bin"
        return f"{key}.pth" if _RNG.fullmatch(key) else None

    def rank_of(self, key: str) -> int | None:
        return None  # of one process or DDP: however many ranks there will be, nothing tells here

    def new_rank(self, rank: int, first: str) -> tuple[str, Sidecar] | None:
        return None

    def notes(self, keys: Collection[str], before: int, after: int) -> list[str]:
        return []
