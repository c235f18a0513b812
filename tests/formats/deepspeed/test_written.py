"""The same of what DeepSpeed writes here, where it is installed: every stage, number of ranks and dtype."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import ckptmap
from tests.golden import truth
from tests.golden.deepspeed.make_deepspeed import Run, write
from tests.support.same_tensors import assert_same

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
OPTIMIZERS = ("AdamW", "Momentum", "Adagrad", "SGD")


def _runs() -> list[Run]:
    runs = []
    for number, (stage, world, dtype) in enumerate(
        (stage, world, dtype)
        for stage in (1, 2, 3)
        for world in (1, 2, 3)
        for dtype in ("fp32", "bf16", "fp16")
    ):
        flags = {"frozen": number % 3 == 0, "tied": number % 2 == 0, "groups": 1 + number // 2 % 2}
        optimizer = OPTIMIZERS[number % 4]
        if optimizer == "Adagrad":
            flags["groups"] = 1  # DeepSpeed itself fails with more under stages 1 and 2
        runs.append(Run(f"z{stage}w{world}{dtype}", stage, world, dtype, optimizer, **flags))
    return runs


RUNS = _runs()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write(RUNS, folder)
    return folder


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_weights_and_moments(written: Path, run: Run) -> None:
    with ckptmap.open(written / run.name) as ckpt:
        weights = truth.weights(written / run.name)
        for name, value in weights.items():
            assert_same(ckpt[name].read().to(value.dtype), value, name)
        for name, value in truth.under("masters/", written / run.name).items():
            assert_same(ckpt[name].read(), value, name)
        for name, states in truth.moments(written / run.name).items():
            for state, value in states.items():
                assert_same(ckpt.optimizer[name][state].read(), value, f"{name} {state}")
        if run.tied:
            assert torch.equal(ckpt["head.weight"].read(), ckpt["embed.weight"].read())
