"""What the options say of a key: its name in the output, whether it is left out, and why."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptmap.checkpoint import Checkpoint, open
from ckptmap.errors import PlanError
from ckptmap.mapping.wrappers import wrap_prefix
from ckptmap.planning.plans import Options
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
        if self.options.root is not None and self.setup.rooted:
            raise PlanError(
                "CKM205",
                f"--root {self.options.root}: {self.setup.name} has its own",
                "leave it out",
            )
        if self.options.root is not None:
            return tuple(self.options.root.split("/")) if self.options.root else ()
        return ("model",) if rooted or self.setup.rooted else ()

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
