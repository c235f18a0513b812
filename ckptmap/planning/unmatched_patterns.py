"""Refuse a pattern of the user that matches no name: it is misspelt, and what it should do was not done.

--drop 'epohc': nothing in run.pt is named so; did you mean 'epoch'?
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ckptmap.core.formatting import some
from ckptmap.core.name_globs import matches, suggestion
from ckptmap.errors import PlanError
from ckptmap.planning.request import Request

NAMES_SHOWN = 3
"""Names that an error shows of a checkpoint."""
PATTERNS_SHOWN = 3
"""Patterns that an error names."""


def require_matches(request: Request, written: Collection[str], dropped: Mapping[str, str]) -> None:
    """Raise PlanError CKM206 where a pattern of --include, --encode, --no-encode, --exclude or --drop matches
    no name.

    `written` are names of weights of the output, `dropped` the keys that are left out for whatever reason: a
    pattern of such a key has done its work, although another one matched it first.
    """
    ckpt, options = request.ckpt, request.options
    unread = [name.rpartition(" of ")[2] for name in ckpt.index.unread_files]
    left_out = [*dropped, *unread]
    unmatched = [
        *_unmatched("include", options.include, ckpt),
        *_unmatched("encode", options.encode, [*ckpt, *written]),
        *_unmatched("no-encode", options.no_encode, [*ckpt, *written]),
        *_unmatched("exclude", options.exclude, left_out),
        *((name, p) for name, p in _unmatched("drop", options.drop, left_out)
          if not _has_entry(p, left_out)),
    ]  # fmt: skip
    if not unmatched:
        return
    state = [f"optimizer.{fqn}" for fqn in ckpt] if ckpt.optimizer_reader.present else []
    names = [*ckpt, *map(str, ckpt.extra), *(one.key for one in ckpt.refused), *left_out, *state]
    given = [f"--{option} {pattern!r}" for option, pattern in unmatched]
    meant = next(filter(None, (suggestion(pattern, names) for _, pattern in unmatched)), "")
    raise PlanError(
        "CKM206",
        f"{some(given, PATTERNS_SHOWN)}: nothing in {ckpt.shown} is named so",
        f"{meant} If not, leave the option out"
        if meant
        else f"{sample(names)}; or leave the option out",
    )


def sample(names: Collection[str]) -> str:
    """Return a clause with a few of the names, from the first to near the last."""
    some = list(names)[:: max(1, len(names) // NAMES_SHOWN)][:NAMES_SHOWN]
    return f"names here are such as {', '.join(some)}"


def _unmatched(
    option: str, patterns: Iterable[str], names: Collection[str]
) -> Iterator[tuple[str, str]]:
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            yield option, pattern


def _has_entry(pattern: str, names: Iterable[str]) -> bool:
    """Return whether names lie below the entry that --drop names, or it lies below one of them."""
    return any(matches(name, f"{pattern}.*") or pattern.startswith(f"{name}.") for name in names)
