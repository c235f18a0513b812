"""What 3, 5 and 8 real ranks saved, in every form, is the same model with the same moments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from tests.corpus.models import tiny
from tests.corpus.ranks import run_ranks
from tests.corpus.writers_worlds import SMALL
from tests.support.same_tensors import assert_same

WORLDS = (3, 5, 8)
FORMS = ("dcp", "dtensor", "sharded", "flat", "named")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    folder = tmp_path_factory.mktemp("worlds")

    def get(world: int) -> Path:
        out = folder / str(world)
        if not out.exists():
            run_ranks("tests.corpus.writers_worlds", world, ["--out", str(out)], timeout=240)
        return out

    return get


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("form", FORMS)
def test_weights_and_moments(
    form: str, world: int, worlds: Callable[[int], Path], tmp_path: Path
) -> None:
    """As they are, and in one file by way of a plan."""
    folder = worlds(world)
    truth = torch.load(folder / f"{'fsdp2' if form in FORMS[:2] else 'fsdp1'}.truth")
    like = tmp_path / "like.pt"
    torch.save(dict(tiny(SMALL).state_dict()), like)
    with ckptmap.open(folder / form, like=like) as ckpt:
        assert ckpt.world_size == world
        check(ckpt, truth)
        ckptmap.convert(ckpt, tmp_path / "full.pt", to="full")
    with ckptmap.open(tmp_path / "full.pt") as back:
        check(back, truth)


def check(ckpt: ckptmap.Checkpoint, truth: dict[str, dict[str, Any]]) -> None:
    assert set(ckpt) == set(truth["model"])
    for fqn, value in truth["model"].items():
        assert_same(ckpt[fqn].read(), value, fqn)
    assert set(ckpt.optimizer) == set(truth["optimizer"])
    for fqn, states in truth["optimizer"].items():
        assert set(ckpt.optimizer[fqn]) == set(states)
        for name, value in states.items():
            assert_same(ckpt.optimizer[fqn][name].read(), value, f"{fqn} {name}")
