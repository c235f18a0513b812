"""The five stories this project began with, run as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.corpus.ranks import ROOT, run_ranks

STORIES = {
    "int8_after_fsdp": "outputs differ by",
    "accelerate_compiled": "_orig_mod",
    "sr_under_fsdp2": "bit for bit the same after 10 steps",
    "nf4_under_ddp": "the same codes and scales on all ranks",
    "eight_bit_at_size": "the largest error of a moment",
}


@pytest.mark.parametrize("name", STORIES)
def test_example_resumes_on_two_ranks(name: str, tmp_path: Path) -> None:
    places = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    outputs = run_ranks(name, 2, [str(tmp_path / "out")], timeout=400, env=env)
    assert STORIES[name] in outputs[0].stdout, outputs[0].stdout
