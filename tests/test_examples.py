"""The examples run as they are: `make demo`, from training to the last comparison."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.ranks
def test_demo(tmp_path: Path) -> None:
    """In a copy, so that it writes its folder there; the demo itself fails on any difference. Its ranks
    share an import of torch."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    torchrun = [sys.executable, str(ROOT / "tests" / "support" / "torchrun.py")]
    program = "import sys, demo; demo.PROGRAMS['torchrun'] = sys.argv[1:]; sys.exit(demo.main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *torchrun], env=os.environ | {"PYTHONPATH": "examples"},
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit the same" in done.stdout
    result = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert result["kind"] == "NF4Tensor" and result["max_difference"] == 0.0
