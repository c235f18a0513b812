"""A chain of saves and loads over every wrapping and mode keeps weights and fp32 moments bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptmap
from tests.corpus.ranks import run_ranks
from tests.support.resume_model import net, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`truth.pt` and, as `start`, the same saved by ckptmap from one plain process."""
    path = tmp_path_factory.mktemp("grid")
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, 2)
    state = {  # a tied weight has it once, by its first name
        name: dict(optimizer.state[param]) for name, param in model.named_parameters()
    }
    assert "embed.weight" in state and "head.weight" not in state
    torch.save({"model": model.state_dict(), "state": state}, path / "truth.pt")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "torch.pt"
    )
    ckptmap.save(path / "start", model, optimizer).wait()
    return path


@pytest.mark.parametrize(
    ("world", "start"), [(1, "torch.pt"), (2, "start"), (3, "start"), (4, "start")]
)
def test_every_wrapping_and_mode(world: int, start: str, folder: Path) -> None:
    run_ranks("tests.ranks.resume_grid", world, [str(folder), start], timeout=400)
    saved = sorted(path.name for path in (folder / f"world{world}").iterdir())
    count = 6 * 4 if world in (1, 4) else 6 * 2  # with 2 ranks one half, with 3 the other
    assert len([name for name in saved if not name.startswith(".")]) == count
    assert not [name for name in saved if name.startswith(".")]  # no lock, no work directory
