"""Find the parts of a directory that `save_checkpoint` of DeepSpeed wrote, alone or for a trainer.

    latest                                  the name of the step's folder
    global_step500/  pytorch_model/         the step (the second as accelerate names it): see `reader`
    latest_universal  global_step500_universal/     as ds_to_universal makes it
    scheduler.pt rng_state_R.pth trainer_state.json training_args.bin model.safetensors     of Trainer
    scheduler.bin sampler.bin random_states_R.pkl custom_checkpoint_I.pkl                  of accelerate

The weights are those of the step. `model.safetensors` and the like are 16-bit copies of them.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckptmap.core.printable import quote
from ckptmap.errors import SourceError
from ckptmap.formats.deepspeed.step_files import is_step
from ckptmap.formats.detect import look
from ckptmap.formats.frameworks import accelerate_names as parts
from ckptmap.protocols import Member, Members, Place

LATEST = ("latest", "latest_universal")
STATE = "trainer_state.json"
MAX_TAG_NBYTES = 512
_EXTRA = re.compile(
    r"scheduler(_\d+)?\.(pt|bin)|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin|scaler\.pt"
    r"|custom_checkpoint_\d+\.pkl"
)
_COPIES = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors|pytorch_model(-\d{5}-of-\d{5})?\.bin|adapter_model\.bin"
)
_PICKLED = re.compile(r"training_args\.bin|rng_state(_\d+)?\.pth|random_states_\d+\.pkl")


class DeepSpeed:
    """Names the step that is the latest, and as extra values what a trainer keeps beside it."""

    name = "deepspeed"

    def claims(self, place: Place) -> bool:
        """Return True for a directory whose file `latest` names a step of ZeRO in it, and for one with other
        steps than that. A step of stage 0 is one file of a whole model, which needs no such directory."""
        if not place.is_dir or not _latest(place):
            return False
        step = _step(place)
        return bool(_steps(place)) if step is None else step.is_dir and is_step(step.names)

    def members(self, place: Place) -> Members:
        """Return the members. Raise SourceError CKM111 if the step that `latest` names is not there."""
        step = _step(place)
        if step is None:
            steps = _steps(place)
            tags = _tags(place)
            named = " and ".join(
                f"{name} names {tag}, which is not there" for name, tag in tags.items()
            )
            raise SourceError(
                "CKM111",
                f"{place.path}: {named or 'latest names no folder in it'}; found {', '.join(steps[-6:])}",
                f"copy it here, or give the path of another step: {quote(f'{place.path}/{steps[-1]}')}",
            )
        members = (Member(step.path, "all"), *parts.extras(place, _EXTRA))
        copies = parts.unused(place, members, _COPIES)
        return Members(
            members,
            documents={"trainer_state": STATE} if STATE in place.names else {},
            unread_files=[*parts.matching(_PICKLED, place), *copies],
        )


def _latest(place: Place) -> list[str]:
    """Return the files that name a step."""
    return [n for n in LATEST if n in place.names and (Path(place.path) / n).is_file()]


def _tags(place: Place) -> dict[str, str]:
    """Return the file that names a step -> the name; a name that leads elsewhere is none."""
    tags = {}
    for name in _latest(place):
        head = place.mounts.read_head(Path(place.path) / name, MAX_TAG_NBYTES)
        text = head.decode("utf-8", "replace").strip()
        if text and text not in (".", "..") and text.isprintable() and "/" not in text:
            tags[name] = text
    return tags


def _step(place: Place) -> Place | None:
    """Return the folder of the latest step; a universal one only where there is no other. None: it is missing."""
    for tag in _tags(place).values():
        folder = Path(place.path) / tag
        if folder.is_dir():
            return look(folder, place.mounts)
    return None


def _steps(place: Place) -> list[str]:
    """Return the folders that are steps of ZeRO."""
    folders = [name for name in place.names[:200] if (Path(place.path) / name).is_dir()]
    return [name for name in folders if is_step(look(Path(place.path) / name, place.mounts).names)]
