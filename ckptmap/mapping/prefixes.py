"""Find the prefix that keeps names from matching: `student.`, `net.`, an EMA's `module.`.

    have  student.fc.weight, student.fc.bias      wanted  fc.weight, fc.bias      ->  strip student
    have  fc.weight                               wanted  net.fc.weight           ->  add net
    have  model.vision.fc.weight                  wanted  net.fc.weight           ->  model.vision to net

What is found becomes an option or an argument that a user can paste.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from glob import escape

from ckptmap.core.printable import advised_patterns, quote
from ckptmap.mapping.name_patterns import skeletons
from ckptmap.mapping.renaming import Renaming

DEPTH = 4
"""Segments of the longest prefix that is looked for."""
TRIED = 8
"""Prefixes of each kind, the most frequent ones, whose names are compared in full."""
SHARED_ENDS = 4
"""An end that more names share, such as `weight`, tells nothing about their prefixes."""
KINDS = 5000
"""Names that differ in more than numbers, in the largest checkpoint in which known names are looked for."""
STRANGE = 8
"""One name in so many may lie beside all prefixes below which names are known."""
DROPS = 4
"""Patterns that a command lists to leave out what is not wanted."""
AVERAGED, COUNTER = "module", "n_averaged"
"""The names in `torch.optim.swa_utils.AveragedModel`: the copy of the model, the updates counted."""


@dataclass(frozen=True)
class PrefixChange:
    """A prefix `old` that should be `new`; one of them may be empty.

    matched  names that match with it
    wanted   names that could match
    drop     patterns of the names that are still strange; None: there are too many kinds of them
    also     other prefixes without which as many names match
    """

    old: str
    new: str
    matched: int
    wanted: int
    drop: tuple[str, ...] | None = ()
    also: tuple[str, ...] = ()

    @property
    def renaming(self) -> Renaming:
        if not self.new:
            return Renaming.of(strip_prefix=self.old)
        if not self.old:
            return Renaming.of(add_prefix=self.new)
        return Renaming.of(rename=f"{self.old}.{{x}}={self.new}.{{x}}")

    @property
    def options(self) -> str:
        """The change as options of the command line: `--strip-prefix student --drop 'teacher.*'`."""
        return f"{self.names_option} {self.drop_options}".strip()

    @property
    def drop_options(self) -> str:
        """The options that leave out what is still strange."""
        return " ".join(advised_patterns(drop=name) for name in self.drop or ())

    @property
    def names_option(self) -> str:
        """The option that changes the names, without those that leave names out."""
        return " ".join(f"--{name.replace('_', '-')} {quote(text)}" for name, text in self._given())

    @property
    def arguments(self) -> str:
        """The change as keyword arguments: `strip_prefix='student', drop=['teacher.*']`."""
        drop = [f"drop={list(self.drop)!r}"] if self.drop else []
        return ", ".join([*(f"{name}={text!r}" for name, text in self._given()), *drop])

    def _given(self) -> Iterator[tuple[str, str]]:
        renaming = self.renaming
        for name, text in (
            ("strip_prefix", renaming.strip_prefix), ("add_prefix", renaming.add_prefix),
            *(("rename", pattern) for pattern in renaming.rename),
        ):  # fmt: skip
            if text:
                yield name, text

    @property
    def outcome(self) -> str:
        """What it does, as a sentence after a colon."""
        also = f" (as many without {' or '.join(map(repr, self.also))})" if self.also else ""
        return f"{self.matched} of {self.wanted} names match then{also}"


def nearest_change(have: Collection[str], wanted: Collection[str]) -> PrefixChange | None:
    """Return the smallest change of a prefix by which most names that are `wanted` are there; None:
    none makes at least half of those match that do not match now."""
    wanted = dict.fromkeys(wanted)
    matching = sum(name in wanted for name in have)
    could = min(len(wanted), len(have)) - matching
    if could <= 0:
        return None
    found: list[tuple[int, PrefixChange]] = []
    for old, new in _candidates(dict.fromkeys(have), wanted):
        names = _changed(have, old, new)
        if len(set(names)) < len(names) or not _is_plain(old + new):
            continue
        matched = sum(name in wanted for name in names)
        if 2 * (matched - matching) >= could:
            rest = [name for name in names if name not in wanted]
            drop = _patterns(rest, wanted)
            found.append((matched, PrefixChange(old, new, matched, len(wanted), drop)))
    if not found:
        return None
    most = max(matched for matched, _ in found)
    best = [change for matched, change in found if matched == most]
    change = min(
        best, key=lambda one: (bool(one.new) + (one.old != "" and one.new != ""), _size(one))
    )
    also = [
        one.old for one in best if one.old and not one.new and not change.new and one is not change
    ]
    nested = [old for old in also if not old.startswith(f"{change.old}.")]
    return PrefixChange(
        change.old, change.new, change.matched, change.wanted, change.drop, tuple(nested[:2])
    )  # fmt: skip


def known_prefix(
    keys: Collection[str],
    is_known: Callable[[Sequence[str]], bool],
    shapes: Sequence[str] | None = None,
) -> PrefixChange | None:
    """Return the prefix below which names are known; None: no prefix makes them known, or most of
    what is beside it is something else, as the vision tower beside a language model.

    `is_known` is asked about names without a prefix, one of each that differ in numbers only.
    `shapes` are the skeletons of the keys, where the caller has them.
    """
    shapes = skeletons(keys) if shapes is None else shapes
    alike = Counter(shapes)
    if len(alike) > KINDS:
        return None
    one_each = dict(zip(reversed(shapes), reversed([*keys]), strict=True))  # the first key of each
    count = {one_each[shape]: times for shape, times in alike.items()}
    heads: Counter[str] = Counter()
    for key, times in count.items():
        heads.update({head: times for head, _ in _divided(key)})
    known = [
        head
        for head, _ in _frequent(heads)
        if _is_plain(head) and is_known([end for key in count for end in _below(key, head)])
    ]
    strange = [key for key in count if not any(key.startswith(f"{head}.") for head in known)]
    if not known or sum(count[key] for key in strange) * STRANGE > len(keys):
        return None
    kept = {end for key in keys for end in _below(key, known[0])}
    rest = [key for key in keys if not key.startswith(f"{known[0]}.")]
    if any(key in kept for key in rest):
        return None
    return PrefixChange(known[0], "", len(kept), len(keys), _patterns(rest, kept))


def _below(key: str, head: str) -> Iterator[str]:
    """Yield the key without the head, if it begins with it."""
    if key.startswith(f"{head}."):
        yield key[len(head) + 1 :]


def averaged_model(keys: Collection[str]) -> PrefixChange | None:
    """Return the change for the state dict of torch's AveragedModel, an exponential moving average:
    the model below `module.`, and a counter beside it; None: the keys are of something else."""
    if COUNTER not in keys or len(keys) < 2:
        return None
    if not all(key.startswith(f"{AVERAGED}.") for key in keys if key != COUNTER):
        return None
    return PrefixChange(AVERAGED, "", len(keys) - 1, len(keys), (COUNTER,))


# ------------------------------------------------------------------ candidates


def _candidates(have: Collection[str], wanted: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (old prefix, new prefix), the likely ones of each kind first."""
    strips = Counter(head for name in have for head, end in _divided(name) if end in wanted)
    adds = Counter(head for name in wanted for head, end in _divided(name) if end in have)
    yield from ((old, "") for old, _ in _frequent(strips))
    yield from (("", new) for new, _ in _frequent(adds))
    heads_of: dict[str, list[str]] = {}
    for name in wanted:
        for head, end in _divided(name):
            heads_of.setdefault(end, []).append(head)
    both: Counter[tuple[str, str]] = Counter()
    for name in have:
        for head, end in _divided(name):
            others = heads_of.get(end, ())
            if len(others) <= SHARED_ENDS:
                both.update((head, other) for other in others if _last(head) != _last(other))
    yield from (pair for pair, _ in both.most_common(TRIED))


def _divided(name: str) -> Iterator[tuple[str, str]]:
    """Yield (prefix, end) for every dot among the first segments of a name."""
    at = -1
    for _ in range(DEPTH):
        at = name.find(".", at + 1)
        if at < 0:
            return
        yield name[:at], name[at + 1 :]


def _frequent(counts: Counter[str]) -> list[tuple[str, int]]:
    """Return the most frequent prefixes, of equally frequent ones the short ones first."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0].count(".")))[:TRIED]


def _changed(names: Collection[str], old: str, new: str) -> list[str]:
    """Return the names with `old` at their head replaced by `new`."""
    if not old:
        return [f"{new}.{name}" for name in names]
    head, other = f"{old}.", f"{new}." if new else ""
    return [other + name[len(head) :] if name.startswith(head) else name for name in names]


def _patterns(names: Collection[str], kept: Collection[str]) -> tuple[str, ...] | None:
    """Return globs that match these names and none of the `kept` ones; None: it takes too many."""
    heads = {name.partition(".")[0] for name in kept}
    patterns: dict[str, None] = {}
    for name in names:
        head, dot, _ = name.partition(".")
        patterns[f"{escape(head)}.*" if dot and head not in heads else escape(name)] = None
    if len(patterns) > DROPS or not all(map(_is_plain, patterns)):
        return None
    return tuple(patterns)


def _last(prefix: str) -> str:
    return prefix.rpartition(".")[2]


def _size(change: PrefixChange) -> int:
    return change.old.count(".") + change.new.count(".")


def _is_plain(text: str) -> bool:
    """Return whether a prefix can be pasted, and is no pattern."""
    return text.isprintable() and not any(char in "{}=" or char.isspace() for char in text)
