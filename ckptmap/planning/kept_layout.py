"""The dicts of a torch.save file that stays as it is but for names: --keep-layout, the default of such a run.

{"state_dict": {"module.w": t}, "optimizer": {"state": {0: ...}, ...}, "epoch": 3}
{"state_dict": {"w": t},        "optimizer": {"state": {0: ...}, ...}, "epoch": 3}
"""

from __future__ import annotations

from collections.abc import Collection

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.split_roles import EXTRA_KEY, MODEL_KEYS, is_reserved_name, split_roles
from ckptmap.core.formatting import some
from ckptmap.core.state_paths import join
from ckptmap.core.tensor_columns import PlainTensors
from ckptmap.errors import PlanError, SourceError
from ckptmap.planning.request import Request
from ckptmap.tensors import Opaque, Path

FQN = "fqn"
SHOWN = 3
"""Moves that a plan lists."""


def keeps_layout(request: Request, nested: bool) -> bool:
    """Return whether the output has the dicts of the source.

    It has where that is asked for, and unasked where only names change and the output holds more than
    weights (`nested`): weights alone stand at the top.

    Raises PlanError CKM205 for --keep-layout where the source or the output is no one torch.save file,
    and beside --root.
    """
    if request.options.keep_layout is None:
        return nested and may_keep(request) and _only_names_change(request)
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


def _only_names_change(request: Request) -> bool:
    """Return whether the options ask for other prefixes at most, and a reader finds the weights unaided."""
    options, ckpt = request.options, request.ckpt
    if options.root is not None or options.optimizer_keys is not None or request.setup.sharded:
        return False
    if request.aim.scheme is not None or ckpt.translation is not None:
        return False
    try:
        found = split_roles(ckpt.index.leaves, None, ckpt.path)
    except SourceError:  # several dicts could be the weights: the user has named one
        return False
    return found.model_root == ckpt.roles.model_root


def leaves_out_extra(ckpt: Checkpoint) -> bool:
    """Return whether the reader has left `extra` out of the paths that it gives of what lies there."""
    leaves = ckpt.index.leaves
    return any(path not in leaves for path in ckpt.roles.others)


def source_path(ckpt: Checkpoint, path: Path, leaves_out_extra: bool) -> Path:
    """Return where an entry lies in the source."""
    inside = (EXTRA_KEY, *path)
    return inside if leaves_out_extra and inside in ckpt.index.leaves else path


def paths_inside(ckpt: Checkpoint, names: Collection[str]) -> dict[str, Path]:
    """Return where weights of these names lie below the root, if some lie in a list or in dicts of their own.

    {"shadow_params": [t0, t1]}: {"0": (0,), "1": (1,)}. Empty where all names are keys of one dict, or where
    the output has a name that the source has not.
    """
    model = ckpt.roles.model
    if isinstance(model, PlainTensors) or all(
        isinstance(path[-1], str) and len(path) == 1 for path in model
    ):
        return {}
    inside = {join(path): path for path, leaf in model.items() if not isinstance(leaf, Opaque)}
    return inside if inside.keys() >= {*names} else {}


def beside_weights(path: Path, weights: Collection[str], *, tensor: bool) -> bool:
    """Return whether an entry can stand beside weights at the top of a file, and be read back as none."""
    head = str(path[0])
    if tensor and len(path) == 1:
        return False
    return not (head in weights or head in MODEL_KEYS or is_reserved_name(head))


def optimizer_keys(request: Request, kept: bool) -> str:
    """Return the key form of optimizer state in the output; `kept`: it has the dicts of the source."""
    if request.options.optimizer_keys is not None:
        return request.options.optimizer_keys
    return request.ckpt.optimizer_reader.form or FQN if kept else FQN


def _moves(request: Request, root: Path, extra: Collection[tuple[Path, Path]]) -> str:
    """Return the first of what lies elsewhere in the output: "state_dict -> model, epoch -> extra.epoch".

    extra  the path of each other entry, as it was and as it is written
    """
    before = request.ckpt.roles.model_root
    heads = {old[0]: new[: len(new) - len(old) + 1] for old, new in extra if old != new}
    found = [f"{join(before)} -> {join(root) or 'the top'}"] if before and before != root else []
    return some([*found, *(f"{head} -> {join(new)}" for head, new in heads.items())], SHOWN)


def moved(request: Request, root: Path, extra: Collection[tuple[Path, Path]]) -> str:
    """Return what lies elsewhere in the output, and the option that leaves it, where it can; "": nothing, or the
    setup has a file for each entry."""
    if request.setup.filing is not None:
        return ""
    found = _moves(request, root, extra)
    can_stay = may_keep(request) and request.options.root is None
    return f"{found}; to leave them there: --keep-layout" if found and can_stay else found


def kept_note(request: Request, root: Path, extra: Collection[tuple[Path, Path]]) -> list[str]:
    """Return a note on a layout that is kept unasked; `root` and `extra` are those of --no-keep-layout."""
    found = _moves(request, root, extra)
    if request.options.keep_layout or not found:
        return []
    return [f"all entries stay where they are; with --no-keep-layout: {found}"]
