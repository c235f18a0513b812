"""Which keys of a source go into the output, under which names, and why the others are left out.

`Request` holds no tensors: it applies the options --include, --exclude, --drop, --root, --wrap
and --names-like to names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open
from ckptmap.checkpoint.roles import is_spoken_for
from ckptmap.errors import PlanError
from ckptmap.mapping.wrappers import wrap_prefix
from ckptmap.planning.options import Options
from ckptmap.protocols import Setup
from ckptmap.tensors import Path


@dataclass(frozen=True)
class Request:
    """The options of one conversion, applied to the keys of its source."""

    ckpt: Checkpoint
    setup: Setup
    options: Options

    def names(self) -> dict[str, str]:
        """Return the name in the output of every weight, by plain FQN."""
        if self.options.names_like is not None:
            with open(self.options.names_like) as like:
                return {fqn: like.names.get(fqn, fqn) for fqn in self.ckpt}
        prefix = self.prefix
        return {fqn: prefix + fqn if prefix else fqn for fqn in self.ckpt}

    @property
    def prefix(self) -> str:
        """The segments that wrappers put before every name: `module._orig_mod.`."""
        if self.options.wrap is not None:
            return wrap_prefix(self.options.wrap)
        return "".join(segment + "." for segment in self.setup.wrap)

    def root(self, rooted: bool) -> Path:
        """Return the path of the dict that holds the weights; `rooted`: the output holds more.

        Raises PlanError CKM205 where the setup cannot hold weights there.
        """
        given, setup = self.options.root, self.setup
        if given is None:
            return ("model",) if rooted or setup.rooted else ()
        if setup.rooted:
            raise PlanError("CKM205", f"--root {given}: {setup.name} has its own", "leave it out")
        if given and not setup.holds_extra:
            raise PlanError(
                "CKM205",
                f"--root {given}: {setup.name} holds bare names only, and no dicts",
                "leave it out, or choose a setup that nests, for example --to full",
            )
        root = tuple(given.split("/")) if given else ()
        if reserved := next((name for name in root if is_spoken_for(name)), None):
            raise PlanError(
                "CKM205",
                f"--root {given}: what lies below {reserved!r} is not read as weights",
                "choose another name, for example --root model",
            )
        return root

    def dropped(self, key: str) -> str | None:
        """Return the option that drops the key; None where the key is kept."""
        return self._dropped(key, ("",))

    def dropped_whole(self, key: str) -> str | None:
        """Like `dropped`, but a pattern also matches all keys below the entry that it names."""
        return self._dropped(key, ("", ".*"))

    def _dropped(self, key: str, below: tuple[str, ...]) -> str | None:
        for pattern in self.options.drop:
            if key == pattern or any(fnmatchcase(key, pattern + end) for end in below):
                return f"--drop {pattern}"
        return None

    def excluded(self, fqn: str) -> str | None:
        """Return the option that leaves a weight out; None where the weight is kept."""
        include, exclude = self.options.include, self.options.exclude
        if not (include or exclude or self.options.drop):
            return None
        if include and not any(fnmatchcase(fqn, pattern) for pattern in include):
            return "not in --include"
        for pattern in exclude:
            if fnmatchcase(fqn, pattern):
                return f"--exclude {pattern}"
        return self.dropped(fqn)


def unknown_to_transformers(names: Mapping[str, str]) -> list[str]:
    """Return a note where weights do not have their plain names; `names`: plain FQN -> as written.

    transformers loads by plain names, and initializes at random what it does not find.
    """
    renamed = [name for fqn, name in names.items() if name != fqn]
    if not renamed:
        return []
    more = f" and {len(renamed) - 1} more" if len(renamed) > 1 else ""
    return [
        f"transformers would not find {renamed[0]}{more}, and begin at random: it goes by plain"
        " names, those without --wrap and --names-like"
    ]
