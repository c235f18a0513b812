"""The built cases by name, one spawn a world size, built when first asked for."""

from __future__ import annotations

from pathlib import Path

from tests.corpus.case import CASES, Case
from tests.corpus.ranks import RanksError, run_ranks

TIMEOUT_S = 240.0
"""Of one spawn: many times what it takes on two idle cores, as others may be at work."""


class Corpus:
    """`corpus["fsdp2_dcp_w2"] -> Case`; a failed build is reported for each case, not repeated."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[int, Path | RanksError] = {}
        self._cases: dict[str, Case] = {}

    def __getitem__(self, name: str) -> Case:
        if name not in self._cases:
            spec = CASES[name]
            self._cases[name] = Case(spec, self.world(spec.world_size))
        return self._cases[name]

    def world(self, world_size: int) -> Path:
        """The folder with all cases of that world size."""
        if world_size not in self._built:
            self._built[world_size] = self._build(world_size)
        built = self._built[world_size]
        if isinstance(built, RanksError):
            raise built
        return built

    def _build(self, world_size: int) -> Path | RanksError:
        out = self._folder / f"world{world_size}"
        try:
            run_ranks("tests.corpus.build", world_size, ["--out", str(out)], TIMEOUT_S)
        except RanksError as error:
            return error
        return out
