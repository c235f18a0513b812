"""10 steps, or 5, a save, another process and 5: the same bits, for every optimizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.corpus.ranks import ROOT, run_ranks
from tests.live.resume_optimizers import ALL, ROUNDING

EAGER = {"CKPTMAP_TEST_EAGER": "1"}
MODULE = "tests.live.resume_exact"


def alone(part: str, folder: Path, names: str, mode: str, env: dict[str, str]) -> None:
    """One process without torch.distributed."""
    done = subprocess.run(
        [sys.executable, "-m", MODULE, part, str(folder), names, "plain", mode],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_one_process(tmp_path: Path) -> None:
    for part in ("first", "second"):
        alone(part, tmp_path, ",".join(ALL), "eager", EAGER)


def test_one_process_compiled(tmp_path: Path) -> None:
    """The step compiled by inductor: its random numbers are drawn in a kernel."""
    for part in ("first", "second"):
        alone(part, tmp_path, "ao8", "one-weight", {})


def test_fsdp2(tmp_path: Path) -> None:
    """Moments of the 79 rows are in codes on one of the two ranks and plain on the other."""
    names = "adamw,adamw-fused,sgd," + ",".join(ROUNDING)
    for part in ("first", "second"):
        args = [part, str(tmp_path), names, "fsdp2", "eager"]
        run_ranks(MODULE, 2, args, timeout=400, env=EAGER)


def test_fsdp2_compiled(tmp_path: Path) -> None:
    for part in ("first", "second"):
        args = [part, str(tmp_path), "ao8", "fsdp2", "one-weight"]
        run_ranks(MODULE, 2, args, timeout=400)


def test_another_world_size(tmp_path: Path) -> None:
    """Without stochastic rounding: equal to float32 summation tolerance."""
    for part, world in (("write", 2), ("read", 1), ("read", 4)):
        run_ranks("tests.live.resume_world", world, [part, str(tmp_path)], timeout=400)
