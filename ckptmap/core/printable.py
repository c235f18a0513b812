"""Escape text for a terminal: names in it come from files of others.

A name may hold what a terminal obeys (escape sequences of the controls C0 and C1), what turns the
order of text around (the bidirectional controls of Unicode, UAX #9), line breaks, which would forge
a line of a report, and lone surrogates, which cannot be encoded. All of them are shown as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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
    """Return one text of the lines; a line feed inside a line is escaped, as `one_line` does."""
    return "\n".join(map(one_line, lines))


def json_text(text: str) -> str:
    """Return JSON with every control in its strings as an RFC 8259 escape, `\\u009b`."""
    return text if text.isprintable() else _CONTROLS.sub(_json_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _json_escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
