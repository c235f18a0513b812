"""7 steps give the same bits as 4 steps, a save, another process and 3 more, for every optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.ranks import run_alone, run_ranks
from tests.support.resume_optimizers import ALL, LOW_BIT, ROUNDING, TORCH

EAGER = {"CKPTMAP_TEST_EAGER": "1"}
TRACED = {"CKPTMAP_TEST_BACKEND": "aot_eager"}
MODULE = "tests.ranks.resume_exact"


def alone(part: str, folder: Path, names: str, mode: str, env: dict[str, str]) -> None:
    """One process without torch.distributed."""
    run_alone(MODULE, [part, str(folder), names, "plain", mode], timeout=400, env=env)


def test_one_process(tmp_path: Path) -> None:
    """All but bitsandbytes' RMSprop8bit, which makes NaN of this model by itself."""
    names = ",".join(name for name in ALL if name != "rmsprop8")
    for part in ("first", "second"):
        alone(part, tmp_path, names, "eager", EAGER)


@pytest.mark.parametrize("env", [EAGER, TRACED], ids=["eager", "traced"])
def test_every_low_bit_optimizer(env: dict[str, str], tmp_path: Path) -> None:
    """Eager, and model and step traced and functionalised as for every compiler, by one that leaves
    the kernels alone: inductor takes ten seconds for each of them. Those of ROUNDING, which complete
    them, are in the tests around."""
    for part in ("first", "second"):
        alone(part, tmp_path, ",".join(LOW_BIT), "one-weight-compiled", env)


def test_one_process_compiled(tmp_path: Path) -> None:
    """Model and step compiled by inductor, once for each form of the moments: random numbers are
    drawn in a kernel."""
    for part in ("first", "second"):
        alone(part, tmp_path, ",".join(ROUNDING), "one-weight-compiled", {})


def test_fsdp2(tmp_path: Path) -> None:
    """Moments of the 79 rows are in codes on one of the two ranks and plain on the other. All of
    torch but Adafactor, which cannot step with DTensors."""
    names = ",".join(name for name in (*TORCH, *ROUNDING) if name != "adafactor")
    for part in ("first", "second"):
        args = [part, str(tmp_path), names, "fsdp2", "eager"]
        run_ranks(MODULE, 2, args, timeout=400, env=EAGER)


def test_fsdp1(tmp_path: Path) -> None:
    """Blocks of codes straddle the parameters of a flat shard; both use_orig_params. RMSprop's and
    Adagrad's state is cut by what a probe shows; Adagrad counts no step where a shard is empty."""
    for part in ("first", "second"):
        args = [
            part,
            str(tmp_path),
            "ao8,ao4,bnb8,lion8,rmsprop,adagrad",
            "fsdp1,fsdp1-flat",
            "eager",
        ]
        run_ranks(MODULE, 2, args, timeout=400, env=EAGER)


@pytest.mark.parametrize(
    ("names", "env"), [("ao8", {}), ("ao,ao4,aofp8", TRACED)], ids=["inductor", "traced"]
)
def test_fsdp2_compiled(names: str, env: dict[str, str], tmp_path: Path) -> None:
    for part in ("first", "second"):
        args = [part, str(tmp_path), names, "fsdp2", "one-weight"]
        run_ranks(MODULE, 2, args, timeout=400, env=env)


def test_another_world_size(tmp_path: Path) -> None:
    """Without stochastic rounding: equal to float32 summation tolerance."""
    for part, world in (("write", 2), ("read", 1), ("read", 4)):
        run_ranks("tests.ranks.resume_world", world, [part, str(tmp_path)], timeout=400)
