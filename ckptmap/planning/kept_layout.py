"""The dicts of a torch.save file that stays as it is but for names: --keep-layout.

{"state_dict": {"module.w": t}, "optimizer": {"state": {0: ...}, ...}, "epoch": 3}
{"state_dict": {"w": t},        "optimizer": {"state": {0: ...}, ...}, "epoch": 3}
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.split_roles import EXTRA_KEY, MODEL_KEYS, is_reserved_name
from ckptmap.core.state_paths import join
from ckptmap.errors import PlanError
from ckptmap.planning.request import Request
from ckptmap.tensors import Path

INDEX = "index"
SHOWN = 3
"""Moves that a plan lists."""


def keeps_layout(request: Request) -> bool:
    """Return whether the output has the dicts of the source.

    Raises PlanError CKM205 for --keep-layout where the source or the output is no one torch.save file,
    and beside --root.
    """
    if not request.options.keep_layout:
        return False
    if not may_keep(request):
        raise PlanError(
            "CKM205",
            f"--keep-layout: the source is {request.ckpt.index.container}, the output"
            f" {request.setup.name}: only a torch.save file that becomes one keeps its dicts",
            "leave --keep-layout out, or choose --to full, ddp or compiled",
        )
    if request.options.root is not None:
        raise PlanError(
            "CKM205",
            f"--keep-layout: the weights stay at {join(request.ckpt.roles.model_root)!r}, and --root"
            f" {request.options.root!r} names another dict",
            "leave one of the two options out",
        )
    return True


def may_keep(request: Request) -> bool:
    """Return whether source and output are each one file of nested dicts in one format."""
    setup, container = request.setup, request.ckpt.index.container
    return setup.writer == container and setup.holds_extra and not setup.rooted


def source_path(ckpt: Checkpoint, path: Path) -> Path:
    """Return where an entry lies in the source; a reader leaves `extra` out of the paths it gives."""
    leaves, inside = ckpt.index.leaves, (EXTRA_KEY, *path)
    return inside if inside in leaves and path not in leaves else path


def beside_weights(path: Path, weights: Collection[str], *, tensor: bool) -> bool:
    """Return whether an entry can stand beside weights at the top of a file, and be read back as none."""
    head = str(path[0])
    if tensor and len(path) == 1:
        return False
    return not (head in weights or head in MODEL_KEYS or is_reserved_name(head))


def optimizer_keys(request: Request) -> str:
    """Return the key form of optimizer state in the output."""
    options, reader = request.options, request.ckpt.optimizer_reader
    if options.keep_layout and reader.form == INDEX:
        return INDEX
    return options.optimizer_keys


def moves(request: Request, root: Path, extra: Collection[tuple[Path, Path]]) -> Iterator[str]:
    """Yield what lies elsewhere in the output: `state_dict -> model`, `epoch -> extra.epoch`.

    extra  the path of each other entry, as it was and as it is written
    """
    before = request.ckpt.roles.model_root
    if before and before != root:
        yield f"{join(before)} -> {join(root) or 'the top'}"
    heads = {old[0]: new[: len(new) - len(old) + 1] for old, new in extra if old != new}
    yield from (f"{head} -> {join(new)}" for head, new in heads.items())


def moved(request: Request, root: Path, extra: Collection[tuple[Path, Path]]) -> str:
    """Return what lies elsewhere in the output, and the option that leaves it, where it can; "": nothing."""
    found = list(moves(request, root, extra))
    if not found:
        return ""
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    kept = "; to leave them there: --keep-layout" if may_keep(request) else ""
    return f"{', '.join(found[:SHOWN])}{more}{kept}"
