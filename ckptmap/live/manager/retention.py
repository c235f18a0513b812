"""Which checkpoints of a run are kept: the newest, every n-th step, and those of the best metric."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ckptmap.core import argument_checks
from ckptmap.errors import ArgumentError
from ckptmap.operations.step_directories import SavedStep

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Retention:
    """A rule of what is kept; a checkpoint that none of these keeps may be removed.

    keep        number of the newest; None: all
    keep_every  each step that this number divides
    keep_best   (metric, "min" or "max"): the one with the least or the greatest value of the metric
    """

    keep: int | None = None
    keep_every: int | None = None
    keep_best: tuple[str, Mode] | None = None

    def check(self) -> None:
        """Raise ArgumentError CKM516 for a rule that means nothing."""
        if self.keep is not None:
            argument_checks.integer("keep", self.keep, 1)
        if self.keep_every is not None:
            argument_checks.integer("keep_every", self.keep_every, 1)
        if self.keep_best is None:
            return
        match self.keep_best:
            case (str(), "min" | "max"):
                return
        raise ArgumentError(
            "CKM516",
            f"keep_best={self.keep_best!r}, expected a metric and one of {get_args(Mode)}",
            'for example keep_best=("loss", "min")',
        )

    def removable(self, saved: Sequence[SavedStep]) -> list[SavedStep]:
        """Return the checkpoints that no rule keeps, in the order of `saved`: the newest is last. A link
        is left alone: what it leads to is not the manager's. The base of one that is kept is kept."""
        if self.keep is None:
            return []
        newest = {one.path for one in saved[-self.keep :]}
        best = self.best(saved)
        found = [
            one
            for one in saved
            if one.path not in newest
            and not one.path.is_symlink()
            and (self.keep_every is None or one.step % self.keep_every)
            and (best is None or one.path != best.path)
        ]
        needed = {os.path.realpath(path) for one in saved if one not in found for path in one.bases}
        return [one for one in found if os.path.realpath(one.path) not in needed]

    def best(self, saved: Sequence[SavedStep]) -> SavedStep | None:
        """Return the checkpoint with the best metric, the newest of equals; None without a metric."""
        if self.keep_best is None:
            return None
        name, mode = self.keep_best
        sign = -1 if mode == "max" else 1
        known = [one for one in saved if not math.isnan(one.metrics.get(name, math.nan))]
        return min(known, key=lambda one: (sign * one.metrics[name], -one.step), default=None)
