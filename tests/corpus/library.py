"""The built cases by name: one start of ranks for each world size, when it is first asked for."""

from __future__ import annotations

from pathlib import Path

from tests.corpus.case import CASES, Case
from tests.corpus.ranks import run_ranks
from tests.corpus.shared import Shared

TIMEOUT_S = 240.0
"""Of one start: many times what it takes on two idle cores, as others may be at work."""


class Corpus:
    """`corpus["fsdp2_dcp_w2"] -> Case`; a failed build is reported for each case, not repeated."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._cases: dict[str, Case] = {}

    def __getitem__(self, name: str) -> Case:
        if name not in self._cases:
            spec = CASES[name]
            self._cases[name] = Case(spec, self.world(spec.world_size))
        return self._cases[name]

    def world(self, world_size: int) -> Path:
        """Return the folder with all cases of that world size."""

        def fill(folder: Path) -> None:
            run_ranks("tests.corpus.build", world_size, ["--out", str(folder)], TIMEOUT_S)

        return self._shared(f"corpus/world{world_size}", fill)

    def local(self, table: str, name: str) -> Path:
        """Return one case of the tables that `tests.corpus.build_local` builds: 2 ranks of FSDP1."""

        def fill(folder: Path) -> None:
            args = ["--out", str(folder), "--table", table, "--only", name]
            run_ranks("tests.corpus.build_local", 2, args, TIMEOUT_S)

        return self._shared(f"corpus/{table}/{name}", fill) / name
