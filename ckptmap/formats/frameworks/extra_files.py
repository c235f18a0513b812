"""Name the files in which accelerate and Trainer keep values other than weights and optimizer state.

    accelerate                                        Trainer
      scheduler.bin scheduler_1.bin ...                 scheduler.pt
      custom_checkpoint_0.pkl ...                       trainer_state.json
      sampler.bin dl_state_dict.bin (one a loader)      training_args.bin
      scaler.pt                                         scaler.pt
      random_states_R.pkl                               rng_state.pth  rng_state_R.pth

R is a rank. accelerate counts the custom objects when it loads, and needs a scheduler's file for
each scheduler. Source: accelerate 1.15, checkpointing.py and accelerator.py `load_state`;
transformers 5.23, trainer.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ckptmap import registry
from ckptmap.formats.torch_save.reader import load
from ckptmap.protocols import OutState, ReadsFiles
from ckptmap.storage.files import Files
from ckptmap.storage.sidecar import Sidecar

STATE = "trainer_state"
_NUMBERED = re.compile(r"(scheduler|sampler|dl_state_dict)(_[1-9]\d*)?")
_ALWAYS = re.compile(r"(custom_checkpoint|random_states)_\d+")
_RANDOM = re.compile(r"random_states_(\d+)")
_RNG = re.compile(r"rng_state(_\d+)?")
STEP = "step"


class AccelerateFiling(ReadsFiles):
    """The file names of accelerate's `save_state`."""

    def file_of(self, key: str) -> str | None:
        """Return the name of the file that holds an extra value; None if accelerate has none for it."""
        if key == "scaler":
            return "scaler.pt"
        if _NUMBERED.fullmatch(key):
            return f"{key}.bin"
        return f"{key}.pkl" if _ALWAYS.fullmatch(key) else None

    def rank_of(self, key: str) -> int | None:
        """Return the rank whose random states the value is; None for a value of all ranks."""
        match = _RANDOM.fullmatch(key)
        return int(match[1]) if match else None

    def new_rank(self, rank: int, first: str) -> tuple[str, Sidecar] | None:
        """Return a `random_states_R.pkl` that holds the count of steps only; None if rank 0's file
        has no count.

        All ranks need the same count, because they accumulate gradients by it. A new rank gets no
        random state, since another rank's would repeat its numbers. `load_state` accepts that.
        """
        files = Files(mounts=self.mounts)
        try:
            tree = load(files, first).tree
        finally:
            files.close()
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
        """Return notes on random states, which each rank has for itself, and on the states of data
        loaders, which count the batches that each rank drew. `before` and `after` are numbers of ranks."""
        notes = []
        if any(map(_RANDOM.fullmatch, keys)):
            kept = min(before, after)
            text = f"random states: {_ranks(0, kept, 'keeps its own', 'keep their own')}"
            if after > before:
                text += f", {_ranks(before, after, 'begins', 'begin')} with fresh ones"
            elif before > after:
                text += f", {_ranks(after, before, 'has', 'have')} no place"
            notes.append(text)
        loaders = [key for key in keys if key.startswith("dl_state_dict")]
        if loaders:
            notes.append(
                f"{', '.join(loaders)}: counts what each of {before} ranks had drawn, not of {after}; "
                f"leave it behind with --drop 'dl_state_dict*' to begin the epoch anew"
            )
        return notes


def _ranks(first: int, stop: int, one: str, many: str) -> str:
    """Return "rank 0 VERB" or "ranks 0 to 3 VERB"."""
    return f"rank {first} {one}" if stop - first == 1 else f"ranks {first} to {stop - 1} {many}"


class TrainerFiling:
    """The file names of Trainer. The trainer's own state is JSON."""

    def file_of(self, key: str) -> str | None:
        """Return the name of the file that holds an extra value; None if Trainer has none for it."""
        if key == STATE:
            return f"{STATE}.json"
        if key in ("scheduler", "scaler"):
            return f"{key}.pt"
        if key == "training_args":
            return f"{key}.bin"
        return f"{key}.pth" if _RNG.fullmatch(key) else None

    def rank_of(self, key: str) -> int | None:
        """Return None: the number of DDP ranks that will load the output is not known."""
        return None

    def new_rank(self, rank: int, first: str) -> tuple[str, Sidecar] | None:
        """Return None: Trainer starts without the random states of a rank."""
        return None

    def notes(self, keys: Collection[str], before: int, after: int) -> list[str]:
        """Return no note: no value counts the ranks."""
        return []
