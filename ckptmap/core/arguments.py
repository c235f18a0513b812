"""Arguments of the Python calls: what means nothing is refused at once, as everything else is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from operator import index
from traceback import walk_tb
from typing import Any

from ckptmap.errors import ArgumentError, CkptmapError, PlanError, RunError

DEEPEST = 100
"""Dicts and lists of `extra` inside of each other; more is one that holds itself."""
DOC = "see help() of the call"
OWN = ("ckptmap", "ckptmap_cli")


def _wrong(name: str, value: object, expected: str, hint: str = DOC) -> ArgumentError:
    text = repr(value)
    shown = text if len(text) <= 60 else f"a {type(value).__name__}"
    return ArgumentError("CKM516", f"{name}={shown}, expected {expected}", hint)


def choice(name: str, value: object, known: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise _wrong(name, value, f"one of {', '.join(map(repr, known))}")


def whole(name: str, value: Any, low: int, high: int = (1 << 63) - 1) -> int:
    """An integer of any library, as Python's own."""
    try:
        found = index(value)
    except (TypeError, ValueError):
        raise _wrong(name, value, "an integer") from None
    if isinstance(value, bool) or not low <= found <= high:
        raise _wrong(name, value, f"an integer from {low} to {high}")
    return found


def patterns(name: str, value: object) -> tuple[str, ...]:
    """One text or several, as a tuple."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable) or not all(isinstance(item, str) for item in value):
        raise _wrong(name, value, "a pattern of names, or a list of them")
    return tuple(value)


def all_or(name: str, value: object) -> tuple[str, ...]:
    """Patterns, or True for every name; False and None for none."""
    if value is None or isinstance(value, bool):
        return ("*",) if value else ()
    return patterns(name, value)


def place(name: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike):
        raise _wrong(name, value, "a path")


def text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")


def callback(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool) and not callable(value):
        raise _wrong(name, value, "True, False or a function")


def module(name: str, value: object) -> None:
    import torch

    if not isinstance(value, torch.nn.Module):
        raise _wrong(name, value, "a torch.nn.Module", "pass the live model itself")


def scheduler(value: object, method: str) -> None:
    if value is not None and not callable(getattr(value, method, None)):
        raise _wrong("scheduler", value, f"an object with {method}()", "pass the scheduler itself")


def tensors(name: str, value: object) -> None:
    """A state dict, as far as its keys go."""
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a dict of tensors by name", "pass model.state_dict()")
    for key in value:
        if not isinstance(key, str):
            raise _wrong(f"{name} key", key, "a name", "pass model.state_dict()")


def extra(value: object, taken: Sequence[str]) -> dict[str, Any]:
    """Values of a user that go along; `taken`: names that are spoken for."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong("extra", value, "a dict", "pass plain values and tensors by name")
    for name in taken:
        if name in value:
            raise _wrong(f"extra[{name!r}]", value[name], f"nothing: {name}= says it", "rename it")
    _walk("extra", value, DEEPEST)
    return dict(value)


def _walk(name: str, value: object, left: int) -> None:
    if not left:
        raise _wrong(name[:40] + "...", "...", f"at most {DEEPEST} dicts and lists in each other")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise _wrong(f"{name} key", key, "a text or an integer", "name it by a text")
            _walk(f"{name}[{key!r}]", item, left - 1)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _walk(f"{name}[{number}]", item, left - 1)


@cache
def device(given: Any, label: str) -> None:
    """Raises PlanError CKM210 where no value can go to the device and come back."""
    if str(given) == "cpu":
        return
    import torch

    try:
        torch.zeros(1, device=given).item()
    except (AssertionError, RuntimeError, TypeError) as error:
        raise PlanError(
            "CKM210",
            f"{label}: cannot be used here: {str(error).partition(chr(10))[0]}",
            "see the devices that there are with: ckptmap doctor",
        ) from error


def installed(*libraries: str) -> None:
    """Raises PlanError CKM211 where the work needs a library that is not there: before it begins,
    for what was begun would hold the room that it reserved."""
    from importlib.util import find_spec

    for name in libraries:
        if find_spec(name) is None:
            raise not_installed(name)


def not_installed(name: str) -> PlanError:
    return PlanError(
        "CKM211", f"this needs {name}, which is not installed here", f"pip install {name}"
    )


def broken(error: BaseException) -> RunError | None:
    """Told as a library that is there and cannot be imported; None: that is not what it is.

    What the system's loader finds missing is an ImportError, of what is loaded by ctypes an OSError.
    """
    names = [str(f.f_globals.get("__name__", "")) for f, _ in walk_tb(error.__traceback__)]
    roots = [name.partition(".")[0] for name in names]
    by_ctypes = isinstance(error, OSError) and roots[-1:] == ["ctypes"]
    last = max((at for at, root in enumerate(roots) if root in OWN), default=-1)
    if roots[last + 1 :] == [] or not (by_ctypes or isinstance(error, ImportError)):
        return None
    name = roots[last + 1]
    what = (str(error).strip() or type(error).__name__).splitlines()[0]
    return RunError(
        "CKM211",
        f"{name} is installed here and cannot be imported: {what}",
        f"install it again: pip install --force-reinstall {name}",
    )


@contextmanager
def in_python() -> Iterator[None]:
    """Around a call: hints name its arguments, not options of the command line."""
    try:
        yield
    except CkptmapError as error:
        error.hint = error.hint.replace("--overwrite", "overwrite=True")
        if "--drop" in error.hint:
            error.hint = "pass tensors and plain values: numbers, texts, lists and dicts of them"
        raise
