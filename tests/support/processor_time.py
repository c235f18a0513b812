"""The processor seconds that the tests take: a summary at the end of the run. Nothing is asserted of them.

They hardly depend on what else the machine does, unlike the seconds of a clock. A process that a test
starts counts for that test once it has ended; so does a rank, which a server has forked.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from typing import Any

import pytest

SLOW_S = 1.5
"""A test that takes more processor seconds than this, its fixtures not counted, should be `slow`."""
TEST, CALL = "processor_s", "processor_s_of_call"
"""Properties of a test's report, which `--junitxml` writes, too: with its fixtures, and without."""
MARKS = frozenset({"ranks", "slow"})
"""The marks of the tests that `make test-fast` leaves out."""


def processor_s() -> float:
    """Return the processor seconds of this process, and of its children and ranks that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ranks = sys.modules.get("tests.corpus.ranks")  # it imports torch: not before a test does
    of_ranks = 0.0 if ranks is None else ranks.processor_s
    return sum(one.ru_utime + one.ru_stime for one in used) + of_ranks


class ProcessorTime:
    """Plugin: measures each test in the process that runs it; its report carries what it took."""

    def __init__(self) -> None:
        self._started_s = 0.0
        self._tests_s: dict[str, float] = {}
        self._slow_s: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Note when the test begins."""
        self._started_s = processor_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Measure the test without its fixtures."""
        before = processor_s()
        try:
            return (yield)
        finally:
            item.user_properties.append((CALL, round(processor_s() - before, 3)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Measure the test with its fixtures."""
        report: Any = yield
        if call.when == "teardown":
            report.user_properties.append((TEST, round(processor_s() - self._started_s, 3)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what the test took, and whether it should be marked as slow."""
        taken = dict(report.user_properties)
        if TEST in taken:
            self._tests_s[report.nodeid] = taken[TEST]
            if taken.get(CALL, 0) > SLOW_S and report.keywords.keys().isdisjoint(MARKS):
                self._slow_s[report.nodeid] = taken[CALL]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the sum, and the tests that are slow without the mark."""
        all_s, tests_s = processor_s(), sum(self._tests_s.values())
        terminalreporter.section("processor time")
        terminalreporter.line(
            f"{all_s:.0f} s: {tests_s:.0f} s in tests, {all_s - tests_s:.0f} s to collect them, to "
            "import what ranks need, and to report"
        )
        for test, taken_s in sorted(self._slow_s.items(), key=lambda item: -item[1]):
            terminalreporter.line(
                f"{test} took {taken_s:.1f} s, expected at most {SLOW_S:g} s: make it faster, "
                "or add it to SLOW in tests/support/marks.py"
            )
