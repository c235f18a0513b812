"""The errors for a checkpoint that does not fit its rules: they name the rule, the key, the sizes and the config."""

from __future__ import annotations

from collections.abc import Sequence

from ckptmap.errors import PlanError
from ckptmap.mapping.axes import Axes
from ckptmap.mapping.dims_table import Dims
from ckptmap.mapping.rules import NamingScheme, Rule
from ckptmap.tensors import TensorInfo

DIM = "a dim "
"""A needed name begins with this where the mapping file, not the config, must supply it."""


class ShapeError(PlanError):
    """PlanError CKM606 of one tensor; `told` says it to who knows config.json and no mapping file."""

    told = ""


def missing_config(scheme: NamingScheme, names: Sequence[str], subject: str) -> PlanError:
    """Return PlanError CKM605: `subject` needs values that neither the config nor `[dims]` supplies."""
    dims = [name for name in names if name.startswith(DIM)]
    if dims:
        return PlanError(
            "CKM605",
            f"{scheme.title}: {subject}: needs {dims[0]}, which the mapping file does not define",
            "add it to [dims] of the mapping file, with the config value that counts it",
        )
    return PlanError(
        "CKM605",
        f"{scheme.title}: {subject}: needs {', '.join(dict.fromkeys(names))}, and no config gives it",
        "give the model's config.json with --config-from PATH",
    )


def wrong_shape(
    scheme: NamingScheme,
    rule: Rule,
    key: str,
    info: TensorInfo,
    expected: Sequence[int | None],
    axes: Axes,
    dims: Dims,
) -> ShapeError:
    """Return PlanError CKM606: the shape of `key` is not the product of its axes."""
    shape = ", ".join("any" if n is None else str(n) for n in expected)
    sizes = ", ".join(
        f"{axis} {dims.size(axis)}"
        for axis in dict.fromkeys(axes.names())
        if dims.size(axis) is not None
    )
    error = ShapeError(
        "CKM606",
        f"{scheme.title}: {rule.label}: {key}: expected [{shape}] = {axes.text}"
        f" ({sizes}; {dims.describe()}), found {list(info.shape)}",
        "give the config.json of exactly this model with --config-from, or name another scheme or era",
    )
    differing = [
        Axes("", (dim,)).names()
        for dim, size, found in zip(axes.dims, expected, info.shape, strict=False)
        if size != found
    ]
    values = dict.fromkeys(v for names in differing for axis in names for v in dims.needed(axis))
    reasons = ", ".join(f"{name} {dims.used[name]}" for name in values if name in dims.used)
    error.told = f"{key} as [{shape}]{f' ({reasons})' * bool(reasons)}, found {list(info.shape)}"
    return error


def known_shape(rule: Rule, hub: bool, dims: Dims) -> tuple[int | None, ...] | None:
    """Return the shape of a rule's first tensor, None for a dim that is unknown; None without axes."""
    axes = rule.side(hub)[0].axes
    if axes is None:
        return None
    shape: list[int | None] = []
    for dim in axes.dims:
        one = Axes(axes.text, (dim,))
        sizes = {axis: dims.size(axis) for axis in one.names()}
        known = {axis: size for axis, size in sizes.items() if size is not None}
        shape.append(one.shape(known)[0] if len(known) == len(sizes) else None)
    return tuple(shape)
