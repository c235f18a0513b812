"""diff(): compare two checkpoints of any setups by plain FQN, and plain values beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.compare_tensors import difference, same_parts
from ckptmap.checkpoint.compare_values import match_extra_state, unequal_values
from ckptmap.checkpoint.open import open
from ckptmap.core.formatting import counted
from ckptmap.core.printable import as_lines
from ckptmap.core.state_paths import join
from ckptmap.core.tensor_table import TensorSummary, fold
from ckptmap.storage.hub.resolve import origins_in_errors
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Path

SHOWN = 20
"""Differing plain values that the text lists."""


@dataclass(frozen=True)
class DiffReport:
    """The differences of two checkpoints.

    changed        FQN -> what differs: shape, dtype, encoding, values
    settings       name -> both values, of what is no tensor: step, scheduler, hyper-parameters
    same           tensors in both that agree
    same_settings  plain values in both that agree
    """

    a: str
    b: str
    same: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: Mapping[str, str]
    values: bool
    settings: Mapping[str, str] = field(default_factory=dict)
    same_settings: int = 0

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.changed or self.settings)

    def to_json(self) -> dict[str, object]:
        return {
            "schema": 1, "equal": self.equal, "a": self.a, "b": self.b, "same": self.same,
            "only_a": list(self.only_a), "only_b": list(self.only_b),
            "changed": dict(self.changed), "values": self.values,
            "settings": dict(self.settings), "same_settings": self.same_settings,
        }  # fmt: skip

    def __str__(self) -> str:
        what = "shape, dtype, encoding and values" if self.values else "shape, dtype and encoding"
        lines = [f"only in {self.a}: {name}{times}" for name, times, _ in _alike(self.only_a)]
        lines += [f"only in {self.b}: {name}{times}" for name, times, _ in _alike(self.only_b)]
        changed = _alike(list(self.changed), list(self.changed.values()))
        lines += [f"{name}: {why}{times}" for name, times, why in changed]
        lines += self._settings()
        verdict = "the same" if self.equal else "different"
        beside = f", {self.same_settings} plain values agree" if self.same_settings else ""
        agree = f"{counted(self.same, 'tensor')} agree{'s' * (self.same == 1)} in {what}{beside}"
        return as_lines([*lines, f"{verdict}: {agree}"])

    def _settings(self) -> list[str]:
        if not self.settings:
            return []
        lines = [f"  {name}: {why}" for name, why in islice(self.settings.items(), SHOWN)]
        more = len(self.settings) - len(lines)
        lines += [f"  and {more} more (all of them with --json)"] if more else []
        return ["what is no tensor:", *lines]


def _alike(names: Sequence[str], whys: Sequence[str] = ()) -> Iterator[tuple[str, str, str]]:
    """Yield pattern, count and reason of names that differ only in numbers and share a reason.

    A whole optimizer that is missing then takes a screen, not a thousand lines.
    """
    looks = {why: TensorSummary(why, (), (), "", 0) for why in {"", *whys}}
    for pattern in fold(names, [looks[why] for why in whys or [""] * len(names)]):
        yield pattern.pattern, f"  {pattern.count}x" if pattern.count > 1 else "", pattern.look.role


def diff(
    a: str | os.PathLike[str] | Checkpoint,
    b: str | os.PathLike[str] | Checkpoint,
    *,
    values: bool = False,
) -> DiffReport:
    """Compare weights and optimizer state by FQN; with `values` also decoded values, bit for bit.

    Values stream in bounded memory. Other entries are compared where both checkpoints have them; a
    plain value inside such an entry that only one has is a difference.
    """
    with ExitStack() as opened:
        one, two = (
            x if isinstance(x, Checkpoint) else opened.enter_context(open(x)) for x in (a, b)
        )
        for ckpt in (one, two):
            opened.enter_context(origins_in_errors(ckpt.files.mounts))
        return _diff(one, two, values)


def _diff(one: Checkpoint, two: Checkpoint, values: bool) -> DiffReport:
    mine, theirs = _tensors(one), _tensors(two)
    beside, others = map(_beside, (one, two), match_extra_state(one, two))
    both_hold = beside.keys() & others.keys()
    mine.update({name: lazy for name, lazy in beside.items() if name in both_hold})
    theirs.update({name: lazy for name, lazy in others.items() if name in both_hold})
    changed: dict[str, str] = {}
    for name in mine:
        if name in theirs:
            why = _changed(mine[name], theirs[name], values)
            if why is not None:
                changed[name] = why
    common = sum(name in theirs for name in mine)
    agree, unequal = unequal_values(one, two)
    settings = {name: f"{a!r:.60} and {b!r:.60}" for name, (a, b) in unequal.items()}
    return DiffReport(
        one.shown, two.shown, common - len(changed),
        tuple(name for name in mine if name not in theirs),
        tuple(name for name in theirs if name not in mine),
        changed, values, settings, agree,
    )  # fmt: skip


def _tensors(ckpt: Checkpoint) -> dict[str, LazyTensor]:
    tensors = {fqn: ckpt[fqn] for fqn in ckpt}
    for states in ckpt.optimizer.values():
        tensors.update({f"optimizer:{lazy.fqn}": lazy for lazy in states.values()})
    return tensors


def _beside(ckpt: Checkpoint, names: Mapping[Path, Path]) -> dict[str, LazyTensor]:
    """Return the tensors that are neither weights nor optimizer state."""
    return {
        f"other:{join(names[path]) if path in names else lazy.fqn}": lazy
        for path, lazy in ckpt.other.items()
    }


def _changed(a: LazyTensor, b: LazyTensor, values: bool) -> str | None:
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and {list(b.shape)}"
    reasons = []
    if a.dtype != b.dtype:
        reasons.append(f"dtype {a.dtype} and {b.dtype}")
    if a.encoding != b.encoding:
        reasons.append(f"encoding {a.encoding} and {b.encoding}")
    if values and not (not reasons and same_parts(a, b) is None):
        differ = difference(a, b)
        if differ is not None:
            reasons.append(
                f"{differ.count} of {a.info.numel} values differ, by at most {differ.max_abs:.3e}"
                f" ({differ.relative:.3e} relative rms), the first at {list(differ.index)}"
            )
        elif not reasons:
            return None  # other bytes, the same values: two ways to store them
    return "; ".join(reasons) or None
