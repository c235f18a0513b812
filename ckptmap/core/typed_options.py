"""Name an argument as its caller gave it: `--rename 'a=b'` on the command line, `rename='a=b'` in Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from shlex import quote

_TYPED: ContextVar[bool] = ContextVar("options were typed", default=False)
_SPELLED: ContextVar[Mapping[str, str] | None] = ContextVar("other names", default=None)


@contextmanager
def typed_options() -> Iterator[None]:
    """Let errors name options of the command line."""
    token = _TYPED.set(True)
    try:
        yield
    finally:
        _TYPED.reset(token)


@contextmanager
def spelled(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name arguments as the caller spelled them: name of the library -> name in the call."""
    token = _SPELLED.set(names)
    try:
        yield
    finally:
        _SPELLED.reset(token)


def in_call(name: str) -> str:
    """Return the name of an argument as the caller spelled it."""
    return (_SPELLED.get() or {}).get(name, name)


def given(name: str, value: str) -> str:
    """Return an argument of the caller's with its value, as a message shows it: escaped, on one line."""
    return f"{option(name)} {value!r}" if _TYPED.get() else f"{name}={value!r}"


def advised(**values: str) -> str:
    """Return arguments for the caller to give, as a hint shows them: to be pasted."""
    if _TYPED.get():
        return " ".join(f"{option(name)} {quote(value)}" for name, value in values.items())
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def option(name: str) -> str:
    """Return the argument's name alone, as the caller writes it."""
    return "--" + name.replace("_", "-") if _TYPED.get() else name
