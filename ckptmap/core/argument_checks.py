"""Check the arguments of Python calls: a value of the wrong kind is refused before any work.

Each function takes the name and the value of an argument, and raises ArgumentError CKM516 with what
was expected. Some return the value in the form that the library uses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any, TypeGuard

from ckptmap.core.sizes import MIN_MEMORY, parse_nbytes
from ckptmap.errors import ArgumentError, CkptmapError
from ckptmap.typed_options import as_given, in_call

MAX_DEPTH = 100
"""The most levels of dicts and lists in `extra`; a container that holds itself would have more."""
MAX_SHOWN = 60
"""Errors show values of up to this many characters; of a longer value they name the type."""
MAX_TIMEOUT_S = 365 * 86400.0
SEE_HELP = "help() of the function lists its arguments"


def _refusal(name: str, value: object, expected: str, hint: str = SEE_HELP) -> ArgumentError:
    text = repr(value)
    if len(text) > MAX_SHOWN:
        text = f"a {type(value).__name__}"
    return ArgumentError("CKM516", f"{in_call(name)}={text}, expected {expected}", hint)


def known_keywords(names: Iterable[str], known: Sequence[str], call: str) -> None:
    """Raise ArgumentError CKM516 for an unknown keyword; it suggests the nearest known one."""
    for name in names:
        if name in known:
            continue
        import difflib

        nearest = difflib.get_close_matches(name, known, n=1)
        expected = nearest[0] if nearest else f"one of {', '.join(sorted(known))}"
        raise ArgumentError(
            "CKM516", f"{name}: is not an argument of {call}, expected {expected}", SEE_HELP
        )


def choice(name: str, value: object, known: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise _refusal(name, value, f"one of {', '.join(map(repr, known))}")


def integer(name: str, value: Any, low: int, high: int = (1 << 63) - 1) -> int:
    """Return an integer of any library, such as NumPy, as a Python int."""
    try:
        number = index(value)
    except (TypeError, ValueError):
        raise _refusal(name, value, "an integer") from None
    if isinstance(value, bool) or not low <= number <= high:
        raise _refusal(name, value, f"an integer from {low} to {high}")
    return number


def timeout(value: object) -> None:
    if value is None:
        return
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value <= MAX_TIMEOUT_S
    ):
        raise _refusal("timeout", value, "seconds, more than 0 and at most a year, or None")


def nbytes(name: str, value: object) -> int:
    """Return a size in bytes, given as an integer or as text: `"64MiB"`."""
    if not isinstance(value, str):
        return integer(name, value, 1)
    try:
        return parse_nbytes(value)
    except ValueError:
        raise _refusal(name, value, "a size: 64MiB, 2GB or 4096") from None


def memory_of_conversion(name: str, value: object) -> int:
    """Return a bound for the buffers of a conversion in bytes."""
    bound = nbytes(name, value)
    if bound < MIN_MEMORY:
        raise _refusal(name, value, "2MiB or more, what one thread holds")
    return bound


def patterns(name: str, value: object) -> tuple[str, ...]:
    """Return one pattern or several as a tuple."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable) or not all(isinstance(item, str) for item in value):
        raise _refusal(name, value, "a pattern of names, or a list of them")
    return tuple(value)


def patterns_or_all(name: str, value: object) -> tuple[str, ...]:
    """Return patterns as a tuple: True matches every name, False and None match none."""
    if value is None or isinstance(value, bool):
        return ("*",) if value else ()
    return patterns(name, value)


def order(name: str, value: object) -> tuple[tuple[str, ...], ...]:
    """Return lists of names as tuples: one list a group."""
    groups = tuple(value) if _is_list(value) else (None,)
    hint = SEE_HELP
    if groups and all(isinstance(group, str) for group in groups):  # else it lists letters
        hint = f"an optimizer of one group: {name}=[[...]]"
    if not all(
        _is_list(group) and all(isinstance(item, str) for item in group) for group in groups
    ):
        raise _refusal(name, value, "a list of names for each group", hint)
    return tuple(map(tuple, groups))


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def path(name: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike):
        raise _refusal(name, value, "a path")


def written_path(name: str, value: object) -> None:
    """Refuse what is no path, and an empty one, which is the working directory for the calls that write."""
    path(name, value)
    if value == "":
        raise _refusal(name, value, "a path, not an empty one")


def device(name: str, value: object) -> None:
    """Refuse the name that everybody types and torch has not, also where nothing is computed."""
    if str(value).lower().partition(":")[0] == "gpu":
        raise ArgumentError(
            "CKM516",
            f"--{name} {str(value)!r}, expected cpu, cuda, or cuda:1",
            "list the devices here: ckptmap doctor",
        )


def flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False, of NumPy either: every text is true, "no" as well."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise _refusal(name, value, "True or False")


def string(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise _refusal(name, value, "a string")


def callback(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool) and not callable(value):
        raise _refusal(name, value, "True, False or a function")
    if callable(value) and parameters_of(value) not in (None, 2, 4):
        expected = "a function of (phase, done, total, name)"
        raise _refusal(name, value, expected, "ckptmap.protocols.Progress describes it")


def parameters_of(function: Callable[..., object]) -> int | None:
    """Return how many positional arguments a function takes; None: any number, or unknown."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(item.kind is item.VAR_POSITIONAL for item in parameters):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(item.kind in kinds for item in parameters)


def module(name: str, value: object) -> None:
    import torch

    if not isinstance(value, torch.nn.Module):
        raise _refusal(name, value, "a torch.nn.Module", "pass the live model itself")


def scheduler(value: object, method: str) -> None:
    """Refuse what has no such method, and models and optimizers, which have it, too."""
    from torch.nn import Module
    from torch.optim import Optimizer

    if value is None:
        return
    if isinstance(value, type | Module | Optimizer) or not callable(getattr(value, method, None)):
        hint = "pass the scheduler itself; other objects with a state go into stateful="
        raise _refusal("scheduler", value, f"a scheduler, with {method}()", hint)


def optimizer(value: object) -> None:
    """Refuse a scheduler, whose optimizer would be taken for it, and what is none in a dict, as a state dict has."""
    from torch.optim.lr_scheduler import LRScheduler

    found = [("optimizer", value)] if isinstance(value, LRScheduler) else []
    for name, one in value.items() if isinstance(value, Mapping) else ():
        if not any(hasattr(one, attribute) for attribute in ("param_groups", "optimizer")):
            found.append((f"optimizer[{name!r}]", one))
    for title, one in found[:1]:
        raise ArgumentError(
            "CKM516",
            f"{title}: a {type(one).__name__} is no torch.optim.Optimizer",
            "pass the optimizer itself, and the scheduler after it",
        )


def state_dict(name: str, value: object) -> None:
    """Raise ArgumentError CKM516 if the value is no dict with strings as keys.

    The values in it are checked later.
    """
    if not isinstance(value, Mapping):
        raise _refusal(name, value, "a dict of tensors by name", "pass model.state_dict()")
    for key in value:
        if not isinstance(key, str):
            raise _refusal(f"{name} key", key, "a name", "pass model.state_dict()")


def weights(value: Mapping[Any, object], names: Collection[str]) -> None:
    """Raise ArgumentError CKM516 for a dict that is given to `load_state_dict` and holds the weights in an entry, or
    other values than tensors under `names`, those of the model."""
    import torch

    for key, one in value.items():
        if not isinstance(key, str):
            raise _refusal("state_dict key", key, "a name", "pass model.state_dict()")
        if isinstance(one, torch.Tensor) or not (isinstance(one, Mapping) or key in names):
            continue
        hint = "pass tensors: torch.from_numpy(value) makes one of an array"
        if isinstance(one, Mapping):
            hint = "pass the dict of the weights alone: the entry of this dict that holds them"
        what = f"state_dict[{key!r}]: is a {type(one).__name__}, expected a tensor"
        raise ArgumentError("CKM516", what, hint)


def extra(value: object, reserved: Sequence[str], argument: str = "extra") -> dict[str, object]:
    """Return the user's extra values as a dict; `reserved` are keys that another argument sets."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refusal(argument, value, "a dict", "pass plain values and tensors by name")
    for name in reserved:
        if name in value:
            expected = f"nothing: {name}= says it"
            raise _refusal(f"{argument}[{name!r}]", value[name], expected, "rename it")
    _check_nested(argument, value, MAX_DEPTH)
    return dict(value)


def _check_nested(name: str, value: object, levels: int) -> None:
    """Raise ArgumentError CKM516 if a key is no string or integer, or containers nest too deep."""
    if not levels:
        start = name[: MAX_SHOWN - 20] + "..."
        raise _refusal(start, "...", f"at most {MAX_DEPTH} dicts and lists in each other")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str | int):
                hint = "name it by a string"
                raise _refusal(f"{name} key", key, "a string or an integer", hint)
            _check_nested(f"{name}[{key!r}]", item, levels - 1)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_nested(f"{name}[{number}]", item, levels - 1)


_HINTS_OF_SAVES = {
    "--drop": "pass tensors and plain values: numbers, strings, lists and dicts of them",
    "--max-shard-size": "raise the limit of a file's size (ulimit -f), or choose a filesystem that holds larger"
    " files; then save again",
    "--max-memory": "free some memory, or raise the limit (ulimit -v, a container's); then save again",
    "--threads": "end other processes, or raise the limit (ulimit -u, a container's pids); then save again",
}
"""What `save` says in place of a hint, by an option that the hint names; the first that it names decides."""


@contextmanager
def hints_of_saves() -> Iterator[None]:
    """Replace hints that name an option for which `save` has no argument."""
    try:
        yield
    except CkptmapError as error:
        for option, hint in _HINTS_OF_SAVES.items():
            if as_given(option) in error.hint:
                error.hint = hint
                break
        raise
