"""The error tree: every expected failure is one of these, with a code, one line, and a next step.

An error's text is one line: what is wrong, where, what was expected and what is there. Its `hint`
is the next command to run. `exit_code` is what the command line returns: 1 the answer is no, 2 refused, and
nothing is left written, 3 failed while working, 130 interrupted.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ckptmap.typed_options import as_given

__all__ = [
    "AnswerNo", "ArgumentError", "CkptmapError", "DestinationError", "Interrupted",
    "LoadError", "MissingKeyError", "PlanError", "RunError", "SourceError",
]  # fmt: skip


MAX_WORD = 1000
"""Characters of a word in a message from which on its middle is left out; a path that a system opens has fewer in
one segment."""
_LONG = re.compile(rf"\S{{{MAX_WORD + 1},}}")
REFUSED_VALUES = frozenset({"CKM309", "CKM310", "CKM311", "CKM315", "CKM318", "CKM324"})
"""Codes of values that the output cannot hold. Only reading them shows it, so the run has begun; but every run
of the same command would meet them again."""

CONTINUES = "run the same command again"
"""What the hint of a run that keeps its work says."""


def _shortened(text: str) -> str:
    """Return the text without the middle of names that are too long to read; a hint keeps them whole."""
    return text if len(text) <= MAX_WORD else _LONG.sub(_ends, text)


def _ends(word: re.Match[str]) -> str:
    return f"{word[0][:60]}...({len(word[0]):,} characters)...{word[0][-60:]}"


class CkptmapError(Exception):
    """Base of all expected errors: `code` names the kind (see `ckptmap explain CODE`).

    Message and hint name options as they are typed; a Python caller reads them as arguments.
    """

    exit_code = 2
    keeps_work = False
    _hint: str

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint

    def keep_work(self) -> None:
        """Note that what was written is kept, so that the same command continues it."""
        self.keeps_work = True
        if isinstance(self, SourceError):
            self.exit_code = RunError.exit_code
            if CONTINUES not in self._hint:
                self._hint = f"{self._hint}{'; then ' * bool(self._hint)}{CONTINUES} to continue"

    @property
    def message(self) -> str:
        return _shortened(as_given(self._message))

    @message.setter
    def message(self, text: str) -> None:
        self._message = text

    @property
    def hint(self) -> str:
        return as_given(self._hint)

    @hint.setter
    def hint(self, text: str) -> None:
        self._hint = text

    def change_hint(self, change: Callable[[str], str]) -> None:
        """Replace the hint by what `change` makes of it as it was written, with options of the command line."""
        self._hint = change(self._hint)

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[type[CkptmapError], tuple[str, str, str]]:
        """Return how to pickle the error: ranks send it to each other."""
        return type(self), (self.code, self._message, self._hint)


class SourceError(CkptmapError, ValueError):
    """A checkpoint cannot be read as what it claims to be."""


class PlanError(CkptmapError, ValueError):
    """A conversion was asked for that cannot be planned."""


class ArgumentError(CkptmapError, ValueError):
    """An argument of a Python call that means nothing there."""


class DestinationError(CkptmapError, OSError):
    """The destination cannot be written; refused before a byte was written."""


class RunError(CkptmapError, RuntimeError):
    """A conversion failed while working. The same command continues it, but for values that the output
    cannot hold: then its exit code is that of a refusal."""

    exit_code = 3

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(code, message, hint)
        if code in REFUSED_VALUES:
            self.exit_code = CkptmapError.exit_code


class Interrupted(RunError):
    """Stopped by the user; the same command continues it."""

    exit_code = 130


class AnswerNo(CkptmapError):
    """The answer to the question asked is no: differences, failed verification."""

    exit_code = 1


class MissingKeyError(CkptmapError, KeyError):
    """A key that is not in the checkpoint."""

    __str__ = CkptmapError.__str__


class LoadError(CkptmapError, RuntimeError):
    """A checkpoint does not fit the live model it was to be loaded into."""
