"""Is the installed torchao the one that rounding by position was written for?

`install` replaces `_AdamBase.step` by a loop of its own that calls `single_param_adam`, and
`_new_buffer` by another rule. If any of them says something else in another release, that would be
lost in silence. So their tokens are compared, without comments and layout.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import tokenize
from collections.abc import Callable
from typing import Any

from ckptmap.errors import LoadError
from ckptmap.storage.process_guards import quiet_torchao

KNOWN = frozenset({"2e18da9b87667b99"})
"""Digests of these functions: torchao 0.18."""
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def require_known() -> None:
    """Raise LoadError CKM520 where torchao's optimizers are not as this release of ckptmap knows them."""
    try:
        found = digest(_functions())
    except (ImportError, AttributeError, OSError, tokenize.TokenError) as error:
        raise _refusal(f"{type(error).__name__}: {error}") from error
    if found not in KNOWN:
        raise _refusal(f"the code of its step has digest {found}, expected {', '.join(KNOWN)}")


def _refusal(found: str) -> LoadError:
    from importlib.metadata import PackageNotFoundError, version

    try:
        release = f"torchao {version('torchao')}"
    except PackageNotFoundError:
        release = "torchao"
    return LoadError(
        "CKM520",
        f"{release}: its optimizers are not as this ckptmap knows them: {found}",
        "use torchao 0.18, or a newer ckptmap",
    )


def _functions() -> list[Callable[..., Any]]:
    with quiet_torchao():
        from torchao.optim import adam
    base: Any = adam._AdamBase
    return [inspect.unwrap(base.step), base._new_buffer, adam.single_param_adam]


def digest(functions: list[Callable[..., Any]]) -> str:
    """Return a digest of the functions' tokens, without comments, docstrings' place and layout."""
    total = hashlib.blake2b(digest_size=8)
    for function in functions:
        lines = io.StringIO(inspect.getsource(function)).readline
        for token in tokenize.generate_tokens(lines):
            if token.type not in LAYOUT:
                total.update(token.string.strip().encode() + b"\0")
    return total.hexdigest()
