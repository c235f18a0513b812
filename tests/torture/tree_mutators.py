"""Mutate what a file of torch.save holds, and let torch save it again: valid in itself, wrong in what it says.

Used where several files, or a file and what is beside it, say the same thing.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.torture.mutators import INTS, TEXTS, some_file


def tree(draw: random.Random, path: Path) -> str:
    """One tensor, number, text or key of a file, of one rank perhaps."""
    file = some_file(draw, path, ".pt", ".ckpt")
    saved = torch.load(file, weights_only=False)  # of the corpus: its framework wrote it
    tensors = draw.random() < 0.6
    places = [p for p in _places(saved) if isinstance(p[0][p[1]], Tensor) == tensors]
    if not places:
        return f"{file.name}: nothing"
    holder, key = draw.choice(places)
    if tensors:
        said = _change_tensor(draw, holder, key, places)
    else:
        said = _change_value(draw, holder, key)
    torch.save(saved, file)
    return f"{file.parent.name}/{file.name}: {key!r:.60}: {said}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (holder, key) of all that can be replaced in a tree; a Namespace is held as its dict."""
    inside = vars(value) if isinstance(value, Namespace) else value
    items = inside.items() if isinstance(inside, dict) else enumerate(inside)
    for key, inner in list(items):
        if isinstance(inner, (dict, list, Namespace)):
            yield from _places(inner)
        else:
            yield inside, key


def _change_tensor(
    draw: random.Random, holder: Any, key: Any, places: list[tuple[Any, Any]]
) -> str:
    old: Tensor = holder[key]
    kind = draw.choice(
        ("value", "value", "shorter", "longer", "transposed", "dtype", "drop", "rename", "exchange")
    )
    if kind == "value" and old.numel():
        new = old.clone()
        new.view(-1)[draw.randrange(new.numel())] += 1
        holder[key] = new
    elif kind == "shorter" and old.ndim:
        dim = draw.randrange(old.ndim)
        holder[key] = old.narrow(dim, 0, max(old.shape[dim] - 1, 0)).clone()
    elif kind == "longer" and old.ndim:
        dim = draw.randrange(old.ndim)
        holder[key] = torch.cat([old, old.narrow(dim, 0, min(1, old.shape[dim]))], dim)
    elif kind == "transposed":
        holder[key] = draw.choice((old.T if old.ndim == 2 else old[None], old.reshape(-1)))
    elif kind == "dtype":
        holder[key] = old.to(draw.choice((torch.float16, torch.bfloat16, torch.int32)))
    elif kind == "exchange":
        other, name = draw.choice(places)
        holder[key], other[name] = other[name], old
        kind = f"exchanged with {name!r:.60}"
    elif kind == "rename" and isinstance(holder, dict) and isinstance(key, str):
        name = draw.choice((*map(str, holder), f"{key}.x", f"module.{key}", *TEXTS))
        holder[name] = holder.pop(key)
        kind = f"renamed to {name!r:.60}"
    else:
        del holder[key]
        kind = "dropped"
    return kind


def _change_value(draw: random.Random, holder: Any, key: Any) -> str:
    old = holder[key]
    if draw.random() < 0.2:
        del holder[key]
        return "dropped"
    near = (old + 1, old - 1, old * 2, -old) if type(old) in (int, float) else ()
    new = draw.choice((*near, *near, *near, None, True, [], {}, 1.5, *INTS[:-2], *TEXTS[:-3]))
    holder[key] = new
    return f"{old!r:.30} -> {new!r:.30}"
