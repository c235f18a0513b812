"""torch loads our outputs into a live FSDP1 model, under FULL and SHARDED_STATE_DICT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptmap
from tests.corpus import Corpus
from tests.corpus.ranks import run_ranks


@pytest.mark.parametrize(("name", "world_size"), [("torch_plain", 4), ("fsdp2_dcp_w2", 2)])
def test_full_and_sharded(name: str, world_size: int, corpus: Corpus, tmp_path: Path) -> None:
    case = corpus[name]
    ckptmap.convert(case.path, tmp_path / "full.pt", to="full", optimizer="drop")
    ckptmap.convert(case.path, tmp_path / "dcp", to="fsdp1", world_size=3, optimizer="drop")
    torch.save(case.truth, tmp_path / "truth.pt")
    files = [str(tmp_path / name) for name in ("full.pt", "dcp", "truth.pt")]
    outputs = run_ranks("tests.ranks.fsdp1", world_size, files, timeout=120)
    assert all("same" in output.stdout for output in outputs)


def test_a_flat_parameter_of_parameters_that_were_not_stepped_alike(tmp_path: Path) -> None:
    """What was not stepped begins anew alone, and different step counts are said."""
    run_ranks("tests.ranks.fsdp1_unlike_steps", 2, [str(tmp_path)], timeout=120)
