"""The tensors of a checkpoint as columns that JSON takes: names, kinds and layers.

There may be 100,000 tensors and a few dozen kinds. A name is stored as the number of dotted segments
that it shares with the name before it, and the rest of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ckptmap.core.printable import one_line
from ckptmap.operations.inspect import InspectReport, look_of

_LAYER = re.compile(r"^((?:[^.]+\.)*?)(\d+)(?:\.|$)")
"""Matches up to the first segment of a name that is a number: `model.layers.3.`."""
NAME_LENGTH = 1000
"""Characters of a name that the page holds."""


class Kind(NamedTuple):
    """What tensors of one kind share. `nbytes` counts the stored bytes of one of them."""

    role: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str
    nbytes: int


@dataclass(frozen=True)
class Tensors:
    """All tensors of a checkpoint: tensor i is `kinds[kind_of[i]]`, and belongs to a layer.

    names      FQNs as they are stored, weights first
    layers     titles of layers: `model.layers.3`, or a module's name where it has no number
    layer_of   the layer of each tensor
    """

    names: Sequence[str]
    kinds: Sequence[Kind]
    kind_of: Sequence[int]
    layers: Sequence[str]
    layer_of: Sequence[int]

    @cached_property
    def numbers(self) -> Mapping[tuple[str, str], int]:
        """The number of each tensor by its role and FQN."""
        roles = [self.kinds[kind].role for kind in self.kind_of]
        return {key: i for i, key in enumerate(zip(roles, self.names, strict=True))}

    @property
    def nbytes(self) -> int:
        return sum(self.kinds[kind].nbytes for kind in self.kind_of)

    def to_json(self) -> dict[str, object]:
        shared, tails = shared_segments([shown_name(name) for name in self.names])
        return {
            "shared": shared,
            "tails": tails,
            "kinds": [[k.role, list(k.shape), k.dtype, k.encoding, k.nbytes] for k in self.kinds],
            "kind": list(self.kind_of),
            "layers": [shown_name(title) for title in self.layers],
            "layer": list(self.layer_of),
        }


def collect(facts: InspectReport) -> Tensors:
    """Return the tensors of a checkpoint: weights, optimizer state that has names, and others."""
    names: list[str] = []
    kind_of: list[int] = []
    kinds: dict[Kind, int] = {}
    seen: dict[int, int] = {}
    for fqn, look in facts.looks.items():  # tensors of one kind share one object
        number = seen.get(id(look))
        if number is None:
            kind = Kind("model", look.shape, look.dtype, look.encoding, look.nbytes)
            number = seen[id(look)] = kinds.setdefault(kind, len(kinds))
        names.append(fqn)
        kind_of.append(number)
    for role, tensors in (("optimizer", facts.states), ("other", facts.other)):
        for lazy in tensors:
            look = look_of(lazy)
            kind = Kind(role, look.shape, look.dtype, look.encoding, look.nbytes)
            names.append(lazy.fqn)
            kind_of.append(kinds.setdefault(kind, len(kinds)))
    # State belongs to the layer of its parameter: `norm.weight.exp_avg` to that of `norm.weight`.
    states = range(len(facts.looks), len(facts.looks) + len(facts.states))
    parameters = [*facts.looks, *(names[i].rpartition(".")[0] for i in states)]
    layers, layer_of = layers_of([*parameters, *names[len(parameters) :]])
    return Tensors(names, list(kinds), kind_of, layers, layer_of)


def layers_of(names: Iterable[str]) -> tuple[list[str], list[int]]:
    """Return the titles of layers and the layer of each name.

    Layers of one stack stand in the order of their numbers, where the first of them appears.
    """
    numbers: dict[str, int] = {}
    layer_of = [numbers.setdefault(layer_title(name), len(numbers)) for name in names]
    stacks: dict[str, int] = {}
    keys = []
    for title, first in numbers.items():
        stack, _, last = title.rpartition(".")
        is_number = last.isascii() and last.isdigit()
        place = stacks.setdefault(stack if is_number else title, first)
        keys.append((place, int(last) if is_number and len(last) < 10 else 0, first, title))
    order = sorted(keys)
    new = {first: place for place, (_, _, first, _) in enumerate(order)}
    return [title for *_, title in order], [new[number] for number in layer_of]


def layer_title(name: str) -> str:
    """Return the layer of a tensor: `model.layers.3`, or the module of a name without a number."""
    match = _LAYER.match(name)
    if match is not None:
        return f"{match[1]}{match[2]}"
    module = name.rpartition(".")[0] or name
    return ".".join(module.split(".")[:3])


def projection(name: str) -> str:
    """Return a name without its layer, other numbers as `*`: `mlp.experts.*.up_proj.weight`."""
    match = _LAYER.match(name)
    rest = name[match.end() :] if match is not None else name
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", rest) or name


def shared_segments(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return for each name how many dotted segments it shares with the one before, and the rest."""
    shared, tails = [], []
    before = ""
    for name in names:
        head = name[: name.rfind(".") + 1]
        while not before.startswith(head):
            head = head[: head.rfind(".", 0, -1) + 1]
        shared.append(head.count("."))
        tails.append(name[len(head) :])
        before = name
    return shared, tails


def shown_name(name: str, most: int = NAME_LENGTH) -> str:
    """Return a name that a page can show: controls as escapes, and the first `most` characters."""
    text = one_line(name)
    return text if len(text) <= most else f"{text[:most]}… ({len(name):,} characters)"
