"""A library that some tests compare with: its tests are skipped where it is missing, their file's others run."""

from __future__ import annotations

from typing import Any

import pytest


class Library:
    """Stands for a module, which is imported when a test first uses it.

    bnb = Library("bitsandbytes")
    bnb.functional.quantize_4bit(w)  # skips the test where bitsandbytes is missing
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # whoever looks at a module's names uses nothing yet
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name), attribute)
