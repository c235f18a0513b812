"""Find the parts of a directory that verl's FSDP checkpoint manager wrote: `global_step_N/actor/`.

    model_world_size_W_rank_R.pt optim_world_size_W_rank_R.pt extra_state_world_size_W_rank_R.pt
    fsdp_config.json lora_train_meta.json huggingface/ (config, tokenizer, maybe weights)

W is the number of ranks, R a rank. SkyRL and other forks of verl write the same files. Source: verl
0.9.1, utils/checkpoint/fsdp_checkpoint_manager.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckptmap.errors import SourceError
from ckptmap.formats.frameworks.accelerate_names import matching
from ckptmap.protocols import Member, Members, Place

_MODEL = re.compile(r"model_world_size_\d+_rank_\d+\.pt")
_OPTIMIZER = re.compile(r"optim_world_size_\d+_rank_\d+\.pt")
_EXTRA = re.compile(r"extra_state_world_size_\d+_rank_\d+\.pt")
_WORLD = re.compile(r"world_size_(\d+)_")
_DOCUMENTS = ("fsdp_config", "lora_train_meta")
_CONFIG = "huggingface"


class Verl:
    """Names the parts of the directory: the rank files of each role (model, optimizer, extra state).
    Config and tokenizer lie in the folder `huggingface`."""

    name = "verl"

    def claims(self, place: Place) -> bool:
        """Return True for rank files of weights with some other file of verl beside them. Any program
        may have written rank files of weights alone; the reader of rank files opens those."""
        beside = (_CONFIG, *(f"{name}.json" for name in _DOCUMENTS))
        more = any(name in place.names for name in beside) or matching(_OPTIMIZER, place)
        return place.is_dir and bool(matching(_MODEL, place) and (more or matching(_EXTRA, place)))

    def members(self, place: Place) -> Members:
        """Return the members. Weights in `huggingface/`, which verl writes on request, are a copy of
        the rank files: they are listed as unread.

        Raise SourceError CKM110 if the roles have different numbers of ranks.
        """
        roles = {"model": _MODEL, "optimizer": _OPTIMIZER, "extra": _EXTRA}
        members = tuple(
            Member(place.path, role, key="extra_state" if role == "extra" else "", names=names)
            for role, pattern in roles.items()
            if (names := matching(pattern, place))
        )
        _check_worlds(place, members)
        config = Path(place.path) / _CONFIG
        has_config = _CONFIG in place.names and config.is_dir()
        copies = [f"{_CONFIG}/{f.name}" for f in config.glob("*.safetensors")] if has_config else []
        return Members(
            members,
            documents={d: f"{d}.json" for d in _DOCUMENTS if f"{d}.json" in place.names},
            unread_files=sorted(copies),
            sidecar_dir=str(config) if has_config else None,
        )


def _check_worlds(place: Place, members: tuple[Member, ...]) -> None:
    names = [name for member in members for name in member.names]
    worlds = sorted({int(match[1]) for name in names if (match := _WORLD.search(name))})
    if len(worlds) > 1:
        raise SourceError(
            "CKM110",
            f"{place.path}: expected rank files of one save, found some of"
            f" {' and some of '.join(map(str, worlds))} ranks",
            "move each save into a directory of its own",
        )
