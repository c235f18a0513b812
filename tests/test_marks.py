"""The table of slow tests names tests that exist."""

from __future__ import annotations

from tests.support.marks import SLOW
from tests.support.paths import ROOT


def test_every_slow_test_exists() -> None:
    unknown = []
    for name in SLOW:
        path, _, function = name.partition("[")[0].partition("::")
        file = ROOT / "tests" / path
        if not file.is_file() or f"def {function or 'test_'}" not in file.read_text():
            unknown.append(name)
    assert not unknown, "no such tests: correct SLOW in tests/support/marks.py"
