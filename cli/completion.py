"""Values that a shell completes after an option: setups, naming schemes, error codes, choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Completer = Callable[[str], list[str]]


def completer(values: Callable[[], Iterable[str]]) -> Completer:
    """Return what typer calls with the text so far; `values` is called then, and imports then."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return complete


def choices(*values: str) -> Completer:
    return completer(lambda: values)


def _setups() -> Iterable[str]:
    from ckptmap import setups

    return setups.names()


def _schemes() -> Iterable[str]:
    from ckptmap.mapping.catalog import available

    return sorted({"auto", "hf", *(entry.title for entry in available())})


def _codes() -> Iterable[str]:
    from ckptmap.error_codes import CODES

    return CODES


def _optimizer_keys() -> Iterable[str]:
    from ckptmap import registry

    return [form.name for form in registry.key_forms()]


SETUPS = completer(_setups)
SCHEMES = completer(_schemes)
CODES = completer(_codes)
OPTIMIZER_KEYS = completer(_optimizer_keys)
