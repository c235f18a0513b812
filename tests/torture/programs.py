"""The kinds of torture by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.corpus import Corpus
from tests.torture.runner import Program

KINDS = ("mutants", "flips", "faults", "power")


def program(kind: str, corpus: Corpus, folder: Path, worlds: Sequence[int]) -> Program:
    """Return the program of a kind; what it works on is made below `folder`."""
    place = folder / kind
    place.mkdir()
    if kind == "mutants":
        from tests.torture.mutants import Mutants
        from tests.torture.subjects import subjects

        return Mutants(subjects(corpus, place, worlds), place)
    if kind == "flips":
        from tests.torture.flips import Flips

        return Flips(place)
    from tests.torture.faults import Faults
    from tests.torture.operations import operations, pushing
    from tests.torture.power import Power

    works = operations(corpus, place)
    return Faults([*works, pushing(place)], place) if kind == "faults" else Power(works)
