"""Apply the rules of a naming scheme to the keys and shapes of one checkpoint.

    infos {source key: shape, dtype}  ->  Resolution {target key: MappedTensor(pieces of sources)}

No tensor is read. Everything that could silently go wrong is an error here: a key that no rule matches,
two sources for one target, a missing layer, a shape that is not the product of its axes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptmap.core.formatting import some
from ckptmap.core.printable import advised
from ckptmap.core.strided_boxes import Piece
from ckptmap.errors import PlanError
from ckptmap.mapping import value_ops
from ckptmap.mapping.completeness import check_complete
from ckptmap.mapping.dims_table import Dims
from ckptmap.mapping.expressions import Unknown
from ckptmap.mapping.key_matcher import Candidate, KeyMatcher
from ckptmap.mapping.name_patterns import NamePattern
from ckptmap.mapping.rearrange import build_targets
from ckptmap.mapping.rule_errors import known_shape, missing_config, wrong_shape
from ckptmap.mapping.rule_tensors import RuleSource, RuleTarget
from ckptmap.mapping.rules import NamingScheme, Rule
from ckptmap.tensors import Box, TensorInfo


class MappedTensor(NamedTuple):
    """One target tensor and its sources; a tuple, because there may be 100,000 of them.

    source  the key of the source that it equals, where it is only renamed; else None, and
    pieces  are regions of sources that tile it, but for the box `zeros`
    ops     value operations in order, each with True for its inverse
    rule    the label of its rule, for messages
    """

    name: str
    info: TensorInfo
    source: str | None = None
    pieces: tuple[Piece, ...] = ()
    zeros: Box | None = None
    ops: tuple[tuple[str, bool], ...] = ()
    rule: str = ""

    @property
    def sources(self) -> tuple[str, ...]:
        """The keys it is made of, each once."""
        if self.source is not None:
            return (self.source,)
        return tuple(dict.fromkeys(piece.source for piece in self.pieces))

    @property
    def stated_dtype(self) -> str:
        """The dtype that an operation states for the scheme's side, in both directions; "" without one."""
        stated = [value_ops.parse_value_op(text).dtype for text, _ in self.ops]
        return next(filter(None, reversed(stated)), "")


@dataclass(frozen=True)
class Resolution:
    """What becomes of every key.

    targets   target key -> the tensor, as regions of its sources
    dropped   source key -> the reason why no target holds it
    unmapped  source keys that no rule matches
    tied      target key that is left out -> the target it must equal
    used      the config values that the mapping depends on
    left      names of targets that do not exist because their sources stay behind
    """

    targets: Mapping[str, MappedTensor]
    dropped: Mapping[str, str]
    unmapped: Sequence[str]
    tied: Mapping[str, str] = field(default_factory=dict)
    used: Mapping[str, object] = field(default_factory=dict)
    left: Collection[str] = ()


def resolve(
    scheme: NamingScheme,
    infos: Mapping[str, TensorInfo],
    *,
    to_hub: bool,
    config: Mapping[str, object] | None,
    complete: bool = True,
    left: Collection[str] = (),
) -> Resolution:
    """Return what the rules of `scheme` make of the tensors in `infos`.

    to_hub    True: from the scheme's names to the hub's; False: the other way
    complete  True: a rule whose keys are missing is an error
    left      keys that exist but stay behind; they count as present, and no target is made of them

    Raises PlanError CKM605 to CKM608, 614, 617.
    """
    return _Resolver(scheme, infos, to_hub, config, complete, left).run()


class _Pending(NamedTuple):
    """Targets that are built of several sources, once all keys have been seen.

    renamed_before  number of tensors renamed before their first source key
    rule, shared    index of the rule, and the values of its shared captures
    """

    renamed_before: int
    rule: int
    shared: tuple[int, ...]


class _Resolver:
    """Applies the rules of one scheme in one direction to the keys of one checkpoint."""

    def __init__(
        self,
        scheme: NamingScheme,
        infos: Mapping[str, TensorInfo],
        to_hub: bool,
        config: Mapping[str, object] | None,
        complete: bool,
        left: Collection[str],
    ) -> None:
        self.left, self.left_names = left, list[str]()
        self.scheme, self.infos, self.to_hub, self.complete = scheme, infos, to_hub, complete
        self.dims = Dims(scheme.dims, config)
        self.targets: dict[str, MappedTensor] = {}
        self.dropped: dict[str, str] = {}
        self.unmapped: list[str] = []
        self.tied: dict[str, str] = {}
        self._refuse()
        self.active = [self.dims.holds(rule.when) for rule in scheme.rules]
        self.matcher = KeyMatcher(scheme, scheme.is_hub or not to_hub, self.dims, self.active)
        self.slots: list[dict[tuple[int, ...], dict[tuple[int, tuple[int, ...]], str]]] = [
            {} for _ in scheme.rules
        ]
        """For each rule: shared captures -> (term, stacked captures) -> the source key for them."""
        self.renamed: list[list[tuple[int, ...]]] = [[] for _ in scheme.rules]
        """For each rule that renames: the shared captures of its keys."""
        self.pending: list[_Pending] = []
        self.tied_in: set[tuple[str, tuple[int, ...]]] = set()
        """(rule, shared captures) that a tied tensor stands in for, which the source leaves out."""
        self.built: dict[object, tuple[list[RuleSource], list[RuleTarget]]] = {}
        """Rule and shapes of its sources -> the first such sources, and the targets built of them."""
        self.expected = [
            known_shape(rule, not to_hub, self.dims) if rule.is_rename else None
            for rule in scheme.rules
        ]

    def run(self) -> Resolution:
        for key in self.infos:
            self._assign(key, key)
        for tied, stored in self._absent_ties():
            self._assign(tied, stored)
        for key in self.left:
            self._note_left(key)
        if self.pending:
            self._restore_order()
        if self.complete:
            check_complete(
                self.scheme, self.to_hub, self.dims, self.active, self._present_captures()
            )
        self._leave_ties()
        return Resolution(
            self.targets, self.dropped, tuple(self.unmapped), self.tied, dict(self.dims.used),
            self.left_names,
        )  # fmt: skip

    def _restore_order(self) -> None:
        """Restore the source's order: a tensor made of several keys stands where the first one stood."""
        renamed, self.targets = list(self.targets.values()), {}
        done = 0
        for pending in self.pending:
            for target in renamed[done : pending.renamed_before]:
                self._add(target)
            slots = self.slots[pending.rule][pending.shared]
            self._build(self.scheme.rules[pending.rule], pending.shared, slots)
            done = pending.renamed_before
        for target in renamed[done:]:
            self._add(target)

    def _present_captures(self) -> list[set[tuple[int, ...]]]:
        """Return, for each rule, the captures for which the checkpoint has keys."""
        return [{*renamed, *built} for renamed, built in zip(self.renamed, self.slots, strict=True)]

    def _refuse(self) -> None:
        for refuse in self.scheme.refuses:
            if self.dims.holds(refuse.when):
                raise PlanError(
                    "CKM617",
                    f"{self.scheme.title}: {refuse.why} ({refuse.when.text}; {self.dims.describe()})",
                    "choose another scheme, or give a mapping file of your own to --names",
                )

    # ------------------------------------------------------------------ one key

    def _assign(self, key: str, actual: str) -> None:
        """Assign one key to its rule; `actual` is the key whose tensor it takes, another where tied."""
        candidate, numbers = self.matcher.find(key)
        if candidate is None:
            self.unmapped.append(key)
            return
        if candidate.drop is not None:
            self.dropped[key] = candidate.drop.why
            return
        rule = self.scheme.rules[candidate.rule]
        if rule.is_rename:
            self._rename(key, actual, candidate, rule, numbers)
            return
        shared, stack = numbers, tuple[int, ...]()
        if not candidate.simple or candidate.name.captures != rule.shared:
            captures = candidate.captures(numbers)
            shared = tuple(captures[name] for name in rule.shared)
            stack = tuple(value for name, value in captures.items() if name not in rule.shared)
        slots = self.slots[candidate.rule].get(shared)
        if slots is None:
            slots = self.slots[candidate.rule][shared] = {}
            self.pending.append(_Pending(len(self.targets), candidate.rule, shared))
        slot = (candidate.term, stack)
        if slot in slots:
            raise self._duplicate(rule, slots[slot], key)
        slots[slot] = actual
        if actual is not key:
            self.tied_in.add((rule.label, shared))

    def _note_left(self, key: str) -> None:
        """Count a key that stays behind as present, and note the targets that are not made of it."""
        candidate, numbers = self.matcher.find(key)
        if candidate is None or candidate.drop is not None:
            return
        rule = self.scheme.rules[candidate.rule]
        captures = candidate.captures(numbers)
        self.renamed[candidate.rule].append(tuple(captures[name] for name in rule.shared))
        for term in rule.side(self.to_hub):
            if set(term.captures) <= captures.keys():
                self.left_names.append(self._render(term.names[0], captures))

    def _rename(
        self, key: str, actual: str, candidate: Candidate, rule: Rule, numbers: tuple[int, ...]
    ) -> None:
        target = rule.side(self.to_hub)[0].names[0]
        if candidate.simple and candidate.name.holes == target.holes:
            captured = numbers
            name = target.skeleton.format(*numbers) if numbers else target.skeleton
        else:
            captures = candidate.captures(numbers)
            captured = tuple(captures[c] for c in rule.shared)
            name = self._render(target, captures)
        info = self.infos[actual]
        expected = self.expected[candidate.rule]
        if expected is not None and info.shape != expected and not _fits(info.shape, expected):
            raise self._wrong_shape(rule, key, info, expected)
        self.renamed[candidate.rule].append(captured)
        if actual is not key and self._is_left(name):
            return
        mapped = MappedTensor(name, info, actual, rule=rule.label)
        if rule.op or name in self.targets:
            self._add(self._with_value_op(mapped, rule) if rule.op else mapped)
        else:
            self.targets[name] = mapped

    def _render(self, name: NamePattern, captures: dict[str, int]) -> str:
        try:
            return name.render(captures, name.shifts(self.dims))
        except Unknown as unknown:
            raise self._missing_config(unknown.names, name.text) from unknown

    def _add(self, mapped: MappedTensor) -> None:
        other = self.targets.get(mapped.name)
        if other is not None:
            raise PlanError(
                "CKM608",
                f"{self.scheme.title}: {mapped.name} would be made twice: of {some(other.sources, 3)} by"
                f" {other.rule}, and of {some(mapped.sources, 3)} by {mapped.rule}",
                f"leave one of them out with {_without(mapped.sources)}, or correct the mapping file",
            )
        self.targets[mapped.name] = mapped

    # ------------------------------------------------------------------ one rule

    def _build(
        self,
        rule: Rule,
        shared: tuple[int, ...],
        slots: Mapping[tuple[int, tuple[int, ...]], str],
    ) -> None:
        """Make the targets of one rule for one set of shared captures.

        Layers with equal shapes share the result; only the names differ.
        """
        captures = dict(zip(rule.shared, shared, strict=True))
        order = sorted(slots)
        shapes = (rule.label, tuple((slot, self.infos[slots[slot]]) for slot in order))
        sources = [RuleSource(slots[slot], *slot, self.infos[slots[slot]]) for slot in order]
        if shapes not in self.built:
            targets = build_targets(self.scheme, rule, self.to_hub, self.dims, sources, captures)
            self.built[shapes] = sources, targets
        first, targets = self.built[shapes]
        names = {a.key: b.key for a, b in zip(first, sources, strict=True)}
        for target in targets:
            name = self._render(target.term.names[0], {**captures, **target.stack})
            if (rule.label, shared) in self.tied_in and self._is_left(name):
                continue  # tied in the source, and tied where it goes
            self._add(self._target_of(target, name, names, rule))

    def _target_of(
        self, target: RuleTarget, name: str, names: Mapping[str, str], rule: Rule
    ) -> MappedTensor:
        """Return a target for other sources of the same shapes; `names` maps the old keys to the new."""
        if target.whole is not None:
            mapped = MappedTensor(name, target.info, names[target.whole], rule=rule.label)
        else:
            pieces = tuple(Piece(names[p.source], p.src, p.dst) for p in target.pieces)
            mapped = MappedTensor(name, target.info, None, pieces, target.zeros, rule=rule.label)
        return self._with_value_op(mapped, rule) if rule.op else mapped

    def _with_value_op(self, mapped: MappedTensor, rule: Rule) -> MappedTensor:
        """Add the rule's value operation, in the direction of this mapping."""
        op = value_ops.parse_value_op(rule.op)
        info = op.result(mapped.info, self.to_hub)
        return mapped._replace(info=info, ops=((rule.op, self.to_hub),))

    # ------------------------------------------------------------------ ties

    def _absent_ties(self) -> Iterator[tuple[str, str]]:
        """Yield (name, kept name) of tied tensors that the source leaves out."""
        for tie in self.scheme.ties:
            if tie.name.text in self.infos or (tie.hub == self.to_hub and not self.scheme.is_hub):
                continue
            if tie.kept.text not in self.infos:
                continue
            holds = self.dims.holds(tie.when)
            if holds is None and tie.when is not None and self.complete:
                raise self._missing_config(
                    tie.when.names(), f"{tie.name.text} is missing and may be tied"
                )
            if holds:
                yield tie.name.text, tie.kept.text

    def _is_left(self, name: str) -> bool:
        """Return whether the target's side leaves this name out because it is tied."""
        return any(
            tie.hub == self.to_hub and tie.name.text == name and self.dims.holds(tie.when)
            for tie in self.scheme.ties
            if not tie.written
        )

    def _leave_ties(self) -> None:
        """Record the tied names that the target leaves out although the source has them.

        Such a tensor must equal the one that is kept.
        """
        for tie in self.scheme.ties:
            name, kept = tie.name.text, tie.kept.text
            leaves = not tie.hub and not self.to_hub and not tie.written
            if not leaves or not self.dims.holds(tie.when):
                continue
            if name in self.targets and kept in self.targets:
                self.tied[name] = kept

    # ------------------------------------------------------------------ errors

    def _missing_config(self, names: Sequence[str], subject: str) -> PlanError:
        return missing_config(self.scheme, names, subject)

    def _duplicate(self, rule: Rule, first: str, second: str) -> PlanError:
        return PlanError(
            "CKM608",
            f"{self.scheme.title}: {rule.label}: {first} and {second} are two sources for the same part of a tensor",
            f"leave one of them out with {advised(exclude=second)}",
        )

    def _wrong_shape(
        self, rule: Rule, key: str, info: TensorInfo, expected: Sequence[int | None]
    ) -> PlanError:
        axes = rule.side(not self.to_hub)[0].axes
        assert axes is not None, "only axes give an expected shape"
        return wrong_shape(self.scheme, rule, key, info, expected, axes, self.dims)


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Return whether a shape equals the expected one where that is known."""
    return len(expected) == len(shape) and all(
        known is None or known == size for known, size in zip(expected, shape, strict=True)
    )


def _without(keys: Sequence[str]) -> str:
    return " ".join(advised(exclude=key) for key in keys)
