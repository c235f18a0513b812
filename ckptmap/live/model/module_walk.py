"""The modules of a model, listed once for a call that asks for them a dozen times while training waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Walk(NamedTuple):
    """A model and its modules: each once, with its name, and without. In the order of torch."""

    model: torch.nn.Module
    named: Sequence[tuple[str, torch.nn.Module]]
    modules: Sequence[torch.nn.Module]

    @classmethod
    def of(cls, model: torch.nn.Module) -> Walk:
        named = [*model.named_modules()]
        return cls(model, named, [module for _, module in named])


_listed: ContextVar[dict[int, Walk] | None] = ContextVar("_listed", default=None)
"""By the id of the model, which a Walk keeps alive; None: outside of `listed_once`."""


@contextmanager
def listed_once() -> Iterator[None]:
    """List the modules of a model once for all that is called in the context, which adds and removes none."""
    before = _listed.set({})
    try:
        yield
    finally:
        _listed.reset(before)


def _walk(model: torch.nn.Module) -> Walk:
    known = _listed.get()
    if known is None:
        return Walk.of(model)
    found = known.get(id(model))
    if found is None:
        found = known[id(model)] = Walk.of(model)
    return found


def modules(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """Return what `model.modules()` yields."""
    return _walk(model).modules


def named_modules(model: torch.nn.Module) -> Sequence[tuple[str, torch.nn.Module]]:
    """Return what `model.named_modules()` yields."""
    return _walk(model).named
