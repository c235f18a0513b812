"""The arguments of `load` that make the names of a checkpoint those of the model, for a hint.

student.fc.weight in the file, fc.weight in the model  ->  strip_prefix='student'
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.several_models import recorded_in
from ckptmap.live.model import several_models
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.mapping.detect import known_below
from ckptmap.mapping.prefixes import PrefixChange, nearest_change
from ckptmap.mapping.renaming import Renaming


def arguments_hint(names: Collection[str], targets: Sequence[LiveTensor], given: Renaming) -> str:
    """Return the hint; "": no change of a prefix makes names match.

    names  those of the checkpoint, before the arguments of this call have changed them
    given  what those arguments change
    """
    # A checkpoint of the base has no tensors of peft's adapters.
    targets = [one for one in targets if one.adapted is None or not one.adapted.adapter]
    change = nearest_change(names, list(_wanted(targets)))
    if change is None:
        known = known_below(names)
        return "" if known is None else _text(known, "names of a known scheme are below it")
    if change.renaming == given and not change.drop:
        return ""
    new = set(change.renaming.names(names, "checkpoint").values())
    all_there = all(target.named_in(new) for target in targets)
    return _text(change, change.outcome, strict=all_there and change.drop is not None)


def other_models_hint(checkpoint: Checkpoint, model: object) -> str:
    """Return how to leave out the models of a checkpoint that the call does not name; "": it names no
    model of the checkpoint, or all of them."""
    wanted, stored = several_models.names_of(model), recorded_in(checkpoint)
    others = [name for name in stored if name not in wanted]
    if not others or len(others) == len(stored):
        return ""
    return f"give these models too, or leave them out: drop={[f'{name}.*' for name in others]!r}"


def state_dict_hint(names: Collection[str], targets: Sequence[LiveTensor]) -> str:
    """Return the expression that gives a state dict the model's names; "": a prefix is not the cause."""
    change = nearest_change(names, list(_wanted(targets)))
    if change is None or (change.old and change.new):
        return ""
    key = f"{change.new + '.'!r} + k" if change.new else f"k.removeprefix({change.old + '.'!r})"
    return f"pass {{{key}: v for k, v in state_dict.items()}}: {change.outcome}"


def _text(change: PrefixChange, outcome: str, strict: bool = True) -> str:
    rest = "" if strict else ", strict=False"
    return f"load it with {change.arguments}{rest}: {outcome}"


def _wanted(targets: Sequence[LiveTensor]) -> Iterator[str]:
    """Yield the names that a checkpoint of the model has: of one that peft has wrapped, its base's."""
    for target in targets:
        yield from target.names if target.adapted is None else target.adapted.base or target.names
