"""Names that differ in digits alone, told apart without a search in each.

    layers.0.w, layers.12.w, layers.13.w  ->  layers.0.w, layers.11.w, layers.11.w

A checkpoint has 100,000 names and a few hundred such masks. What replaces whole numbers by a sign is asked of
a mask once: a name has the same numbers at the same places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

_MASK = str.maketrans("23456789", "1" * 8)
_BYTES = bytes.maketrans(b"23456789", b"1" * 8)
_DIGIT = re.compile("[01]")


def digit_masks(names: Collection[str]) -> Sequence[str]:
    """Return each name with 1 in place of each digit but 0; the last names are not looked through again."""
    return _digit_masks(tuple(names))


@lru_cache(maxsize=1)
def _digit_masks(names: tuple[str, ...]) -> Sequence[str]:
    text = "\n".join(names).encode("utf-8", "surrogatepass")
    masks = text.translate(_BYTES).decode("utf-8", "surrogatepass").split("\n")
    if len(masks) != len(names):  # a name has a line feed in it, or there is none
        return [name.translate(_MASK) for name in names]
    return masks


def has_digits(pattern: str) -> bool:
    """Return whether there are digits left in a mask whose numbers were replaced: names of it may differ there."""
    return _DIGIT.search(pattern) is not None


def without_numbers(names: Collection[str], replaced: Callable[[str], str]) -> list[str]:
    """Return `replaced(name)` for each name.

    replaced  puts a sign in the place of numbers, and looks at digits only for being one, or being 0
    """
    masks = digit_masks(names)
    made = {mask: replaced(mask) for mask in {*masks}}
    mixed = {mask for mask, text in made.items() if has_digits(text)}  # w1 and w2 have one mask
    if not mixed:
        return list(map(made.__getitem__, masks))
    return [
        replaced(name) if mask in mixed else made[mask]
        for name, mask in zip(names, masks, strict=True)
    ]
