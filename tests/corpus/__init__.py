"""Checkpoints that the real writers make during the test run, with their independent truth.

`CASES` is the static table by name to parametrize with; importing it builds nothing. The `corpus`
fixture builds all cases of a world size in one spawn when the first of them is asked for:

    @pytest.mark.parametrize("name", names(container="dcp"))
    def test_reads(corpus: Corpus, name: str) -> None:
        case = corpus[name]          # .path .truth .optimizer .spec
"""

from __future__ import annotations

from tests.corpus import (  # noqa: F401 - they register their cases
    writers_accelerate,
    writers_ddp,
    writers_fsdp1,
    writers_fsdp1_local,
    writers_fsdp2,
    writers_hf,
    writers_mesh,
    writers_nf4,
    writers_optimizer,
    writers_single,
    writers_torchao,
)
from tests.corpus.case import CASES, Case, Spec, names
from tests.corpus.library import Corpus

__all__ = ["CASES", "Case", "Corpus", "Spec", "names"]
