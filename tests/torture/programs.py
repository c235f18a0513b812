"""The kinds of torture by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.corpus import Corpus
from tests.torture.runner import Program

KINDS = ("mutants", "flips", "faults", "power")


def program(
    kind: str, corpus: Corpus, folder: Path, worlds: Sequence[int], only: str = ""
) -> Program:
    """Return the program of a kind; what it works on is made below `folder`.

    only  of mutants: a pattern, of which the name of a subject must match a part
    """
    place = folder / kind
    place.mkdir()
    if kind == "mutants":
        from tests.torture.framework_subjects import frameworks
        from tests.torture.mutants import Mutants
        from tests.torture.quantized_subjects import quantized
        from tests.torture.subjects import subjects

        found = [
            *subjects(corpus, place, worlds), *frameworks(corpus, place, worlds), *quantized(place)
        ]  # fmt: skip
        return Mutants([subject for subject in found if re.search(only, subject.name)], place)
    if kind == "flips":
        from tests.torture.flips import Flips

        return Flips(place)
    from tests.torture.faults import Faults
    from tests.torture.operations import operations, pushing
    from tests.torture.power import Power

    works = operations(corpus, place)
    return Faults([*works, pushing(place)], place) if kind == "faults" else Power(works)
