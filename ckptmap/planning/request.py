"""One conversion as the user asks for it: the opened source, the setup to write, the options.

`Request` also answers which keys the options --include, --exclude and --drop leave out. Every stage
of `planner` takes the same request; none changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.name_globs import matches, matches_any
from ckptmap.planning.options import Options
from ckptmap.planning.reference import Reference
from ckptmap.protocols import Carrier, Setup, TakesMadeFiles, through
from ckptmap.protocols.file_systems import Fingerprint
from ckptmap.protocols.offers import offers
from ckptmap.setups import Aim


@dataclass(frozen=True)
class Request:
    """A source, what to write, and how; `reference` is the checkpoint of --as."""

    ckpt: Checkpoint
    aim: Aim
    options: Options
    reference: Reference | None = None

    @property
    def setup(self) -> Setup:
        return self.aim.setup

    @property
    def carrier(self) -> Carrier | None:
        """The setup's carrier of files beside the weights, reading through the mounts of the source."""
        carrier = self.setup.carrier
        if carrier is None:
            return None
        carrier, made = through(carrier, self.ckpt.files.mounts), self.ckpt.index.made_files
        if made is None or not offers(carrier, TakesMadeFiles):
            return carrier
        return carrier.with_made(made())

    @cached_property
    def fingerprints(self) -> dict[str, Fingerprint]:
        """Size and time of change of each file of the source, as they were when it was opened."""
        seen, mounts = self.ckpt.fingerprints, self.ckpt.files.mounts
        return {
            file: seen.get(file) or Fingerprint.of(file, mounts) for file in self.ckpt.index.files
        }

    @cached_property
    def siblings(self) -> Sequence[str]:
        """Paths of the files beside the weights; empty where the setup has no place for such files."""
        if self.setup.carrier is None and self.setup.inner is None:
            return []
        path = Path(self.ckpt.sidecar_dir)
        directory = path if path.is_dir() else path.parent
        return [str(file) for file in directory.iterdir() if str(file) not in self.fingerprints]

    # ------------------------------------------------------------------ keys that are left out

    @property
    def takes_all(self) -> bool:
        """Whether the options leave out no weight."""
        return not (self.options.include or self.options.exclude or self.options.drop)

    def dropped(self, key: str) -> str | None:
        """Return the option that drops the key; None where the key is kept."""
        return self._dropped(key, ("",))

    def dropped_whole(self, key: str) -> str | None:
        """Return the option that drops the key, by itself or with the entry that it lies in, else None."""
        return self._dropped(key, ("", ".*"))

    def _dropped(self, key: str, below: tuple[str, ...]) -> str | None:
        for pattern in self.options.drop:
            if any(matches(key, pattern + end) for end in below):
                return f"--drop {pattern}"
        return None

    def excluded(self, fqn: str) -> str | None:
        """Return the option that leaves a weight out; None where the weight is kept."""
        if self.takes_all:
            return None
        include, exclude = self.options.include, self.options.exclude
        if include and not matches_any(fqn, include):
            return "not in --include"
        for pattern in exclude:
            if matches(fqn, pattern):
                return f"--exclude {pattern}"
        return self.dropped(fqn)
