"""Print everything a command says: its result on stdout, all else on stderr."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Protocol, TextIO

from ckptmap.core.printable import json_text, one_line, printable

SCHEMA = 1
"""Schema version of every JSON document that a command prints."""


class Unprintable(Exception):
    """Raised where stdout cannot take the result: a full disk, for one."""


class Shown(Protocol):
    """A result of a command: text for people, a JSON document for programs."""

    def __str__(self) -> str: ...

    def to_json(self) -> Mapping[str, object]: ...


class Printer:
    """Prints for one command: text, or with `json` exactly one document on stdout."""

    printed: ClassVar[bool] = False
    """True once this process printed a document: a second one would make stdout no JSON."""
    before_stderr: ClassVar[Callable[[], None] | None] = None
    """Called before a line is written to stderr, where a live line may stand."""
    typed: ClassVar[Mapping[str, str]] = {}
    """Absolute path -> as the user typed it. Texts name files as the user does."""

    args: ClassVar[tuple[str, ...]] = ()
    """The command line, without the name of the program."""

    def __init__(self, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet

    def show(self, result: Shown) -> None:
        self.prepared(result)()

    def prepared(self, result: Shown) -> Callable[[], None]:
        """Render a result, which may read more headers, and return what prints it."""
        if self.json:
            return partial(self.document, result.to_json())
        return partial(self.text, str(result))

    def text(self, text: str) -> None:
        _write(sys.stdout, printable(self._as_typed(text)))

    def document(self, document: Mapping[str, object]) -> None:
        Printer.printed = True
        _write(sys.stdout, dumps({"schema": SCHEMA, **document}))

    def note(self, text: str) -> None:
        if not self.quiet:
            _write(sys.stderr, one_line(self._as_typed(text)))

    def traceback(self, text: str) -> None:
        _write(sys.stderr, printable(text.rstrip("\n")))

    def error(self, code: str, message: str, hint: str) -> None:
        """Print `error[CKM104]: message` with the hint below; with `json` also the document."""
        message, hint = self._as_typed(message), self._as_typed(hint)
        label = f"error[{code}]" if code.startswith("CKM") else "error"
        # The hint of an internal error may be the traceback of another rank, of many lines.
        below = one_line(hint) if code else hint
        text = f"{label}: {one_line(message)}" + (f"\n  hint: {below}" if hint else "")
        _write(sys.stderr, printable(text))
        if self.json and not Printer.printed:
            self.document({"error": {"code": code or "internal", "message": message, "hint": hint}})

    def _as_typed(self, text: str) -> str:
        for path, typed in self.typed.items():
            if path in text:
                whole = rf"(?<![\w/.-]){re.escape(path)}(?![\w.-])"
                text = typed.join(re.split(whole, text))
        return text


def dumps(document: Mapping[str, object]) -> str:
    """Return one line of JSON; values that JSON cannot express become strings."""
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        text = json.dumps(jsonable(document), ensure_ascii=False)
    return json_text(text)


def jsonable(value: object) -> object:
    """Return the value in types of JSON: other objects as their repr, bytes as their count."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return repr(value)


def _write(stream: TextIO, text: str) -> None:
    """Write a line. A reader that has gone away (`| head`) is no error."""
    try:
        if stream is sys.stderr and Printer.before_stderr is not None:
            Printer.before_stderr()
        _write_all(stream, (text + "\n").encode(stream.encoding or "utf-8", "backslashreplace"))
    except BrokenPipeError:
        # The interpreter flushes the rest of the buffer at exit: it must go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError as error:  # a full disk behind `>`, for one
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if stream is sys.stdout:
            raise Unprintable(error.strerror) from error


def _write_all(stream: TextIO, data: bytes) -> None:
    """Write all bytes, counting them.

    With PYTHONUNBUFFERED a text stream silently drops what a full disk did not take.
    """
    stream.flush()
    buffer, left = getattr(stream, "buffer", None), memoryview(data)
    if buffer is None:  # a text stream without bytes below, as tests have
        stream.write(data.decode(stream.encoding or "utf-8"))
        return
    while left:
        left = left[buffer.write(left) or 0 :]
    buffer.flush()
