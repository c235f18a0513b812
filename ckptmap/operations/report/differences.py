"""What differs between two checkpoints, as the page shows it: a histogram and the worst tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptmap.core.formatting import counted
from ckptmap.operations.diff import DiffReport, folded_names
from ckptmap.operations.report.collect import shown_name
from ckptmap.operations.report.error_map import TensorError, ordered

WORST = 20
LISTED = 40
"""Lines of names that only one side has, and of differing settings."""


@dataclass(frozen=True)
class Bar:
    """A bar of the histogram: tensors whose relative error lies in one decade."""

    title: str
    count: int
    share: float


@dataclass(frozen=True)
class Worst:
    """One of the tensors that differ most."""

    name: str
    relative: str
    max_abs: str
    count: str
    first: str


@dataclass(frozen=True)
class Differences:
    """The differences of two checkpoints. `changed` are lines of what differs, names folded."""

    report: DiffReport
    bars: Sequence[Bar]
    worst: Sequence[Worst]
    changed: Sequence[tuple[str, str]]
    only_a: Sequence[tuple[str, str]]
    only_b: Sequence[tuple[str, str]]
    settings: Sequence[tuple[str, str]]

    @property
    def text(self) -> str:
        """One sentence: how many of how many tensors differ."""
        report = self.report
        total = report.same + len(report.changed)
        lines = [f"{len(report.changed):,} of {counted(total, 'tensor')} in both differ"]
        lines += [f"{len(report.only_a):,} are only in A"] if report.only_a else []
        lines += [f"{len(report.only_b):,} are only in B"] if report.only_b else []
        if report.settings:
            lines.append(f"{counted(len(report.settings), 'plain value')} differ")
        return "The same." if report.equal else ", ".join(lines) + "."


def differences(report: DiffReport, errors: Mapping[str, TensorError]) -> Differences:
    """Return what the page shows of a comparison; `errors` are those of tensors that were read."""
    worst = sorted(
        (name for name, error in errors.items() if error.count),
        key=lambda name: (-ordered(errors[name].relative), name),
    )[:WORST]
    names, reasons = list(report.changed), list(map(str, report.changed.values()))
    unread = [i for i, name in enumerate(names) if name not in errors]
    changed = folded_names([names[i] for i in unread], [reasons[i] for i in unread])
    return Differences(
        report, _bars(errors), [_row(name, errors[name]) for name in worst],
        _lines((f"{name}{times}", reason) for name, times, reason in changed),
        _lines((name, times) for name, times, _ in folded_names(report.only_a)),
        _lines((name, times) for name, times, _ in folded_names(report.only_b)),
        _lines(report.settings.items()),
    )  # fmt: skip


def _lines(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    lines = [(shown_name(name), shown_name(text)) for name, text in pairs]
    more = len(lines) - LISTED
    return [*lines[:LISTED], *([(f"and {more:,} more", "")] if more > 0 else [])]


def _row(name: str, error: TensorError) -> Worst:
    return Worst(
        shown_name(name), f"{error.relative:.3e}", f"{error.max_abs:.3e}",
        f"{error.count:,} of {error.numel:,}", str(list(error.index)),
    )  # fmt: skip


def _bars(errors: Mapping[str, TensorError]) -> list[Bar]:
    """Return one bar a decade of the relative error, from the least to the largest."""
    counts: dict[int, int] = {}
    equal, endless = 0, 0
    for error in errors.values():
        if not error.relative:
            equal += 1
        elif not math.isfinite(error.relative):
            endless += 1
        else:
            decade = math.floor(math.log10(error.relative))
            counts[decade] = counts.get(decade, 0) + 1
    found = [("equal", equal)] if equal else []
    if counts:
        decades = range(max(min(counts), max(counts) - 15), max(counts) + 1)
        low = sum(count for decade, count in counts.items() if decade < decades[0])
        found += [(f"below 1e{decades[0]}", low)] if low else []
        found += [(f"1e{decade} to 1e{decade + 1}", counts.get(decade, 0)) for decade in decades]
    found += [("not finite", endless)] if endless else []
    most = max((count for _, count in found), default=1) or 1
    return [Bar(title, count, count / most) for title, count in found]
