"""What verl's FSDP checkpoint manager leaves: `global_step_N/actor/`, rank files and a config.

    model_world_size_W_rank_R.pt optim_world_size_W_rank_R.pt extra_state_world_size_W_rank_R.pt
    fsdp_config.json lora_train_meta.json huggingface/ (config, tokenizer, maybe weights)

Source: verl 0.9.1, utils/checkpoint/fsdp_checkpoint_manager.py; SkyRL and other forks likewise.
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
    """Rank files by role; config and tokenizer are in a directory of their own."""

    name = "verl"

    def claims(self, place: Place) -> bool:
        """Weights alone may be anybody's: plain rank files."""
        beside = (_CONFIG, *(f"{name}.json" for name in _DOCUMENTS))
        more = any(name in place.names for name in beside) or matching(_OPTIMIZER, place)
        return place.is_dir and bool(matching(_MODEL, place) and (more or matching(_EXTRA, place)))

    def members(self, place: Place) -> Members:
        """The weights in `huggingface/`, where verl was asked for them, are a copy left aside.

        Raises SourceError CKM110 where the roles are of different numbers of ranks.
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
    worlds = sorted({int(found[1]) for name in names if (found := _WORLD.search(name))})
    if len(worlds) > 1:
        raise SourceError(
            "CKM110",
            f"{place.path}: rank files of several saves: of {' and of '.join(map(str, worlds))}"
            " ranks",
            "move each save into a directory of its own",
        )
