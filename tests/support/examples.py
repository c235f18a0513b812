"""How many examples hypothesis tries in a test: all of them, or a part in the quick run."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

USUAL = 100
"""What hypothesis tries by default, and so does the profile `ckptmap` (tests/conftest.py)."""
FEWEST = 3


def examples(number: int, **options: Any) -> settings:
    """Return settings for `number` examples, of which a profile with fewer than `USUAL` tries its part."""
    part = number * settings().max_examples // USUAL
    return settings(max_examples=max(part, min(number, FEWEST)), **options)
