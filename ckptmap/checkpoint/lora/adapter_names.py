"""Translate an adapter's names to the base's, if it was trained with another prefix of names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.lora.adapter_files import Adapter
from ckptmap.checkpoint.lora.untied_head import Tied, is_head


def names_in_base(adapter: Adapter, ckpt: Checkpoint, tied: Tied | None) -> Callable[[str], str]:
    """Return a function from the adapter's names to the base's.

    Names stay, or lose or gain a first segment (peft around a model, its backbone saved alone, or
    the reverse), or become those on disk of a model of several towers. A head that the base ties to
    its embedding is not looked for.
    """
    sets = [low.names for low in adapter.lows.values()] + [(name,) for name in adapter.trained]
    sets = [names for names in sets if tied is None or not is_head(names[0])]
    names = {name for some in sets for name in some}
    heads = dict.fromkeys(fqn.split(".", 1)[0] for fqn in ckpt if "." in fqn)
    ways: list[Callable[[str], str]] = [_same, _shorter]
    ways += [_longer(head) for head in heads]
    ways.append(lambda name: next((each for each in _on_disk(name) if each in ckpt), name))
    for way in ways:
        distinct = len({way(name) for name in names}) == len(names)
        if names and distinct and all(any(way(name) in ckpt for name in some) for some in sets):
            return way
    return _same


def _on_disk(name: str) -> Iterator[str]:
    """Yield the names on disk that a name in memory may have in a model of several towers.

    The rules are those of transformers 5; `formats.huggingface.loaded_names` goes the other way.
    """
    rest = name.removeprefix("model.language_model.")
    if rest != name:
        yield f"language_model.model.{rest}"
        yield f"model.{rest}"
    elif name.startswith("model."):
        yield _shorter(name)
    else:
        yield f"language_model.{name}"
    yield name


def _same(name: str) -> str:
    return name


def _shorter(name: str) -> str:
    return name.partition(".")[2]


def _longer(head: str) -> Callable[[str], str]:
    return lambda name: f"{head}.{name}"
