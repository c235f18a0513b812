"""Render templates by jinja2: every value is escaped, and scripts and styles are named by their hash.

The page's Content-Security-Policy allows exactly the script and the style that this package holds:
whatever a name of a checkpoint says, a browser runs none of it, and fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from ckptmap.core import requirements
from ckptmap.core.formatting import counted, human

if TYPE_CHECKING:
    from jinja2 import Environment

SCRIPTS = ("data.js", "tree.js", "grid.js", "start.js")
"""In the order in which they are joined into the one script of the page."""


def page(data: str, **sections: object) -> str:
    """Return the whole page. `data` is JSON; its `<` and `&` are escaped as JSON escapes them."""
    script, style = _joined(*SCRIPTS), _joined("page.css")
    return (
        _environment()
        .get_template("page.html")
        .render(
            data=safe_json(data),
            script=script,
            style=style,
            policy=_policy(script, style),
            **sections,
        )
    )


def plain(template: str, **values: object) -> str:
    """Return a whole page without a script."""
    style = _joined("page.css")
    policy = _policy(None, style)
    return _environment().get_template(template).render(style=style, policy=policy, **values)


def piece(template: str, **values: object) -> str:
    """Return a small piece of HTML, for a notebook."""
    return _environment().get_template(template).render(**values)


def safe_json(text: str) -> str:
    """Return JSON that may stand in a script element: no `<`, `>` or `&` is in it as such."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _environment() -> Environment:
    """Return jinja2's environment: values are escaped, and a name that is missing is an error."""
    requirements.require_libraries("jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("ckptmap.operations.report", "templates")
    made = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters["human"] = human
    made.globals["counted"] = counted
    return made


@cache
def _joined(*names: str) -> str:
    """Return files of this package as one text."""
    folder = files("ckptmap.operations.report").joinpath("templates")
    return "\n" + "\n".join(folder.joinpath(name).read_text("utf-8") for name in names)


def _policy(script: str | None, style: str) -> str:
    """Return the Content-Security-Policy: this script, if any, this style, and nothing else at all."""
    scripts = "" if script is None else f" script-src {_hash(script)};"
    return (
        f"default-src 'none';{scripts} style-src {_hash(style)};"
        " base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
