"""State that an optimizer keeps beside that of its parameters.

    optimizer.state["rounds"] = {"done": 7}     a key that is no parameter: saved for each rank
    optimizer.state_dict()["slow"]              of a class with a state dict of its own: not saved, and told of

saved at extra.optimizer_keys.rank0.<name of the optimizer>.rounds.done
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.state_paths import nest
from ckptmap.errors import LoadError
from ckptmap.live.model import integer_keys
from ckptmap.live.model.rank_group import rank_and_world
from ckptmap.live.optimizer.group_objects import is_object
from ckptmap.live.optimizer.optimizer_types import LiveOptimizer
from ckptmap.live.optimizer.several_optimizers import SeveralOptimizers
from ckptmap.live.optimizer.unwrap import is_offloaded, is_partitioned, layers_of, several_of
from ckptmap.storage.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    import torch

KEY = "optimizer_keys"
"""Key of these states among the extra values."""
ALONE = "optimizer"
"""Name of an optimizer that is the only one."""
TORCHS = frozenset({"state", "param_groups"})
"""Keys of a state dict of torch.optim."""


def held(optimizer: object) -> dict[str, dict[Any, object]]:
    """Return the values under keys that are no parameters, by the name of the optimizer."""
    found = {name: dict(_plain_items(one)) for name, one in _not_offloaded(by_name(optimizer))}
    return {name: values for name, values in found.items() if values}


def by_name(optimizer: object) -> Mapping[str, LiveOptimizer]:
    """Return an `unwrapped` optimizer, or several, by name."""
    several = isinstance(optimizer, SeveralOptimizers)
    named: Mapping[str, Any] = optimizer.by_name if several else {ALONE: optimizer}  # type: ignore[attr-defined]
    return named


def _not_offloaded(
    optimizers: Mapping[str, LiveOptimizer],
) -> Iterator[tuple[str, LiveOptimizer]]:
    return ((name, one) for name, one in optimizers.items() if not is_offloaded(one))


def unsaved(optimizer: object, objects: Iterable[object]) -> list[str]:
    """Return what an optimizer keeps that no checkpoint of it has: keys of a state dict of its own, of a
    wrapper around it, values that are objects, and other optimizers that it steps.

    objects  what the caller saves as `stateful`: those are saved whole"""
    given = [*objects]
    found: list[str] = []
    if optimizer is None:
        return found
    for one in several_of(optimizer).values() or [optimizer]:
        if not callable(getattr(type(one), "state_dict", None)) or not hasattr(one, "__dict__"):
            continue  # no optimizer: it is refused where its parameters are asked for
        layers = [*layers_of(one)]
        for layer in layers:
            found += [
                f"{type(layer).__name__} keeps the state of its {name}"
                for name in _optimizers_inside(layer, [*layers, *given])
            ]
        for layer, inner in zip(layers, [*layers[1:], None], strict=True):
            if any(layer is other for other in given):
                break
            names = sorted({*_own_keys(layer), *_own_state(layer, inner)})
            if names:
                found.append(f"{type(layer).__name__} keeps {', '.join(names)} of its own")
    return found


def _optimizers_inside(layer: Any, known: Iterable[object]) -> Iterator[str]:
    """Yield the attributes that hold an optimizer with state, as SAM's `base_optimizer`, which steps the same
    parameters. `known` are optimizers that are saved."""
    import torch

    if is_offloaded(layer) or is_partitioned(layer) or several_of(layer):
        return
    saved = [*known]
    for name, value in vars(layer).items():
        if isinstance(value, torch.optim.Optimizer) and not any(value is one for one in saved):
            states = (getattr(one, "state", None) for one in saved)
            if value.state and not any(value.state is state for state in states):
                yield name


def _own_keys(layer: Any) -> Iterator[str]:
    """Yield the keys of a state dict that are not those of torch's optimizers."""
    import torch

    if is_offloaded(layer) or type(layer).state_dict is torch.optim.Optimizer.state_dict:
        return
    try:
        known = layer.state_dict()
    except Exception:  # such as ZeroRedundancyOptimizer's, which asks for a collective before it
        return
    if isinstance(known, Mapping):
        yield from (str(key) for key in known if key not in TORCHS)


def _own_state(layer: Any, inner: Any) -> Iterator[str]:
    """Yield the name of state that a wrapper keeps apart from that of the optimizer inside of it, and those
    of objects among the state of the optimizer itself."""
    state = getattr(layer, "state", None)
    if not isinstance(state, Mapping) or is_offloaded(layer):
        return
    if inner is not None:
        if state and state is not inner.state:
            yield "state"
        return
    yield from (f"state[{key!r}]" for key, value in _items(layer) if not _is_plain(key, value))


def _items(optimizer: Any) -> Iterator[tuple[Any, object]]:
    import torch

    return ((k, v) for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor))


def _plain_items(optimizer: object) -> Iterator[tuple[Any, object]]:
    return (item for item in _items(optimizer) if _is_plain(*item))


def _is_plain(key: object, value: object) -> bool:
    return type(key) in (str, int) and not is_object(value)


def recorded(checkpoint: Checkpoint) -> dict[str, Mapping[Any, object]]:
    """Return the keys that each optimizer had on this rank, or on the first one where fewer ranks saved, by
    its name. Raises LoadError CKM506 where they are no dicts."""
    values = {**checkpoint.plain, **checkpoint.other}
    saved = nest({path: value for path, value in values.items() if path[0] == KEY}).get(KEY, {})
    by_rank: Mapping[str, Any] = saved if isinstance(saved, Mapping) else {}
    own = by_rank.get(f"rank{rank_and_world()[0]}", by_rank.get("rank0"))
    mine = _dict(own, checkpoint.path)
    return {
        name: integer_keys.restored(_dict(found, checkpoint.path)) for name, found in mine.items()
    }


def restore(
    keys: Mapping[str, Mapping[Any, object]], optimizers: Mapping[str, LiveOptimizer]
) -> None:
    """Give each optimizer the keys that were recorded for it, and no others."""
    for name, one in _not_offloaded(optimizers):
        state: Any = one.state
        devices = {p.device: None for group in one.param_groups for p in group["params"]}
        before = dict(_plain_items(one))
        for key in before:
            del state[key]
        for key, value in keys.get(name, {}).items():
            state[key] = _live(value, before.get(key), next(iter(devices), None))


def _dict(found: object, path: str) -> Mapping[str, Any]:
    """Return what a file has as a dict. Raises LoadError CKM506 where it has something else."""
    if isinstance(found, Mapping):
        return found
    if not found:
        return {}
    raise LoadError(
        "CKM506",
        f"{path}: extra.{KEY}: is a {type(found).__name__}, expected values by name",
        "ckptmap.save writes no such value: save the run again, or load without optimizer",
    )


def _live(value: object, live: object, device: torch.device | None) -> object:
    """Return a saved value with its tensors read, each on the device of the live one or of a parameter."""
    import torch

    if isinstance(value, LazyTensor):
        on = live.device if isinstance(live, torch.Tensor) else device
        return value.read().to(on if value.shape or isinstance(live, torch.Tensor) else None)
    if isinstance(value, Mapping):
        inside: Mapping[Any, object] = live if isinstance(live, Mapping) else {}
        items = integer_keys.restored(value).items()
        return {key: _live(item, inside.get(key), device) for key, item in items}
    if isinstance(value, list | tuple):
        return type(value)(_live(item, None, device) for item in value)
    return copy.deepcopy(value)
