"""The order of a model's modules, which decides what lies where in a flat parameter.

A wrong order makes files of the right sizes with the wrong values, so only what is known to keep it
counts: a config.json's model, or a saved dict (`traversal`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.fsdp1_wrapping import units_of
from ckptmap.checkpoint.open import open
from ckptmap.checkpoint.stored_order import in_order
from ckptmap.errors import PlanError, SourceError
from ckptmap.planning.output_sharding import has_units
from ckptmap.sharding.reference_model import CONFIG, MANIFEST, Like, like_config, like_manifest

if TYPE_CHECKING:
    from ckptmap.planning.options import Options
    from ckptmap.protocols import Setup

_NEXT = "give --like PATH: the model's config.json, or a torch.save'd state dict of the whole model"


def model_order(
    ckpt: Checkpoint, like: str | None, left: Collection[str] = ()
) -> tuple[list[str], str]:
    """The checkpoint's names in the model's order, and where that is from: `like`, itself, or the
    config.json beside it. `left` are parameters that would be left behind.

    Raises PlanError CKM504 where no order is known, or it is of another model.
    """
    found = _of(ckpt) if like is None else _like(Path(like), ckpt)
    if found is None:
        raise PlanError(
            "CKM504",
            f"{like or ckpt.path}: does not tell the order of the model's modules, which decides"
            " where its flat parameters lie",
            _NEXT,
        )
    _check(ckpt, found, left)
    return [fqn for fqn in found.shapes if fqn in ckpt], found.name


def _check(ckpt: Checkpoint, found: Like, left: Collection[str]) -> None:
    """The same tensors: one too many or too few would move all that follow."""
    shapes = found.shapes
    for names, what in (
        ([f for f in ckpt if f not in shapes], "has no such tensor"),
        ([f for f in shapes if f not in ckpt and found.ties.get(f) not in ckpt],
         "has this tensor, the source has not"),
        ([f for f in ckpt if f in shapes and ckpt[f].shape != shapes[f]], "has another shape"),
        ([f for f in ckpt if f in left], "has this parameter, and it would be left behind"),
    ):  # fmt: skip
        if names:
            raise PlanError("CKM504", f"{names[0]}: {found.name} {what}", _NEXT)


def _like(path: Path, mine: Checkpoint) -> Like | None:
    """Flat shards have units and no order: then it is that of the checkpoint itself (`mine`)."""
    if path.name == CONFIG:
        return like_config(path)
    if (path / CONFIG).is_file():
        return like_config(path / CONFIG)
    if path.is_dir() and units_of(str(path)) is not None:
        written = path / MANIFEST
        return like_manifest(written) if written.is_file() else _of(mine)
    with open(path) as ckpt:
        return _of(ckpt)


def with_units(options: Options, setup: Setup) -> Options:
    """With the FSDP units that `like` shows, where none are given and the setup has such."""
    if options.like is None or options.fsdp_units or not has_units(setup):
        return options
    found = units_of(options.like)
    if found is None:
        return options
    named = options.use_orig_params or found.named
    units = tuple(module for module in found.modules if module)
    return replace(options, fsdp_units=units, use_orig_params=named)


def _of(ckpt: Checkpoint) -> Like | None:
    if len(in_order(ckpt.path, ckpt.index, ckpt.groups)) == len(ckpt):
        return Like(ckpt.path, {fqn: ckpt[fqn].info.shape for fqn in ckpt})
    path = Path(ckpt.index.sidecar_dir or ckpt.path)
    config = (path if path.is_dir() else path.parent) / CONFIG
    try:
        return like_config(config) if config.is_file() else None
    except SourceError:  # no transformers, or not its model
        return None
