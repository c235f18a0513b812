"""Name an option as its caller gave it: `--rename 'a=b'` on the command line, `rename='a=b'` in Python.

Errors, hints and notes are written for the command line. `as_given` turns their options into arguments
where no command line was typed. Command lines inside a text stay: they work in any shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache

FLAGS = frozenset({
    "exact-scales", "force", "keep-layout", "low-disk", "overwrite", "pr", "private", "strict",
    "sync", "use-orig-params", "values",
})  # fmt: skip
"""Options without a value: True in Python, and False after `--no-`."""
VALUED = frozenset({
    "adapter", "adapter-config", "add-prefix", "against", "as", "base", "base-model", "check-source",
    "config-from", "device", "digest", "drop", "encode", "exclude", "fsdp-units", "include", "keep",
    "leave", "like", "max-memory", "max-shard-nbytes", "max-shard-size", "mesh", "names",
    "names-from", "names-like", "no-encode", "optimizer", "optimizer-keys", "param-order", "quantize",
    "rename", "revision", "root", "source-root", "strip-prefix", "threads", "to", "tp-plan", "work",
    "world-size", "wrap",
})  # fmt: skip
NUMBERS = frozenset({"threads", "world-size"})
RESERVED = {"as": "as_"}
"""Options whose name is a keyword of Python."""
_PROSE = (
    "alone an and as at beside by decides for from goes has in is it list lists may or out puts reads"
    " restores says so tells that then there to which with would"
)
"""Words with which a sentence goes on after an option or a command: no value of it."""
_COMMANDS = "inspect plan convert verify diff merge report mappings push pull ls doctor explain"
_TOOLS = "torchrun pip python git hf tar unzip ls rm"


_typed = False
"""Whether a command line was typed. One for the process: errors are made in threads, too."""


@contextmanager
def typed_options() -> Iterator[None]:
    """Let errors name options of the command line."""
    global _typed
    before, _typed = _typed, True
    try:
        yield
    finally:
        _typed = before


_SPELLED: ContextVar[Mapping[str, str] | None] = ContextVar("other names", default=None)


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


def as_given(text: str) -> str:
    """Return the text with options as the caller gives them."""
    return text if _typed or "--" not in text else _patterns()[1].sub(_in_python, text)


def is_ambiguous(word: str) -> bool:
    """Return whether this value of an option would be read as something else, unless it stands in quotes: as a word
    of the sentence (`--drop it`), as a placeholder (`--drop EMA`), or without the mark at its end."""
    found = _patterns()[0].fullmatch(f"--drop {word}")
    return found is None or found["value"] != word or re.fullmatch("[A-Z]+", word) is not None


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of one option, and of a row of options or a command line. They are compiled once,
    and not at import, which would delay every command."""
    prose, commands, tools = (
        f"(?:{'|'.join(words.split())})(?![\\w.-])" for words in (_PROSE, _COMMANDS, _TOOLS)
    )
    # A word as a shell takes it, or as `repr` shows it, without the mark behind it.
    word = rf"(?!\(|{prose})(?:\$?'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s'\"`])+(?<![,;:)?])"
    flag = rf"--(?P<no>no-)?(?P<flag>{'|'.join(sorted(FLAGS))})(?![\w-])"
    valued = rf"--(?P<name>{'|'.join(sorted(VALUED))})(?![\w-])(?:[ =](?P<value>{word}))?"
    option = f"(?:{flag}|{valued})"
    nameless = re.sub(r"\?P<\w+>", "?:", option)
    return re.compile(option), re.compile(
        rf"(?<![\w./-])(?:ckptmap {commands}|{tools})(?: +{word})*"
        rf"|(?<![\w./='\"-])(?P<row>{nameless}(?: {nameless})*)"
    )


def _in_python(place: re.Match[str]) -> str:
    """Return a row of options as arguments of a call; a command line as it is."""
    if place["row"] is None:
        return place[0]
    given: dict[str, list[str]] = {}
    for option in _patterns()[0].finditer(place["row"]):
        name = option["name"] or option["flag"]
        name = RESERVED.get(name, name.replace("-", "_"))
        given.setdefault(name, []).append(_value(option))
    return ", ".join(
        f"{name}={values[0] if len(values) == 1 else '[' + ', '.join(values) + ']'}"
        for name, values in given.items()
    )


def _value(option: re.Match[str]) -> str:
    """Return the value of an option as Python writes it: a placeholder and a number as they are, else a
    string; "" for an option that is only named."""
    typed = option["value"]
    if option["flag"]:
        return str(option["no"] is None)
    if typed is None:
        return ""
    if option["name"] == "param-order":
        return "[[...]]"
    if re.fullmatch("[A-Z]+", typed) or (option["name"] in NUMBERS and typed.isdecimal()):
        return typed
    return repr(_unquoted(typed))


def _unquoted(word: str) -> str:
    """Return what a word means: one that `repr` or a shell has quoted."""
    import ast
    import shlex

    with suppress(ValueError, SyntaxError):
        if word.startswith("$'") and isinstance(raw := ast.literal_eval(f"b{word[1:]}"), bytes):
            return raw.decode(errors="surrogateescape")
    with suppress(ValueError):
        return "".join(shlex.split(word))
    with suppress(ValueError, SyntaxError):  # of `repr`: a quote after a backslash
        return str(ast.literal_eval(word))
    return word
