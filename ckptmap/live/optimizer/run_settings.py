"""Settings of a run that no state dict holds and an exact continuation depends on.

Constructor arguments of the optimizer, compile mode, settings of gradients, versions, world size, and
how every tensor is cut. `save` records them, and `load` compares them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptmap.core.state_paths import nest
from ckptmap.live.model import dropout, module_walk, plain_attributes, several_models
from ckptmap.live.model.flat_params import FlatParamTensor
from ckptmap.live.model.live_form import live_forms, logical_info
from ckptmap.live.model.live_tensor import (
    LiveTensor,
    device_for,
    fallback_device,
    is_dtensor,
)
from ckptmap.live.model.rank_group import rank_and_world
from ckptmap.live.optimizer import gradients, group_objects, numerics
from ckptmap.live.optimizer.several_optimizers import SeveralOptimizers
from ckptmap.live.optimizer.unwrap import family_of, inner_optimizers, unwrapped
from ckptmap.live.rounding import record as rounding

if TYPE_CHECKING:
    import torch

    from ckptmap.checkpoint.checkpoint import Checkpoint
    from ckptmap.live.optimizer.optimizer_types import LiveOptimizer

Settings: TypeAlias = dict[str, Any]
"""Settings of a run by name: plain values, and dicts of them."""

VERSION = 2
ALL_ENTRIES = 2
"""Version since which an entry of optimizer state that is not in a checkpoint was not there."""
KEY = "ckptmap"
"""Key of the settings among the extra values."""
PLACEMENTS = "placements"
"""Setting that says how optimizer state is placed on ranks, by FQN (see `state_placement`)."""
BY_NAME = {"compile": "modules", "gradients": "parameters that are trained"}
"""Settings of which one entry goes by names."""
WITHOUT = "gradients_left_out"
"""Setting that says which gradients of an accumulation were not saved."""
STATE_ON_CPU = "state_on_cpu"
"""Setting of an optimizer: names of its entries on the CPU beside parameters on another device."""
SCHEDULER = "scheduler"
"""Setting that has the class of the scheduler, and of those inside of it."""
SCHEDULERS = "ckptmap.schedulers"
"""Key of the states of each rank's scheduler among the extra values, where they differ."""
UNSAVED = "optimizer_state_left_out"
"""Setting that says what an optimizer keeps that is not saved."""
UNLIKE = "unlike_values"
"""Setting that names plain values of optimizer state that differ between ranks."""
FORMS = "plain_forms"
"""Setting that names plain values of optimizer state that were saved as a value of a simpler class."""
EVALUATING = "modules_in_evaluation"
"""Setting that has the count of modules in evaluation mode, and of all."""
NUMBERS = "numbers"
"""Setting of an optimizer: numbers among its attributes, which no state dict has."""
MODE_ADVICE = "see that model.train() or model.eval() comes before the next step"
"""End of the note on it; a trainer that sets the mode before each step has no use for it."""


def recorded(checkpoint: Checkpoint) -> Mapping[str, object]:
    """Return the settings that a checkpoint records; empty: ckptmap did not save it."""
    found = nest(checkpoint.plain).get(KEY)
    return found if isinstance(found, Mapping) else {}


def describe(
    model: torch.nn.Module, optimizer: object, targets: Sequence[LiveTensor], world: int
) -> Settings:
    """Return the settings of this rank as plain values."""
    import torch

    fallback = fallback_device(targets)  # for tensors that are on meta until they are loaded
    devices = sorted({device_for(target, fallback).type for target in targets})
    several = several_models.names_of(model)
    settings: Settings = {
        **({several_models.KEY: list(several)} if several else {}),
        "version": VERSION,
        "world_size": world,
        "mesh": meshes(targets),
        "layout": layout_digest(targets),
        "devices": devices,
        "torch": torch.__version__,
        "compile": compile_mode(model),
        "gradients": {**gradients.described(model, targets), **numerics.described(devices)},
        EVALUATING: evaluating(model),
        "dropout": dropout.described(model),
    }
    if numbers := plain_attributes.described(model):
        settings[plain_attributes.KEY] = numbers
    if devices == ["cpu"]:
        settings["threads"] = torch.get_num_threads()
    if any(form.has_rounded_scales(target) for form in live_forms() for target in targets):
        settings["rounded_scales"] = True
    if optimizer is not None:
        settings["optimizer"] = describe_optimizer(optimizer)
    return settings


def describe_optimizer(optimizer: object) -> dict[str, object]:
    """Return the optimizer's class, the arguments that its state dict does not hold, and its library."""
    outer = unwrapped(optimizer)
    if isinstance(outer, SeveralOptimizers):
        several = {name: describe_optimizer(one) for name, one in outer.by_name.items()}
        return {"several": several, "rounds": any(one["rounds"] for one in several.values())}
    inner = inner_optimizers(outer)
    first = inner[0]
    family = family_of(first)
    settings = {
        **class_of(outer),
        "flags": family.flags(first) | _objects(inner),
        "rounds": any(
            family_of(inner_optimizer).rounds(inner_optimizer) for inner_optimizer in inner
        ),
    }
    if numbers := _own_numbers([outer, *inner]):
        settings[NUMBERS] = numbers
    if on_cpu := _entries_on_cpu(inner):
        settings[STATE_ON_CPU] = on_cpu
    if (installed := rounding.record_of(first)) is not None:
        settings["rounding"] = rounding.described(installed)
    library = type(outer).__module__.split(".")[0]
    if library != "torch":
        settings["library"] = f"{library} {_version(library)}"
    return settings


def _own_numbers(optimizers: Sequence[LiveOptimizer]) -> dict[str, object]:
    """Return the numbers among the attributes of an optimizer, such as a count of its own steps, on rank 0: other
    ranks may have others, as their rank is. Flags are settings; a class with a state dict of its own tells them."""
    import torch

    if rank_and_world()[0]:
        return {}
    return {
        name: value
        for one in optimizers
        if getattr(type(one), "state_dict", None) is torch.optim.Optimizer.state_dict
        for name, value in vars(one).items()
        if type(value) in (int, float) and math.isfinite(value) and not name.startswith("_")
    }


def class_of(optimizer: LiveOptimizer) -> dict[str, object]:
    """Return what tells the class of an `unwrapped` optimizer."""
    cls, inner = type(optimizer), inner_optimizers(optimizer)[0]
    found: dict[str, object] = {"class": cls.__name__, "module": cls.__module__}
    return {**found, "inner": type(inner).__name__} if inner is not optimizer else found


def _entries_on_cpu(optimizers: Sequence[LiveOptimizer]) -> list[str]:
    """Return the names of state on the CPU beside a parameter on another device, such as step counts."""
    import torch

    states = (pair for one in optimizers for pair in one.state.items())
    return sorted(
        {
            str(name)
            for param, state in states
            if isinstance(param, torch.Tensor) and param.device.type != "cpu"
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.device.type == "cpu"
        }
    )


def _objects(optimizers: Sequence[LiveOptimizer]) -> dict[str, object]:
    """Return the names of objects in the groups, which no checkpoint holds."""
    named = group_objects.names(group for one in optimizers for group in one.param_groups)
    return {"objects in groups": named} if named else {}


def evaluating(model: torch.nn.Module) -> list[int]:
    """Return how many modules without submodules are in evaluation mode, and how many there are."""
    inner = [module for module in module_walk.modules(model) if not module._modules]
    return [sum(not module.training for module in inner), len(inner)]


def mode_note(saved: Mapping[str, Any], live: Settings) -> list[str]:
    """Return a note where other modules are in evaluation mode than were: a loop sets it before its next
    step, or has forgotten to."""
    was, now = saved.get(EVALUATING), live[EVALUATING]
    if not isinstance(was, list) or was == now or was[1:] != now[1:]:
        return []
    return [
        f"{was[0]} of {was[1]} modules were in evaluation mode when it was saved, {now[0]} are now:"
        f" {MODE_ADVICE}"
    ]


def _version(library: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library)
    except PackageNotFoundError:
        return "?"


def meshes(targets: Sequence[LiveTensor]) -> list[list[object]]:
    """Return [mesh shape, dim names, placements] of every combination that occurs."""
    seen: dict[str, list[object]] = {}
    for target in targets:
        tensor = target.tensor
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            names = list(mesh.mesh_dim_names or ())
            entry: list[object] = [list(mesh.shape), names, [str(p) for p in tensor.placements]]
            seen.setdefault(repr(entry), entry)
    return list(seen.values())


def layout_digest(
    targets: Sequence[LiveTensor], becomes: Mapping[str, tuple[str, str]] | None = None
) -> str:
    """Return a digest of the boxes, classes and dtypes that this rank holds. `becomes` has the (class,
    dtype) of tensors that a load will replace, by FQN."""
    becomes = becomes or {}
    digest = hashlib.blake2b(digest_size=8)
    for target in sorted(targets, key=lambda target: target.fqn):
        boxes: object
        if isinstance(target, FlatParamTensor):
            boxes = (target.first, target.count, target.at)
        elif whole := logical_info(target):
            boxes = whole.shape  # a forward on the CPU changes the shape of the codes
        else:
            boxes = [box for box, _ in target.own_boxes]
        now = type(target.local).__name__, target.forward_dtype or target.dtype
        kind, dtype = becomes.get(target.fqn, now)
        digest.update(repr((target.names, kind, dtype, boxes)).encode())
    return digest.hexdigest()


def compile_mode(model: torch.nn.Module) -> dict[str, object]:
    """Return the settings that decide whether a step is compiled, and draws random numbers in kernels."""
    import torch

    names = [name for name, module in module_walk.named_modules(model) if _is_compiled(module)]
    settings: dict[str, object] = {"modules": names, "stance": _stance()}
    inductor = getattr(torch, "_inductor", None)
    config = getattr(inductor, "config", None)
    if config is not None:
        settings["fallback_random"] = bool(config.fallback_random)
    return settings


def _is_compiled(module: torch.nn.Module) -> bool:
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def _stance() -> str:
    """Return torch.compile's stance: `default`, `force_eager`, ...; `disabled` by the environment."""
    import torch._dynamo

    if torch._dynamo.config.disable:
        return "disabled"
    stance = getattr(torch._dynamo.eval_frame, "_stance", None)
    return str(getattr(stance, "stance", "default"))


# ------------------------------------------------------------------------------- compared


def differences(
    saved: Mapping[str, Any], live: Settings, settled: Collection[str] = ()
) -> list[str]:
    """Return a phrase for every setting that differs: its name, the recorded value, the live value. Those
    in `settled` may differ."""
    phrases = []
    titles = {
        "world_size": "world size", "mesh": "mesh", "layout": "how tensors are cut",
        "devices": "devices", "torch": "torch", "threads": "CPU threads",
        "dropout": "dropout", several_models.KEY: "models",
    }  # fmt: skip
    for key, title in titles.items():
        if key not in settled and key in saved and saved[key] != live.get(key):
            phrases.append(_phrase(title, saved[key], live.get(key)))
    phrases += _differing_entries("compile mode", saved.get("compile"), live.get("compile"))
    if "gradients" in saved:
        gradients_of = (_gradients(_entries(run["gradients"]), settled) for run in (saved, live))
        phrases += _differing_entries("gradients", *gradients_of)
    if live.get("optimizer") is not None:
        phrases += _of_optimizer("optimizer", _entries(saved.get("optimizer")), live["optimizer"])
    return phrases


def _entries(value: object) -> Mapping[str, Any]:
    """Return a dict of settings; one with the value itself where a file has no dict, which differs from any."""
    if isinstance(value, Mapping):
        return value
    return {"": value} if value else {}


def _of_optimizer(title: str, saved: Mapping[str, Any], live: Settings) -> list[str]:
    """Return a phrase for every difference of an optimizer, or of several by name."""
    several, now = (_entries(each.get("several")) for each in (saved, live))
    if several.keys() != now.keys():
        return [_phrase(f"{title}s", sorted(map(str, several)) or "one", sorted(now) or "one")]
    phrases = _differing_rounding(title, saved, live)
    phrases += [
        _phrase(f"{title} {key}", saved.get(key), live.get(key))
        for key in ("class", "inner", "library")
        if saved.get(key) != live.get(key)
    ]
    phrases += _differing_entries(title, saved.get("flags"), live.get("flags"))
    numbers, own = _entries(saved.get(NUMBERS)), _entries(live.get(NUMBERS))
    phrases += [
        _phrase(f"{title}.{name}, which is not in its state dict", numbers[name], own[name])
        for name in own
        if name in numbers and numbers[name] != own[name]
    ]
    for name, one in now.items():
        phrases += _of_optimizer(f"{title} {name!r}", _entries(several[name]), one)
    return phrases


def _gradients(settings: Mapping[str, Any], settled: Collection[str]) -> Settings:
    """Return the settings of gradients that must be equal. Where the wrappers that average may differ, so
    may the dtype in which they do."""
    kept = {name: value for name, value in settings.items() if name not in settled}
    if gradients.AVERAGED in settled:
        texts = settings.get(gradients.PRECISION) or ()
        texts = texts if isinstance(texts, list | tuple) else [texts]
        policies = (str(text).split(" ") for text in texts)
        bare = {
            " ".join(w for w in words if not w.startswith("reduce_dtype=")) for words in policies
        }
        kept[gradients.PRECISION] = sorted(bare - {""})
    return kept


def _differing_rounding(title: str, saved: Mapping[str, Any], live: Settings) -> list[str]:
    """Return whether random bits of rounding come from elsewhere than they did. A seed is restored."""
    was, is_now = (rounding.how(run) for run in (saved, live))
    return [] if was == is_now else [_phrase(f"{title} rounds", was, is_now)]


def without_names(settings: Mapping[str, Any]) -> Settings:
    """Return the settings that go by no name of a parameter or module."""
    kept = {key: value for key, value in settings.items() if key != "layout"}
    for key, named in BY_NAME.items():
        if isinstance(found := kept.get(key), Mapping):
            kept[key] = {name: value for name, value in found.items() if name != named}
    return kept


def _differing_entries(title: str, was: object, now: object) -> list[str]:
    saved, live = _entries(was), _entries(now)
    keys = [key for key in {**saved, **live} if saved.get(key) != live.get(key)]
    return [_phrase(f"{title} {key}", saved.get(key), live.get(key)) for key in keys]


def _phrase(title: str, saved: object, live: object) -> str:
    return f"{title}: was {saved}, is {live}"
