"""A share of the torture: few cases of each kind, by seeds that do not change. `make torture` runs more."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptmap
from tests.corpus import Corpus
from tests.torture.programs import program
from tests.torture.runner import Outcome, run

SHARE = {"mutants": 60, "flips": 50, "faults": 40, "power": 40}
SEED = 16


@pytest.mark.parametrize("kind", SHARE)
def test_nothing_is_found(kind: str, corpus: Corpus, tmp_path: Path) -> None:
    made = program(kind, corpus, tmp_path, worlds=(1,))
    tally = run(made, SEED, range(SHARE[kind]), tmp_path, " --alone")
    assert tally.findings == [], tally
    assert tally.results.total() == SHARE[kind]


def test_a_verify_that_finds_nothing_is_found(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = program("flips", corpus, tmp_path, worlds=(1,))
    ok = ckptmap.verify(made.paths[0])  # type: ignore[attr-defined]
    monkeypatch.setattr(ckptmap, "verify", lambda path: ok)
    tally = run(made, SEED, range(3), tmp_path)
    assert tally.results == {"missed": 3}
    assert tally.findings[0].replay == f"python -m tests.torture flips --seed {SEED} --case 0"


class Kind:
    """Ends in a way that is no outcome."""

    name = "kind"
    good = frozenset({"fine"})

    def __init__(self, how: str) -> None:
        self.how = how

    def case(self, draw: random.Random, folder: Path) -> Iterator[Outcome]:
        yield Outcome("begun", "subject", "label")
        if self.how == "died":
            os._exit(3)
        if self.how == "memory":
            bytearray(1 << 30)  # more than what the process may have freed before
        if self.how == "torture-error":
            raise KeyError("x")
        while self.how == "hang":
            pass
        yield Outcome("fine", "subject", "label")


def test_a_case_that_waits_hangs_and_the_next_ones_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waits(Kind):
        def case(self, draw: random.Random, folder: Path) -> Iterator[Outcome]:
            yield Outcome("begun", "subject", folder.name)
            if folder.name == "case-1":
                os.read(os.pipe()[0], 1)
            yield Outcome("fine", "subject", folder.name)

    monkeypatch.setattr("tests.torture.runner.IDLE_S", 0.2)
    tally = run(Waits("waits"), 1, range(3), tmp_path)
    assert tally.results == {"fine": 2, "hang": 1}
    assert tally.findings[0].outcome.label == "case-1"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["fine", "died", "memory", "torture-error", "hang"])
def test_a_case_that_does_not_end_well_is_a_finding(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "hang":  # the others may be slow on a busy machine
        monkeypatch.setattr("tests.torture.runner.CPU_S", 1)
    monkeypatch.setattr("tests.torture.runner.GROWTH", 32 << 20)
    tally = run(Kind(how), 1, [0], tmp_path)
    assert tally.results == {how: 1}
    assert len(tally.findings) == (how != "fine")
