"""The table of tensors in `inspect` and `plan`: names that differ only in numbers share a line.

model.layers.{0..31}.self_attn.q_proj.weight  32x [4096, 4096] bfloat16 -> nf4
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptmap.core.columns import each
from ckptmap.core.formatting import fitted, human
from ckptmap.core.name_shapes import digit_masks, has_digits

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Matches a number that is a whole segment of a name."""


class TensorSummary(NamedTuple):
    """The columns of the table beside the name; thousands of tensors share one object.

    role       shown before the name unless it is "model"
    kind       the words of the column for dtype and encoding: ("bfloat16", "->", "nf4")
    fidelity   how well the plan keeps the values; "" for `inspect`
    """

    role: str
    shape: tuple[int, ...]
    kind: tuple[str, ...]
    fidelity: str
    nbytes: int


@dataclass
class KeyPattern:
    """Tensors with equal columns, except bytes, and with names that differ only in numbers."""

    first: str
    look: TensorSummary
    count: int
    nbytes: int
    numbers: list[set[str]]
    """The different numbers at each place of the pattern, as they are written in names."""

    @property
    def pattern(self) -> str:
        spans = iter([set(map(int, digits)) for digits in self.numbers])
        return NUMBER.sub(lambda match: _span(next(spans), match.group()), self.first)


def fold(
    names: Sequence[str], looks: Sequence[TensorSummary], masks: Sequence[str] | None = None
) -> list[KeyPattern]:
    """Return the patterns of the names, in order of first appearance.

    masks  the digit masks of the names, if the caller has them
    """
    number_of: dict[tuple[object, ...], int] = {}
    kinds = each(looks, lambda look: number_of.setdefault(look[:4], len(number_of)))
    by_mask = defaultdict[tuple[str, int], list[int]](list)
    masks = digit_masks(names) if masks is None else masks
    for index, key in enumerate(zip(masks, kinds, strict=True)):
        by_mask[key].append(index)
    found: dict[tuple[str, int], list[tuple[str, Sequence[int]]]] = {}
    for (mask, kind), at in by_mask.items():
        for pattern, some in _by_pattern(mask, names, at).items():
            found.setdefault((pattern, kind), []).append((mask, some))
    rows = sorted((min(at[0] for _, at in masked), masked) for masked in found.values())
    return [_folded(names, looks, first, masked) for first, masked in rows]


def _by_pattern(mask: str, names: Sequence[str], at: Sequence[int]) -> Mapping[str, Sequence[int]]:
    """Return the places of names of this mask by their patterns: names with NUL in place of numbers."""
    pattern = NUMBER.sub("\0", mask)
    if not has_digits(pattern):
        return {pattern: at}
    found: dict[str, list[int]] = {}
    for index in at:  # w1 and w2 have one mask
        found.setdefault(NUMBER.sub("\0", names[index]), []).append(index)
    return found


def _folded(
    names: Sequence[str],
    looks: Sequence[TensorSummary],
    first: int,
    masked: Sequence[tuple[str, Sequence[int]]],
) -> KeyPattern:
    """Return the pattern of names at these places, by their masks."""
    numbers: list[set[str]] = [set() for _ in NUMBER.finditer(names[first])]
    count = nbytes = 0
    for mask, at in masked:
        alike = [names[index] for index in at]
        for digits, place in zip(numbers, NUMBER.finditer(mask), strict=True):
            begin, end = place.span()
            digits.update([name[begin:end] for name in alike])
        count += len(at)
        nbytes += sum([looks[index][4] for index in at])
    return KeyPattern(names[first], looks[first], count, nbytes, numbers)


def _span(numbers: set[int], text: str) -> str:
    if len(numbers) == 1:
        return text
    low, high = min(numbers), max(numbers)
    dense = high - low + 1 == len(numbers)
    return f"{{{low}..{high}}}" if dense else f"{{{low}..{high}, {len(numbers)} of them}}"


FEW = 3
"""Up to this many keys with the same reason get a line each."""


def listed(title: str, reasons: Mapping[str, str]) -> list[str]:
    """Return lines of keys with their reasons.

    More than FEW keys share a line if their reasons and their first segments are equal.
    """
    keys_by_reason: dict[tuple[str, str], list[str]] = {}
    for key, reason in reasons.items():
        keys_by_reason.setdefault((key.partition(".")[0], reason), []).append(key)
    lines = []
    for (head, reason), keys in keys_by_reason.items():
        if len(keys) > FEW:
            lines.append(f"{title}: {keys[0]} and {len(keys) - 1} more of {head}: {reason}")
        else:
            lines += [f"{title}: {key}: {reason}" for key in keys]
    return lines


def renamed(origins: Mapping[str, Sequence[str]], stripped: bool) -> list[str]:
    """Return a line for each pattern of source keys and their new name, with `*` for numbers.

    `stripped` means that names differ only in removed segments: equal last segments are then shown
    as `{name}`.

        from: layers.*._orig_mod.{name} -> layers.*.{name}  288x
        from: layers.*.attn.q.weight + ... (3 in all) -> layers.*.attn.qkv.weight  32x
    """
    counts: dict[str, int] = {}
    for fqn, keys in origins.items():
        key = NUMBER.sub("*", keys[0]) if keys else "zeros"
        source, target = key, NUMBER.sub("*", fqn)
        if stripped:
            source, target = _without_tail(source, target)
        more = f" + ... ({len(keys)} in all)" if len(keys) > 1 else ""
        line = f"{source}{more} -> {target}"
        counts[line] = counts.get(line, 0) + 1
    return [f"from: {line}  {count}x" for line, count in counts.items()]


def _without_tail(key: str, name: str) -> tuple[str, str]:
    """Return both with their common last segments replaced by `{name}`."""
    old, new = key.split("."), name.split(".")
    while old and new and old[-1] == new[-1]:
        old.pop()
        new.pop()
    return ".".join([*old, "{name}"]), ".".join([*new, "{name}"])


def table(
    names: Sequence[str], looks: Sequence[TensorSummary], masks: Sequence[str] | None = None
) -> list[str]:
    """Return aligned lines: name, count, shape, kind, fidelity, size; see `fitted`. `masks` as those of `fold`."""
    cells = [
        (
            f"{g.look.role}: {g.pattern}" if g.look.role != "model" else g.pattern,
            f"{g.count}x",
            str(list(g.look.shape)),
            " ".join(g.look.kind),
            g.look.fidelity,
            human(g.nbytes),
        )
        for g in fold(names, looks, masks)
    ]
    if not cells:
        return []
    widths = [max(len(row[i]) for row in cells) for i in range(6)]
    tails = [
        "  ".join(
            cell.rjust(w) if i in (0, 4) else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row[1:], widths[1:], strict=True))
        ).rstrip()
        for row in cells
    ]
    return fitted([row[0] for row in cells], tails)
