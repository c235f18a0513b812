"""Write the pages of the reference that come from the code: options of the commands, and error codes.

python docs/generate.py            writes docs/reference/options.md and errors.md
python docs/generate.py --check    fails where they are not what the code says
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

REFERENCE = Path(__file__).parent / "reference"
WIDTH = 100


def options() -> str:
    """Return the page of all commands: the help of each, as the terminal shows it."""
    from ckptmap_cli.typer_app import COMMANDS, build
    from typer.testing import CliRunner

    parts = ["# Commands and their options\n"]
    for name in COMMANDS:
        result = CliRunner().invoke(
            build([name]), [name, "--help"], prog_name="ckptmap", terminal_width=WIDTH
        )
        parts.append(f"## {name}\n\n```text\n{result.stdout.strip()}\n```\n")
    return "\n".join(parts)


def errors() -> str:
    """Return the page of all error codes, each with its explanation."""
    from ckptmap.error_codes import CODES

    parts = ["# Error codes\n", "`ckptmap explain CODE` shows the same in a terminal.\n"]
    for name, code in CODES.items():
        parts.append(f"## {name}\n\n**{code.title}**\n\n{code.why}\n\nNext: {code.next_step}\n")
    return "\n".join(parts)


def pages() -> Mapping[str, str]:
    """Return file name -> content of every generated page."""
    return {"options.md": options(), "errors.md": errors()}


def main() -> int:
    """Write the pages, or compare them; return the exit code."""
    stale = []
    for name, text in pages().items():
        file = REFERENCE / name
        if "--check" not in sys.argv:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        print(f"docs/reference: {', '.join(stale)} not as the code says: python docs/generate.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
