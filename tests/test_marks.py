"""The table of slow tests names tests that exist."""

from __future__ import annotations

import pytest

from tests.support.marks import SLOW
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", sorted(SLOW))
def test_a_slow_test_exists(name: str) -> None:
    path, _, function = name.partition("[")[0].partition("::")
    file = ROOT / "tests" / path
    assert file.is_file(), f"{name}: no such file; correct SLOW in tests/support/marks.py"
    assert f"def {function or 'test_'}" in file.read_text(), f"{name}: no such test; correct SLOW"
