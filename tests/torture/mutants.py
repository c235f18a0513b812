"""Mutants: a checkpoint is changed, then converted; the formats' own libraries say what it now holds.

refused   ckptmap said no, by a code that `ckptmap explain` knows
equal     the output holds what the reference reader finds in the mutant
harmless  the reference refuses the mutant, and the output is that of the original
silent    the output is neither: wrong values, and nobody was told
unreadable  no library reads the output
stuck     state of an earlier run stopped the work, though it could begin anew
internal  an error that is none of ours
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.torture.readers import Content
from tests.torture.runner import Outcome, forked, refusal
from tests.torture.subjects import Subject


class Mutants:
    name = "mutants"
    good = frozenset({"refused", "equal", "harmless"})

    def __init__(self, subjects: Sequence[Subject], folder: Path) -> None:
        """Convert every subject as it is: what the oracle does not know, it cannot judge."""
        self.subjects = subjects
        self.whole: dict[str, Content] = {}
        for subject in subjects:
            dst = folder / f"whole-{subject.name}"
            path = copied(subject, folder / f"copy-{subject.name}")
            subject.work(path, dst)
            self.whole[subject.name] = subject.result(dst)
            if subject.read is not None and subject.read(path) != self.whole[subject.name]:
                raise AssertionError(f"{subject.name}: its reader does not give what it holds")

    def case(self, draw: random.Random, folder: Path) -> Iterator[Outcome]:
        subject = draw.choice(self.subjects)
        path = copied(subject, folder / "mutant")
        label = subject.mutate(draw, path)
        yield Outcome("begun", subject.name, label)
        result, text = self.judged(subject, path, folder / "converted")
        yield Outcome(result, subject.name, label, text)

    def judged(self, subject: Subject, path: Path, dst: Path) -> tuple[str, str]:
        try:
            subject.work(path, dst)
        except Exception as error:
            result, text = refusal(error)
            return ("stuck" if subject.settled and result == "refused" else result), text
        whole = self.whole[subject.name]
        try:
            made = subject.result(dst)
        except Exception as error:
            return "unreadable", f"the output: {type(error).__name__}: {str(error)[:200]}"
        if subject.read is None:
            return ("equal", "") if made == whole else ("silent", difference(made, whole))
        truth = forked(lambda: compared(subject, path, made))  # a library may crash
        if truth.result in ("equal", "silent"):
            return truth.result, truth.text
        if holds_no_more(made, whole):
            return "harmless", truth.text
        return "silent", f"its own library: {truth.text}; {difference(made, whole)}"


def compared(subject: Subject, path: Path, made: Content) -> Iterator[Outcome]:
    """Compare what was made of a mutant with what the formats' own library reads."""
    assert subject.read is not None
    try:
        truth = subject.read(path)
    except BaseException as error:  # of DCP
        yield Outcome("refused", "", "", f"{type(error).__name__}: {str(error)[:200]}")
    else:
        result = "equal" if made == truth else "silent"
        yield Outcome(result, "", "", difference(made, truth))


def holds_no_more(made: Content, whole: Content) -> bool:
    """Return whether all of `whole` is there, and beside it the same tensors by other names at most."""
    known = {entry[1:] for entry in whole}
    return not whole - made and all(entry[1:] in known for entry in made - whole)


def copied(subject: Subject, to: Path) -> Path:
    """Copy a subject's path, links and times included."""
    to.mkdir()
    at = to / subject.path.name
    if subject.path.is_dir():
        shutil.copytree(subject.path, at, symlinks=True)
    else:
        shutil.copy2(subject.path, at)
    return at


def difference(made: Content, wanted: Content) -> str:
    more, fewer = sorted(made - wanted), sorted(wanted - made)
    return f"made {more[:2]}, expected {fewer[:2]} ({len(more)} and {len(fewer)})"
