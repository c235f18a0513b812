"""Escape text for a terminal: names in it come from files of others.

A name may hold what a terminal obeys (escape sequences of the controls C0 and C1), what turns the
order of text around (the bidirectional controls of Unicode, UAX #9), line breaks, which would forge
a line of a report, and lone surrogates, which cannot be encoded. All of them are shown as escapes; in
the words of a command line, `quote` writes them so that a shell reads them back.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from ckptmap.typed_options import as_given, is_ambiguous

_BY_PATTERN = frozenset({"drop", "exclude", "leave", "no_encode"})
_UNSAFE = "\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROLS = re.compile(f"[{_UNSAFE}]")
_CONTROLS_AND_BREAKS = re.compile(f"[\n{_UNSAFE}]")


def printable(text: str) -> str:
    """Return the text with every control but the line feed as `\\x1b` or `\\u202e`."""
    return text if text.isprintable() else _CONTROLS.sub(_escape, text)


def one_line(text: str) -> str:
    """Return the text with every control, the line feed too, as an escape."""
    return text if text.isprintable() else _CONTROLS_AND_BREAKS.sub(_escape, text)


def as_lines(lines: Iterable[str]) -> str:
    """Return one text of the lines, with options as the caller gives them; a line feed inside a line is
    escaped, as `one_line` does."""
    return "\n".join(one_line(as_given(line)) for line in lines)


def json_text(text: str) -> str:
    """Return JSON with every control in its strings as an RFC 8259 escape, `\\u009b`."""
    return text if text.isprintable() else _CONTROLS.sub(_json_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _json_escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def quote(word: str) -> str:
    """Return a word as a shell takes it, also after control characters in it are made visible.

    it's            'it'"'"'s'
    a line feed     $'a\\nb', which bash, zsh and ksh read
    """
    if one_line(word) == word:
        return shlex.quote(word)
    return f"$'{''.join(map(_in_quotes, word))}'"


def _in_quotes(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if one_line(character) == character:
        return character
    if character == "\n":
        return "\\n"
    data = character.encode(
        "utf-8", "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    )
    return "".join(f"\\x{byte:02x}" for byte in data)


def join(words: Iterable[str]) -> str:
    """Return a command line of the words."""
    return " ".join(map(quote, words))


def advised(**names: str) -> str:
    """Return options for the caller to give, as a hint shows them: to be pasted.

    A name is written so that no other is matched, where the option takes patterns.
    """
    from ckptmap.core.name_globs import only  # here: most commands show no option

    return advised_patterns(
        **{option: only(name) if option in _BY_PATTERN else name for option, name in names.items()}
    )


def advised_patterns(**values: str) -> str:
    """Return options as `advised` does, whose values are patterns."""
    return " ".join(
        f"--{name.rstrip('_').replace('_', '-')} {_as_value(value)}"
        for name, value in values.items()
    )


def _as_value(value: str) -> str:
    word = quote(value)
    return f"'{word}'" if word == value and is_ambiguous(word) else word
