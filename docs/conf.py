"""Sphinx's settings: `make docs` builds docs/ into docs/_build/html."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ckptmap.version import __version__

project = "ckptmap"
copyright = "the ckptmap authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "ckptmap"
# Docstrings are plain English with `code` in backquotes, not reStructuredText with roles.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"


def keep_tables(
    app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Show a paragraph with indented lines as it is written: it is a table of arguments or fields."""
    result: list[str] = []
    for is_blank, group in groupby(lines, lambda line: not line.strip()):
        paragraph = list(group)
        if not is_blank and any(line.startswith(" ") for line in paragraph):
            paragraph = [".. code-block:: text", "", *(f"   {line}" for line in paragraph)]
        result += paragraph
    lines[:] = result


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", keep_tables)
