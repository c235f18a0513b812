"""Find files by the names that accelerate gives them, in its own directories and in those of
transformers' Trainer.

The Trainer saves FSDP models and optimizers with accelerate's functions, so both write these files. Source: accelerate 1.15, utils/fsdp_utils.py and checkpointing.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptmap.protocols import Member, Place

SECOND_MODEL = re.compile(
    r"pytorch_model_fsdp_[1-9]\d*(\.bin|_rank\d+\.bin)?"
    r"|model_[1-9]\d*\.safetensors|pytorch_model_[1-9]\d*\.bin"
)
"""The second and later models of one `save_state`. It numbers FSDP models from 0; of other models, the
first has no number."""

_RANK_MODEL = re.compile(r"pytorch_model_fsdp(_0)?_rank\d+\.bin")
_RANK_OPTIMIZER = re.compile(r"optimizer_0_rank\d+\.bin")
_HF = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_HF_BIN = re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin|pytorch_model\.bin\.index\.json")


def matching(pattern: re.Pattern[str], place: Place) -> tuple[str, ...]:
    """Return the entries whose whole name matches, in natural order."""
    return tuple(name for name in place.names if pattern.fullmatch(name))


def weights(place: Place) -> list[Member]:
    """Return every copy of the weights. The one that accelerate loads under FSDP is first."""
    copies = [
        _directory(place, "pytorch_model_fsdp_0", "model", "model"),
        _ranks(place, _RANK_MODEL, "model"),
        _file(place, "pytorch_model_fsdp.bin", "model"),
        _ranks(place, _HF, "model"),
        _file(place, "pytorch_model.bin", "model"),
        _ranks(place, _HF_BIN, "model"),
    ]
    return [member for member in copies if member is not None]


def adapter(place: Place) -> list[Member]:
    """Return the weights of an adapter; an empty list if there are none."""
    names = ("adapter_model.safetensors", "adapter_model.bin")
    copies = [_file(place, name, "model") for name in names]
    return [member for member in copies if member is not None]


def optimizers(place: Place) -> list[Member]:
    """Return every copy of the optimizer's state; an empty list if there is none."""
    copies = [
        _directory(place, "optimizer_0", "optimizer", "optimizer"),
        _ranks(place, _RANK_OPTIMIZER, "optimizer"),
        _file(place, "optimizer.bin", "optimizer"),
        _file(place, "optimizer.pt", "optimizer"),
    ]
    return [member for member in copies if member is not None]


def extras(place: Place, pattern: re.Pattern[str]) -> list[Member]:
    """Return the matching files as extra values. The key is the file name without its suffix."""
    return [
        Member(str(Path(place.path) / name), "extra", key=Path(name).stem)
        for name in matching(pattern, place)
    ]


def world_of(place: Place, pattern: re.Pattern[str]) -> int:
    """Return the number of ranks, from files that each rank writes: group 1 is the rank."""
    ranks = [int(match[1]) for match in map(pattern.fullmatch, place.names) if match]
    return 1 + max(ranks, default=0)


def unused(place: Place, members: Iterable[Member], pattern: re.Pattern[str]) -> list[str]:
    """Return the matching entries that belong to no member."""
    used = {name for m in members for name in (Path(m.path).name, *m.names)}
    return [name for name in matching(pattern, place) if name not in used]


def _directory(place: Place, name: str, role: str, root: str) -> Member | None:
    path = Path(place.path) / name
    return Member(str(path), role, (root,)) if name in place.names and path.is_dir() else None


def _file(place: Place, name: str, role: str) -> Member | None:
    path = Path(place.path) / name
    return Member(str(path), role) if name in place.names and path.is_file() else None


def _ranks(place: Place, pattern: re.Pattern[str], role: str) -> Member | None:
    names: Sequence[str] = matching(pattern, place)
    return Member(place.path, role, names=tuple(names)) if names else None
