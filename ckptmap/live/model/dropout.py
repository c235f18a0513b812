"""Modules that drop values at random, so that a step depends on the random numbers of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptmap.core.formatting import counted, some
from ckptmap.live.model import module_walk

if TYPE_CHECKING:
    import torch

NONE = "none"


def names(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules that drop values."""
    return list(dict.fromkeys(name for name, _ in _rates(model)))


def described(model: torch.nn.Module) -> str:
    """Return the rates at which modules drop values, and how many do: "0.1 in 4, 0.5 in 1"."""
    counts = Counter(rate for _, rate in _rates(model))
    return ", ".join(f"{rate:g} in {counts[rate]}" for rate in sorted(counts)) or NONE


def drawing(dropping: Sequence[str], rounds: bool) -> str:
    """Return what is known to draw from torch's random stream in a step; empty: nothing is. `rounds`: does the
    optimizer, with bits of that stream?"""
    if dropping:
        return f"dropout ({counted(len(dropping), 'module')}: {some(dropping, 3)})"
    return "rounding" if rounds else ""


def _rates(model: torch.nn.Module) -> Iterator[tuple[str, float]]:
    """Yield (name of a module, rate). Attention keeps its rate as a number, and has no module that drops."""
    from torch import nn
    from torch.nn.modules.dropout import _DropoutNd

    of_any = vars(nn.Module()).keys()
    for name, module in module_walk.named_modules(model):
        own = vars(module)
        rates = (own[key] for key in own.keys() - of_any if "drop" in key.lower())
        found = [module.p] if isinstance(module, _DropoutNd) else rates
        yield from ((name, rate) for rate in found if isinstance(rate, float) and 0 < rate <= 1)
