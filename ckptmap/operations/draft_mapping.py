"""Draft a mapping file from two checkpoints of one model in two naming schemes.

Keys that differ only in numbers form a group with one pattern (`layers.{}.w`). Groups of the two
checkpoints that have the same numbers are paired: by equal values if reading values is allowed,
else by shape and by the similarity of names. A rule that is drafted without values is a guess, and
a comment in the draft marks it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import permutations

from ckptmap.checkpoint.open import open_another
from ckptmap.core.formatting import counted
from ckptmap.core.printable import json_text, one_line
from ckptmap.errors import PlanError
from ckptmap.mapping.detect import model_types
from ckptmap.mapping.model_config import config_beside
from ckptmap.operations.draft_groups import LETTERS, KeyGroup, groups_of

MAX_PARTS = 3
"""The most tensors that are joined into one: q, k and v."""
FINGERPRINTS = 2
"""Names by which a drafted scheme is recognized."""
COUNTS = {
    "n": ("num_hidden_layers", "n_layer", "num_layers"),
    "e": ("num_experts", "num_local_experts", "n_routed_experts"),
}
"""Capture -> the keys of config.json that may count it."""


@dataclass
class Draft:
    """The drafted rules, and the groups of keys that no rule covers.

    rules     the text of each rule
    models    the model_type of the config.json beside the checkpoint with Hugging Face names
    dims      the name of a capture or axis -> its size in this model, or the config's key of it
    names     the names of the other checkpoint in the rules
    hub_names those of the checkpoint with Hugging Face names
    left      groups of the checkpoint with Hugging Face names without a rule
    right     groups of the other checkpoint without a rule
    guessed   the number of rules that are guesses
    """

    rules: list[str] = field(default_factory=list)
    models: tuple[str, ...] = ()
    dims: dict[str, str] = field(default_factory=dict)
    left: list[KeyGroup] = field(default_factory=list)
    right: list[KeyGroup] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    hub_names: list[str] = field(default_factory=list)
    guessed: int = 0

    @property
    def summary(self) -> str:
        left = len(self.left) + len(self.right)
        rules = counted(len(self.rules), "rule")
        return (
            f"{rules}, {self.guessed} of them guessed; {counted(left, 'pattern', 'is', 'are')} left"
        )

    def to_json(self) -> dict[str, object]:
        return {
            "text": str(self), "rules": len(self.rules), "guessed": self.guessed,
            "left": [group.name for group in self.left],
            "right": [group.name for group in self.right],
        }  # fmt: skip

    def __str__(self) -> str:
        head = [
            "# A draft by `ckptmap mappings new`: look at every guess. Give this file to --names to go to these",
            "# names, or to --names-from with --names hf to leave them. Below a folder of CKPTMAP_MAPPINGS, as",
            "# mine/mine.toml, it is found by its name.",
            "schema = 1", 'family = "mine"', 'scheme = "mine"', *self._models(), "", *self._detect(),
        ]  # fmt: skip
        dims = [
            "[dims]  # numbers are of this model; keys of config.json hold for others, too",
            *(f"{axis} = {value}" for axis, value in self.dims.items()),
            "",
        ]
        left = [f"# not drafted, hf:   {g.name} {list(g.shape)}" for g in self.left]
        left += [f"# not drafted, mine: {g.name} {list(g.shape)}" for g in self.right]
        return (
            "\n".join([*head, *(dims if self.dims else []), *self.rules, *map(one_line, left)])
            + "\n"
        )

    def _models(self) -> list[str]:
        """Return the line that says for which models the rules are; without it, for none but "mine"."""
        return [f"models = {_quoted_list(self.models)}"] if self.models else []

    def _detect(self) -> list[str]:
        """Return the fingerprints: names of the scheme that Hugging Face's side has not."""
        own = [name for name in self.names if name not in self.hub_names]
        own = sorted(own, key=lambda name: "{" not in name)[:FINGERPRINTS]
        return ["[detect]", f"all = {_quoted_list(own)}", ""] if own else []


def draft(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, values: bool = False
) -> Draft:
    """Return a draft of the rules between two checkpoints; `source` has Hugging Face names.

    With `values`, the values of one tensor of each pattern are compared. Raises PlanError CKM615 if
    no tensors can be paired.
    """
    with open_another(source) as hub, open_another(target) as other:
        config = config_beside(hub.sidecar_dir, hub.files.mounts) or {}
        drafter = _Drafter(groups_of(hub), groups_of(other), values, config)
        result = drafter.run()
        if not result.rules:
            raise _without_pairs(f"{source} and {target}", result, values)
    return result


def _without_pairs(where: str, result: Draft, values: bool) -> PlanError:
    """Return PlanError CKM615, which says how near the nearest two groups of keys are."""
    pairs = [(a, b) for a in result.left for b in result.right if a.shape == b.shape]
    if not pairs:
        problem = "no two tensors have the same shape"
        hint = "give two checkpoints of one model; `ckptmap diff A B` shows what they hold"
        return PlanError("CKM615", f"{where}: {problem}", hint)
    a, b = min(pairs, key=lambda pair: -_likeness(*pair))
    both = f"{a.name} and {b.name} have the shape {list(a.shape)}"
    if values and a.numbers == b.numbers:
        problem = f"{both}, but no two tensors have the same values"
        hint = "give two checkpoints of the same weights, or leave --values out: names and shapes tell then"
    else:
        problem = f"{both}, but their numbers differ: {len(a.numbers)} and {len(b.numbers)} tensors"
        hint = "give two checkpoints of one model with as many layers"
    return PlanError("CKM615", f"{where}: {problem}", hint)


def _likeness(a: KeyGroup, b: KeyGroup) -> float:
    return SequenceMatcher(None, a.pattern, b.pattern, autojunk=False).ratio()


class _Drafter:
    def __init__(
        self,
        left: list[KeyGroup],
        right: list[KeyGroup],
        values: bool,
        config: Mapping[str, object],
    ) -> None:
        self.values, self.config = values, config
        self.extents: dict[str, set[int]] = {}
        """The name of a capture -> how many different numbers it has; 0: they are not 0..n-1."""
        models = tuple(model_types(config)[:1])
        self.draft = Draft(left=left, right=right, models=models)

    def run(self) -> Draft:
        self._draft_pairs()
        self._draft_stacks_of_halves()  # first: what is left has fewer stacks that it could be of
        self._draft_stacks()
        self._draft_joins()
        for letter, (count, *others) in self.extents.items():
            if count and not others:
                self.draft.dims.setdefault(letter, self._count(letter, count))
        return self.draft

    def _count(self, letter: str, count: int) -> str:
        """Return the key of the config that counts layers or experts, where one has this number; else
        the number."""
        keys = (key for key in COUNTS.get(letter, ()) if self.config.get(key) == count)
        return next(map(_quote, keys), str(count))

    def _record_extents(self, group: KeyGroup) -> None:
        """Record how many numbers each capture of the group has.

        The draft lists them as dims: without them a mapping file cannot be tested alone.
        """
        for letter, numbers in zip(LETTERS, zip(*group.numbers, strict=True), strict=False):
            is_dense = set(numbers) == set(range(len(set(numbers))))
            self.extents.setdefault(letter, set()).add(len(set(numbers)) if is_dense else 0)

    def _add_rule(self, hub: str, other: str, guessed: bool, *groups: KeyGroup) -> None:
        reason = "several have these contents" if self.values else "shapes alone"
        note = f"# a guess: {reason}\n" if guessed else ""
        self.draft.rules.append(f"{note}[[rule]]\nhf   = {hub}\nmine = {other}\n")
        self.draft.guessed += guessed
        for group in groups:
            on_left = any(group is one for one in self.draft.left)
            (self.draft.hub_names if on_left else self.draft.names).append(group.name)
        for side in (self.draft.left, self.draft.right):
            side[:] = [
                group for group in side if all(group is not used_group for used_group in groups)
            ]

    # ------------------------------------------------------------------ one to one

    def _draft_pairs(self) -> None:
        """Add a rule for each pair of groups that match one to one.

        The best pairs come first: those with equal values, then those with similar names.
        """
        scored = [
            (score, -i, -j, a, b, axes)
            for i, a in enumerate(self.draft.left)
            for j, b in enumerate(self.draft.right)
            if a.uniform and b.uniform and a.numbers == b.numbers
            for score, axes in self._match_scores(a, b)
        ]
        equal = Counter(id(group) for row in scored if row[0] >= 2 for group in row[3:5])
        used: set[int] = set()
        for score, _, _, a, b, axes in sorted(scored, key=lambda row: row[:3], reverse=True):
            if id(a) in used or id(b) in used:
                continue
            used |= {id(a), id(b)}
            hub, other = (f" :: {side}" if side else "" for side in axes)
            self._record_extents(a)
            certain = score >= 2 and equal[id(a)] == equal[id(b)] == 1
            self._add_rule(_quote(a.name + hub), _quote(b.name + other), not certain, a, b)

    def _match_scores(self, a: KeyGroup, b: KeyGroup) -> Iterator[tuple[float, tuple[str, str]]]:
        likeness = _likeness(a, b)
        if not self.values:
            if a.shape == b.shape:
                yield likeness, ("", "")
        elif a.shape == b.shape and a.rows == b.rows:
            yield 3 + likeness, ("", "")
        elif a.shape == b.shape and sorted(a.rows) == sorted(b.rows):
            axes = self._rotary_axes(a, b)
            if axes is not None:
                yield 2 + likeness, axes
        elif a.shape == b.shape[::-1] and len(a.shape) == 2 and self._is_transposed(a, b):
            yield 2 + likeness, ("a b", "b a")

    def _rotary_axes(self, a: KeyGroup, b: KeyGroup) -> tuple[str, str] | None:
        """Return the axes of a rule for rows in the two orders of rotary embeddings, or None.

        The rows of a head are two halves on one side and pairs of neighbours on the other. The head
        size is not known, so every size that divides the rows is tried.
        """
        count = len(a.rows)
        for half in (n for n in range(1, count // 2 + 1) if count % (2 * n) == 0):
            order = [
                head * 2 * half + two * half + r
                for head in range(count // (2 * half))
                for r in range(half)
                for two in range(2)
            ]
            tail_axes = " i" if len(a.shape) > 1 else ""
            for first, second, forward in (("two r", "r two", True), ("r two", "two r", False)):
                source_rows, target_rows = (a.rows, b.rows) if forward else (b.rows, a.rows)
                if half > 1 and [source_rows[at] for at in order] == target_rows:
                    axis = self._axis_of_size(half)
                    hub_axes, other_axes = (side.replace("r", axis) for side in (first, second))
                    return f"(h {hub_axes}){tail_axes}", f"(h {other_axes}){tail_axes}"
        return None

    def _axis_of_size(self, half: int) -> str:
        """Return the name of an axis of size `half`: r for the first size, then r2 and r3."""
        for axis in ("r", "r2", "r3"):
            if self.draft.dims.setdefault(axis, str(half)) == str(half):
                return axis
        return "r"

    def _is_transposed(self, a: KeyGroup, b: KeyGroup) -> bool:
        import torch

        return torch.equal(a.first.read().t(), b.first.read())

    # ------------------------------------------------------------------ many to one

    def _draft_stacks(self) -> None:
        """Add rules for tensors of numbered modules (experts) that the other side stacks."""
        for a in list(self.draft.left):
            for b in list(self.draft.right):
                numbers = {n[:-1] for n in a.tensors if n}
                experts = {n[-1] for n in a.tensors if n}
                if not (a.uniform and b.uniform and experts) or numbers != b.numbers:
                    continue
                axes = self._stack_axes(a, b, len(experts))
                if axes is not None and a in self.draft.left:
                    letter = LETTERS[len(next(iter(a.tensors))) - 1]
                    hub, other = (side.replace("E", letter) for side in axes)
                    guessed = not self.values
                    self._add_rule(
                        _quote(f"{a.name} :: {hub}"),
                        _quote(f"{b.name} :: {other}"),
                        guessed,
                        a,
                        b,
                    )
                    break

    def _stack_axes(self, a: KeyGroup, b: KeyGroup, count: int) -> tuple[str, str] | None:
        if len(a.shape) != 2 or len(b.shape) != 3 or b.shape[0] != count:
            return None
        for order, other in (((0, 1), "E a b"), ((1, 0), "E b a")):
            if tuple(a.shape[d] for d in order) != b.shape[1:]:
                continue
            if not self.values or self._is_slice_equal(a, b, order):
                return "a b", other
        return None

    def _is_slice_equal(self, a: KeyGroup, b: KeyGroup, order: tuple[int, ...]) -> bool:
        import torch

        last = max(a.tensors)
        part = a.tensors[last].read().permute(order)
        stack = b.tensors[last[:-1]]
        box = stack.read((last[-1], 0, 0), (1, *stack.shape[1:]))
        return torch.equal(part, box[0])

    def _draft_stacks_of_halves(self) -> None:
        """Add rules for two tensors of an expert, gate and up, that the other side joins before it stacks them."""
        for b in list(self.draft.right):
            pairs = permutations((a for a in self.draft.left if a.uniform), 2)
            found = next((pair for pair in pairs if self._are_halves(pair, b)), None)
            if found is not None:
                letter = LETTERS[len(next(iter(found[0].tensors))) - 1]
                hub = _quoted_list([f"{a.name} :: m i @ two[{at}]" for at, a in enumerate(found)])
                other = _quote(f"{b.name} :: {letter} (two m) i")
                self._add_rule(hub, other, not self.values, b, *found)

    def _are_halves(self, pair: Sequence[KeyGroup], b: KeyGroup) -> bool:
        """Return whether the experts' tensors [m, i] of both are the halves of a stack [e, 2m, i]."""
        import torch

        first, second = pair
        shape, experts = first.shape, {n[-1] for n in first.tensors if n}
        if first.numbers != second.numbers or first.shape != second.shape or not b.uniform:
            return False
        if len(shape) != 2 or b.shape != (len(experts), 2 * shape[0], shape[1]):
            return False
        if {n[:-1] for n in first.tensors} != b.numbers:
            return False
        if not self.values:
            return True
        last = max(first.tensors)
        box = b.tensors[last[:-1]].read((last[-1], 0, 0), (1, *b.shape[1:]))[0]
        return torch.equal(torch.cat([a.tensors[last].read() for a in pair]), box)

    def _draft_joins(self) -> None:
        """Add rules for tensors of one module that the other side concatenates along dim 0."""
        for b in list(self.draft.right):
            parts = self._find_parts(b)
            if parts is not None:
                start, texts = 0, []
                tail_axes = " i" if len(b.shape) > 1 else ""
                for part in parts:
                    texts.append(
                        _quote(f"{part.name} :: s{tail_axes} @ s[{start}:{start + part.shape[0]}]")
                    )
                    start += part.shape[0]
                hub = "[\n  " + ",\n  ".join(texts) + ",\n]"
                self._add_rule(hub, _quote(f"{b.name} :: s{tail_axes}"), not self.values, b, *parts)

    def _find_parts(self, b: KeyGroup) -> Sequence[KeyGroup] | None:
        candidates = [
            a
            for a in self.draft.left
            if a.uniform and a.shape and a.numbers == b.numbers and a.shape[1:] == b.shape[1:]
        ]
        by_module: dict[str, list[KeyGroup]] = {}
        for a in candidates:
            module = a.pattern.rsplit(".", 2)[0]
            by_module.setdefault(module, []).append(a)
        for groups_of_module in by_module.values():
            for count in range(2, MAX_PARTS + 1):
                for parts in permutations(groups_of_module, count):
                    if sum(part.shape[0] for part in parts) != b.shape[0]:
                        continue
                    if not self.values or [r for p in parts for r in p.rows] == b.rows:
                        return parts
        return None


def _quoted_list(texts: Sequence[str]) -> str:
    return "[" + ", ".join(map(_quote, texts)) + "]"


def _quote(text: str) -> str:
    return json_text(json.dumps(text, ensure_ascii=False))  # TOML has the same escapes
