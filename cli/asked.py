"""From what was typed to the library's `Options`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptmap.optim.order import read_order
from ckptmap.planning.options import MAX_SHARD_NBYTES, Options

from .options import parse_nbytes

if TYPE_CHECKING:
    from ckptmap.checkpoint.checkpoint import Checkpoint

REPEATABLE = ("include", "exclude", "drop", "encode", "no_encode", "fsdp_units")


def options(to: str, **typed: Any) -> Options:
    """Repeated options as tuples, `--wrap a,b` as a tuple, sizes in bytes."""
    wrap: str | None = typed.pop("wrap")
    shard: str | None = typed.pop("max_shard_size")
    order: str | None = typed.pop("param_order")
    exact: bool = typed.pop("exact_scales")
    many: dict[str, Any] = {name: tuple(typed.pop(name) or ()) for name in REPEATABLE}
    return Options(
        to=to,
        wrap=None if wrap is None else tuple(name for name in wrap.split(",") if name),
        max_shard_nbytes=MAX_SHARD_NBYTES if shard is None else parse_nbytes(shard),
        param_order=None if order is None else read_order(order),
        exact_scales=("*",) if exact else (),
        **many,
        **typed,
    )


def source(
    path: str, root: str | None = None, like: str | None = None, param_order: str | None = None
) -> Checkpoint | str:
    """A checkpoint that needs more than its path to be opened; its path where nothing was given."""
    if root is None and like is None and param_order is None:
        return path
    import ckptmap

    order = None if param_order is None else read_order(param_order)
    return ckptmap.open(path, root=root, like=like, param_order=order)
