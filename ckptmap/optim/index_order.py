"""Find the parameter that an index means, in files that key optimizer state by index.

The first of these sources that can tell is used: an order given by the user; `param_names` in the
groups; the order of the weights, if it is that of the saved dict; a transformers class built from
config.json. Shapes can refute an order and never prove one: two parameters of one shape differ in
their place alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from ckptmap.core.formatting import counted
from ckptmap.core.json_text import parse_json
from ckptmap.errors import SourceError
from ckptmap.optim.state import NAMES, PARAMS, SCRATCH, Optimizer
from ckptmap.sharding.reference_model import is_alphabetical
from ckptmap.storage.resource_limits import unreadable
from ckptmap.tensors import BUFFERS, FLOATING, TensorInfo

Order = Sequence[Sequence[str]]
"""Names of the parameters of each group, in the groups' order."""

Shapes = Mapping[str, tuple[int, ...]]
"""State name -> shape."""


MODEL_ORDER = "the order of the saved model dict"
"""The source of an order of `from_model`, as reports name it."""


@dataclass(frozen=True)
class Weight:
    """A tensor of the model dict; `share` is equal for names that are tied."""

    fqn: str
    info: TensorInfo
    share: object = None


def from_groups(optimizer: Optimizer) -> list[list[str]] | None:
    """Return `param_names`, which torch >= 2.6 keeps for an optimizer built from named_parameters();
    None: the groups have none."""
    order: list[list[str]] = []
    for group in optimizer.groups:
        names = group.get(NAMES)
        if not isinstance(names, list | tuple) or len(names) != len(group[PARAMS]):
            return None
        if not all(isinstance(name, str) for name in names):
            return None
        order.append(list(names))
    return order if any(order) else None


def read_order(path: str | os.PathLike[str]) -> tuple[tuple[str, ...], ...]:
    """Return the order that a file lists, one tuple of names a group.

    The file is JSON (a list of names a group, or one list), or has one name a line with an empty
    line between groups; `#` starts a comment. Raises SourceError CKM207.
    """
    try:
        text = FilePath(path).read_text(encoding="utf-8")
        order = parse_json(text) if text.lstrip().startswith("[") else _lines(text)
    except (OSError, ValueError) as error:
        if isinstance(error, PermissionError):
            raise unreadable(path, error) from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise _unreadable(path, str(reason)) from error
    if order and all(isinstance(name, str) for name in order):
        order = [order]
    lists = isinstance(order, list) and all(isinstance(group, list) for group in order)
    if not lists or not all(isinstance(name, str) for group in order for name in group):
        raise _unreadable(path, "expected a list of names a group")
    return tuple(tuple(group) for group in order)


def _lines(text: str) -> list[list[str]]:
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        name = line.partition("#")[0].strip()
        if name:
            blocks[-1].append(name)
        elif not line.strip() and blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]


def _unreadable(path: str | os.PathLike[str], problem: str) -> SourceError:
    return SourceError(
        "CKM207",
        f"{os.fspath(path)}: is not a parameter order: {problem}",
        "write one parameter name a line, with an empty line between groups",
    )


def check_given(optimizer: Optimizer, order: Order, where: str) -> None:
    """Raise SourceError CKM207 if the user's order has not as many names as the groups parameters."""
    expected = [len(group[PARAMS]) for group in optimizer.groups]
    listed = [len(names) for names in order]
    if expected == listed:
        return
    raise SourceError(
        "CKM207",
        f"{where}: the parameter order has {_counted(listed)}, the optimizer {_counted(expected)}",
        "list every parameter that the optimizer got, group by group, frozen ones too",
    )


def check_fits(
    optimizer: Optimizer, names: Mapping[str, str], weights: Mapping[str, TensorInfo], where: str
) -> None:
    """Raise SourceError CKM207 where a shape refutes the order that someone gave."""
    for key, shapes in state_shapes(optimizer).items():
        info = weights.get(names[key])
        if info is not None and not any(
            fits(name, shape, info.shape) for name, shape in shapes.items()
        ):
            title, shape = next(iter(shapes.items()))
            raise SourceError(
                "CKM207",
                f"{where}: parameter {key} cannot be {names[key]}: its {title} has shape"
                f" {list(shape)}, the weight {list(info.shape)}",
                "list the parameters in the order in which the optimizer got them, group by group",
            )


def from_model(optimizer: Optimizer, weights: Sequence[Weight]) -> list[list[str]] | str:
    """Return the order in which every group lists parameters as the model dict does, if there is
    exactly one; else the reason.

    Buffers lie among the weights and frozen parameters may be in no group, so weights may be
    skipped; a tied weight counts once. Where shapes allow a second way, be it that of groups made
    from sorted names, or the order is no longer the model's (alphabetical, as safetensors sorts),
    nothing is chosen.
    """
    candidates = _candidates(weights)
    names = [weight.fqn for weight in candidates]
    all_names = [weight.fqn for weight in weights]
    sorted_anew = is_alphabetical(all_names, [weight.info.dtype for weight in weights])
    if sorted_anew and len(set(map(_folded, names))) > 1:
        return "the weights are in alphabetical order, not in the model's"
    shapes = state_shapes(optimizer)
    groups = [[shapes.get(key, {}) for key in group[PARAMS]] for group in optimizer.groups]
    count = sum(map(len, groups))
    if not count or count > len(candidates):
        return f"the optimizer has {counted(count, 'parameter')}, the model {len(candidates)}"
    from ckptmap.optim.align_order import align_named

    aligned = align_named(groups, [weight.info.shape for weight in candidates], names, _all_fit)
    if isinstance(aligned, str):
        return aligned
    return [[names[place] for place in places] for places in aligned]


def _candidates(weights: Sequence[Weight]) -> list[Weight]:
    """Return weights that can be parameters: floating, the first of a tied pair, no well-known buffer."""
    seen: set[object] = set()
    candidates = []
    for weight in weights:
        is_buffer = weight.fqn.rpartition(".")[2] in BUFFERS
        if not is_buffer and weight.info.dtype in FLOATING and weight.share not in seen:
            candidates.append(weight)
        seen |= {weight.share} - {None}
    return candidates


def _folded(name: str) -> str:
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


# ------------------------------------------------------------------ what shapes say


NO_SHAPE = {"step", *SCRATCH}
"""State that has a shape of its own for any parameter."""


def state_shapes(optimizer: Optimizer) -> dict[str, Shapes]:
    """Return for every parameter the shapes of its state that say something of its own shape.

    The step count and the norms that LAMB and LARS of bitsandbytes keep are left out, and 0-d tensors
    if there are others.
    """
    by_key: dict[str, Shapes] = {}
    for key, tensors in optimizer.tensors.items():
        shapes = {name: lazy.shape for name, lazy in tensors.items() if name not in NO_SHAPE}
        by_key[key] = {name: shape for name, shape in shapes.items() if shape} or shapes
    return {key: shapes for key, shapes in by_key.items() if shapes}


def fits(name: str, state: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Return whether a weight of this shape can have such a state.

    The state has the weight's shape. If its name says that it is a row or a column of a factored
    moment, a dim may be missing or reduced to 1.
    """
    if state == weight:
        return True
    if not ("row" in name or "col" in name) or len(weight) < 2:
        return False
    if len(state) == len(weight):
        return all(s in (1, w) for s, w in zip(state, weight, strict=True))
    return any(state == weight[:dim] + weight[dim + 1 :] for dim in range(len(weight)))


def _all_fit(shapes: Shapes, weight: tuple[int, ...]) -> bool:
    return all(fits(name, shape, weight) for name, shape in shapes.items())


def _counted(counts: Sequence[int]) -> str:
    sizes = ", ".join(map(str, counts)) or "no"
    return f"{counted(len(counts), 'group')} of {sizes} parameter{'' if sizes == '1' else 's'}"
