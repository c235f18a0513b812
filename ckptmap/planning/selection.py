"""What the options say of a key: its name in the output, whether it is left out, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptmap.checkpoint.checkpoint import Checkpoint, open
from ckptmap.checkpoint.roles import is_spoken_for
from ckptmap.errors import PlanError
from ckptmap.mapping.wrappers import wrap_prefix
from ckptmap.planning.options import Options
from ckptmap.protocols import Setup
from ckptmap.tensors import Path


@dataclass(frozen=True)
class Asked:
    """Options, asked about the keys of one checkpoint on its way to one setup."""

    ckpt: Checkpoint
    setup: Setup
    options: Options

    def names(self) -> dict[str, str]:
        """Plain FQN -> name in the output."""
        if self.options.names_like is not None:
            with open(self.options.names_like) as like:
                return {fqn: like.names.get(fqn, fqn) for fqn in self.ckpt}
        prefix = self.prefix
        return {fqn: prefix + fqn if prefix else fqn for fqn in self.ckpt}

    @property
    def prefix(self) -> str:
        """What the wrappers put before every name."""
        if self.options.wrap is not None:
            return wrap_prefix(self.options.wrap)
        return "".join(segment + "." for segment in self.setup.wrap)

    def root(self, rooted: bool) -> Path:
        """What all weights stand below; `rooted`: something else stands beside them.

        Raises PlanError CKM205.
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
        if found := next((name for name in root if is_spoken_for(name)), None):
            raise PlanError(
                "CKM205",
                f"--root {given}: what lies in {found!r} is read as no weights",
                "choose another name, for example --root model",
            )
        return root

    def dropped(self, key: str) -> str | None:
        """Why it is left behind; None: it is not."""
        return self._dropped(key, ("",))

    def dropped_whole(self, key: str) -> str | None:
        """The same, where a pattern also takes what lies below the entry that it names."""
        return self._dropped(key, ("", ".*"))

    def _dropped(self, key: str, below: tuple[str, ...]) -> str | None:
        for pattern in self.options.drop:
            if key == pattern or any(fnmatchcase(key, pattern + end) for end in below):
                return f"--drop {pattern}"
        return None

    def excluded(self, fqn: str) -> str | None:
        """Why a weight is left out; None: it is not."""
        include, exclude = self.options.include, self.options.exclude
        if not (include or exclude or self.options.drop):
            return None
        if include and not any(fnmatchcase(fqn, pattern) for pattern in include):
            return "not in --include"
        found = next((pattern for pattern in exclude if fnmatchcase(fqn, pattern)), None)
        return f"--exclude {found}" if found else self.dropped(fqn)


def not_found(names: Mapping[str, str]) -> list[str]:
    """A note for a directory of transformers: it looks for plain names, and gives random values to
    what it does not find. `names`: plain FQN -> as written."""
    renamed = [name for fqn, name in names.items() if name != fqn]
    if not renamed:
        return []
    more = f" and {len(renamed) - 1} more" if len(renamed) > 1 else ""
    return [
        f"transformers would not find {renamed[0]}{more}, and begin at random: it goes by plain"
        " names, those without --wrap and --names-like"
    ]
