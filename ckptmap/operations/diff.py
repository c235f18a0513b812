"""diff(): compare the tensors of two checkpoints of any setup by plain FQN, and their other values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.compare_tensors import difference
from ckptmap.checkpoint.compare_values import match_extra_state, unequal_values
from ckptmap.checkpoint.open import open, open_another
from ckptmap.checkpoint.rename import renamed
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.core.formatting import counted, some
from ckptmap.core.log import log
from ckptmap.core.printable import as_lines, one_line, quote
from ckptmap.core.short_repr import ShortRepr
from ckptmap.core.signatures import nearest_keyword
from ckptmap.core.state_paths import join
from ckptmap.core.tensor_table import TensorSummary, fold
from ckptmap.execution.phases import Phases
from ckptmap.mapping.prefixes import PrefixChange, nearest_change
from ckptmap.mapping.renaming import Patterns, Renaming
from ckptmap.operations.tensor_change import Measure, TensorChange, change_of, lines_of
from ckptmap.protocols.progress import COMPARING, READING, Progress
from ckptmap.storage.hub.resolve import origins_in_errors
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.resource_limits import named_if_unreadable
from ckptmap.tensors import Path

OPTIMIZER = "optimizer:"
"""Begins the names of optimizer state in a comparison."""
STATE_LINES = 6
"""Patterns of optimizer state that are shown of one checkpoint alone; more are told in one line."""
SHOWN = 20
"""Differing plain values that the text lists."""


@dataclass(frozen=True, repr=False)
class DiffReport(ShortRepr):
    """The differences of two checkpoints.

    changed        FQN -> how it differs: shape, dtype, encoding, values
    stored_keys    FQN -> both keys as they are stored, where wrappers make them differ
    settings       name -> both values, of what is no tensor: step, scheduler, hyper-parameters
    same           tensors in both that agree
    same_settings  plain values in both that agree
    mended_by      the command that compares them where only a prefix keeps names from matching; "":
                   no prefix does
    """

    a: str
    b: str
    same: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: Mapping[str, TensorChange]
    values: bool
    settings: Mapping[str, str] = field(default_factory=dict)
    same_settings: int = 0
    mended_by: str = ""
    stored_keys: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.changed or self.settings)

    def to_json(self) -> dict[str, object]:
        return {
            "schema": 1, "equal": self.equal, "a": self.a, "b": self.b, "same": self.same,
            "only_a": list(self.only_a), "only_b": list(self.only_b),
            "changed": {name: str(change) for name, change in self.changed.items()},
            "changes": {name: change.to_json() for name, change in self.changed.items()},
            "values": self.values, "stored_keys": dict(self.stored_keys),
            "settings": dict(self.settings), "same_settings": self.same_settings,
            "mended_by": self.mended_by,
        }  # fmt: skip

    def __str__(self) -> str:
        compared = (
            "shape, dtype, encoding and values" if self.values else "shape, dtype and encoding"
        )
        lines = [*_only_in(self.a, self.only_a), *_only_in(self.b, self.only_b)]
        lines += [*lines_of(self.changed), *self._settings(), *self._stored_keys()]
        settings_text = (
            f", {counted(self.same_settings, 'plain value', 'agrees', 'agree')}"
            if self.same_settings
            else ""
        )
        agree = f"{counted(self.same, 'tensor')} agree{'s' * (self.same == 1)} in {compared}{settings_text}"
        if self.mended_by:
            lines.append(f"a prefix keeps names apart; without it: {self.mended_by}")
        if self.equal:
            return as_lines([*lines, f"the same: {agree}"])
        return as_lines([*lines, f"different: {agree}; {self._verdict()}"])

    def _verdict(self) -> str:
        """Return how many differ: "23 of 30 differ, 2 are only in a.pt"."""
        differ = len(self.changed)
        parts = [f"{differ} of {self.same + differ} differ{'s' * (differ == 1)}"]
        for names, where in ((self.only_a, self.a), (self.only_b, self.b)):
            if names:
                parts.append(f"{len(names)} {'is' if len(names) == 1 else 'are'} only in {where}")
        return ", ".join(parts)

    def _stored_keys(self) -> list[str]:
        """Return the line that tells of names which are plain only after wrappers came off."""
        if not self.stored_keys:
            return []
        a, b = next(iter(self.stored_keys.values()))
        count = counted(len(self.stored_keys), "name")
        return [f"stored keys of {count} differ, as in {a!r} and {b!r}; plain names are compared"]

    def _settings(self) -> list[str]:
        if not self.settings:
            return []
        lines = [f"  {name}: {reason}" for name, reason in islice(self.settings.items(), SHOWN)]
        more = len(self.settings) - len(lines)
        lines += [f"  and {more} more (all of them with --json)"] if more else []
        return ["what is no tensor:", *lines]


def _only_in(where: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of names that one checkpoint lacks; optimizer state of many parameters is one line."""
    weights = [name for name in names if not name.startswith(OPTIMIZER)]
    state = [name for name in names if name.startswith(OPTIMIZER)]
    folded = [f"{name}{times}" for name, times, _ in folded_names(state)]
    if len(folded) > STATE_LINES:
        of = {name.removeprefix(OPTIMIZER).rpartition(".")[::2] for name in state}
        kinds = some(sorted({kind for _, kind in of}))
        count = counted(len({fqn for fqn, _ in of}), "parameter")
        folded = [f"optimizer state of {count}: {kinds} (all of it with --json)"]
    for text in (*(f"{name}{times}" for name, times, _ in folded_names(weights)), *folded):
        yield f"only in {where}: {text}"


def folded_names(
    names: Sequence[str], reasons: Sequence[str] = ()
) -> Iterator[tuple[str, str, str]]:
    """Yield pattern, count and reason of names that differ only in numbers and share a reason.

    A whole optimizer that is missing then takes a screen, not a thousand lines.
    """
    summary_of = {reason: TensorSummary(reason, (), (), "", 0) for reason in {"", *reasons}}
    for pattern in fold(names, [summary_of[reason] for reason in reasons or [""] * len(names)]):
        yield pattern.pattern, f"  {pattern.count}x" if pattern.count > 1 else "", pattern.look.role


@nearest_keyword
@tensors_on_cpu()
def diff(
    a: str | os.PathLike[str] | Checkpoint,
    b: str | os.PathLike[str] | Checkpoint,
    *,
    values: bool = False,
    strip_prefix: str | None = None,
    rename: Patterns = (),
    add_prefix: str | None = None,
    progress: bool | Progress = False,
) -> DiffReport:
    """Compare weights and optimizer state by FQN; with `values` also decoded values, bit for bit.

    `strip_prefix`, `rename` and `add_prefix` change the names of `a`, as in `ckptmap.open`. The
    report says which of them would make names match that do not.

    Values stream in bounded memory. Other entries are compared where both checkpoints have them; a
    plain value inside such an entry that only one has is a difference. `progress` is that of
    `verify`.
    """
    renaming = Renaming.of(strip_prefix, rename, add_prefix)
    phases = Phases.of(progress)
    log.info("diff %s and %s", *(one_line(str(getattr(x, "shown", x))) for x in (a, b)))
    phases.begin(READING)
    with ExitStack() as stack:
        stack.enter_context(named_if_unreadable())
        first, second = (
            x if isinstance(x, Checkpoint) else stack.enter_context(opened(x))
            for x, opened in ((a, open), (b, open_another))
        )
        for ckpt in (first, second):
            stack.enter_context(origins_in_errors(ckpt.files.mounts))
        measure = (lambda _, a, b: difference(a, b)) if values else None
        report = compare(renamed(first, renaming), second, measure, phases)
        return report if renaming else with_prefix_told(report, first, second)


def with_prefix_told(report: DiffReport, first: Checkpoint, second: Checkpoint) -> DiffReport:
    """Return the report with the command that makes names match, where a prefix keeps them apart."""
    if not (report.only_a and report.only_b):
        return report
    change = nearest_change(list(first), list(second))
    return report if change is None else replace(report, mended_by=_mended_by(report, change))


def _mended_by(report: DiffReport, change: PrefixChange) -> str:
    """Return the command that compares the two under names that match."""
    command = (
        f"ckptmap diff {quote(report.a)} {quote(report.b)}{' --values' if report.values else ''}"
    )
    return f"{command} {change.names_option}"


def compare(
    first: Checkpoint,
    second: Checkpoint,
    measure: Measure | None,
    phases: Phases | None = None,
) -> DiffReport:
    """Return the differences of two opened checkpoints; without `measure` values are not compared.

    `measure` is called for tensors of one shape whose stored bytes differ.
    """
    phases = phases or Phases()
    first_tensors, second_tensors = _tensors(first), _tensors(second)
    first_others, second_others = map(
        _other_tensors, (first, second), match_extra_state(first, second)
    )
    common_others = first_others.keys() & second_others.keys()
    first_tensors.update(
        {name: lazy for name, lazy in first_others.items() if name in common_others}
    )
    second_tensors.update(
        {name: lazy for name, lazy in second_others.items() if name in common_others}
    )
    changed: dict[str, TensorChange] = {}
    if measure is not None:
        nbytes = (lazy.nbytes for name, lazy in first_tensors.items() if name in second_tensors)
        phases.begin(COMPARING, sum(nbytes))
        phases.mention_torch()
    for name in first_tensors:
        if name in second_tensors:
            change = change_of(name, first_tensors[name], second_tensors[name], measure)
            if change is not None:
                changed[name] = change
            if measure is not None:
                phases.advance(first_tensors[name].nbytes, name)
    common = sum(name in second_tensors for name in first_tensors)
    equal_count, unequal_pairs = unequal_values(first, second)
    settings = {name: f"{a!r:.60} and {b!r:.60}" for name, (a, b) in unequal_pairs.items()}
    return DiffReport(
        first.shown, second.shown, common - len(changed),
        tuple(name for name in first_tensors if name not in second_tensors),
        tuple(name for name in second_tensors if name not in first_tensors),
        changed, measure is not None, settings, equal_count,
        stored_keys=_stored_keys(first, second),
    )  # fmt: skip


def _tensors(ckpt: Checkpoint) -> dict[str, LazyTensor]:
    tensors = {fqn: ckpt[fqn] for fqn in ckpt}
    for states in ckpt.optimizer.values():
        tensors.update({f"{OPTIMIZER}{lazy.fqn}": lazy for lazy in states.values()})
    return tensors


def _other_tensors(ckpt: Checkpoint, names: Mapping[Path, Path]) -> dict[str, LazyTensor]:
    """Return the tensors that are neither weights nor optimizer state."""
    return {
        f"other:{join(names[path]) if path in names else lazy.fqn}": lazy
        for path, lazy in ckpt.other.items()
    }


def _stored_keys(first: Checkpoint, second: Checkpoint) -> dict[str, tuple[str, str]]:
    """Return both stored keys of the weights that have the same plain name and other stored ones."""
    if not (first.wrappers or second.wrappers):
        return {}
    pairs = ((fqn, (key, second.names.get(fqn, key))) for fqn, key in first.names.items())
    return {fqn: (a, b) for fqn, (a, b) in pairs if a != b}
