"""The order of a model's parameters, which decides where each lies in a flat parameter of FSDP1.

A wrong order makes files of the right sizes with the wrong values. So only sources that are known to
keep the order count: the model that a config.json describes, or a saved state dict.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.fsdp1_wrapping import units_of
from ckptmap.checkpoint.open import open_another
from ckptmap.checkpoint.stored_order import in_order
from ckptmap.errors import PlanError, SourceError
from ckptmap.planning.output_sharding import has_units
from ckptmap.protocols.file_systems import Mounts
from ckptmap.sharding.reference_model import CONFIG, MANIFEST, Like, like_config, like_manifest

if TYPE_CHECKING:
    from ckptmap.planning.options import Options
    from ckptmap.protocols import Setup

_NEXT = (
    "give --like PATH: the model's config.json, or a file that torch.save(model.state_dict(), PATH) wrote"
    " from the whole model (a copy that was sorted or built anew does not tell)"
)


def model_order(ckpt: Checkpoint, like: str | None, left: Collection[str]) -> tuple[list[str], str]:
    """Return the FQNs of the checkpoint in the model's order, and the path that tells the order.

    That is `like`, the checkpoint itself, or the config.json beside it. `left` are parameters that
    the options leave out. Raises PlanError CKM504 where no order is known, or it is of another model.
    """
    model = _of(ckpt) if like is None else _like(Path(like), ckpt)
    if model is None:
        raise PlanError(
            "CKM504",
            f"{like or ckpt.path}: does not tell the order of the model's modules, which decides"
            " where its flat parameters lie",
            _NEXT,
        )
    _require_same_tensors(ckpt, model, left)
    return [fqn for fqn in model.shapes if fqn in ckpt], model.name


def _require_same_tensors(ckpt: Checkpoint, model: Like, left: Collection[str]) -> None:
    """Raise PlanError CKM504 where the model has other tensors: one too many or too few would move
    all that follow it in the flat parameter."""
    shapes = model.shapes
    for names, what in (
        ([f for f in ckpt if f not in shapes], "has no such tensor"),
        ([f for f in shapes if f not in ckpt and model.ties.get(f) not in ckpt],
         "has this tensor, the source has not"),
        ([f for f in ckpt if f in shapes and ckpt[f].shape != shapes[f]], "has another shape"),
        ([f for f in ckpt if f in left], "has this parameter, and it would be left behind"),
    ):  # fmt: skip
        if names:
            raise PlanError("CKM504", f"{names[0]}: {model.name} {what}", _NEXT)


def _like(path: Path, converted: Checkpoint) -> Like | None:
    """Return the names and shapes of the model at `path`, in order; None: it does not tell the order.

    Files of flat parameters tell their units and no order, which is then that of `converted`.
    """
    mounts = converted.files.mounts
    if path.name == CONFIG:
        return like_config(path, mounts)
    if (path / CONFIG).is_file():
        return like_config(path / CONFIG, mounts)
    if path.is_dir() and units_of(str(path), mounts) is not None:
        written = path / MANIFEST
        return like_manifest(written, mounts) if written.is_file() else _of(converted)
    with open_another(path, mounts) as ckpt:
        return _of(ckpt)


def with_units(options: Options, setup: Setup, mounts: Mounts) -> Options:
    """Return the options with the FSDP units of the flat parameters in --like.

    Options that name units, and setups without flat parameters, stay as they are.
    """
    if options.like is None or options.fsdp_units or not has_units(setup):
        return options
    units = units_of(options.like, mounts)
    if units is None:
        return options
    named = options.use_orig_params or units.named
    modules = tuple(module for module in units.modules if module)
    return replace(options, fsdp_units=modules, use_orig_params=named)


def _of(ckpt: Checkpoint) -> Like | None:
    if len(in_order(ckpt.path, ckpt.index, ckpt.groups)) == len(ckpt):
        return Like(ckpt.path, {fqn: ckpt[fqn].info.shape for fqn in ckpt})
    path = Path(ckpt.sidecar_dir)
    config = (path if path.is_dir() else path.parent) / CONFIG
    try:
        return like_config(config, ckpt.files.mounts) if config.is_file() else None
    except SourceError:  # no transformers, or not its model
        return None
