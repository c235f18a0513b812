"""`{**model, **optimizer}`: optimizer state in the dict of the weights is no weight, flattened or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckptmap


class Net(nn.Module):
    """A module called `state`, as a model may have one: its weight is no optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.state(x))  # type: ignore[no-any-return]


def trained() -> tuple[dict[str, Any], dict[str, Any], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(5, 4)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    return *get_state_dict(model, optimizer, options=flat), model, optimizer


@pytest.mark.parametrize("container", ["dcp", "full", "below"])
def test_weights_and_state_are_told_apart(container: str, tmp_path: Path) -> None:
    weights, state, *_ = trained()
    path = tmp_path / "run"
    if container == "dcp":
        save_dcp({**weights, **state}, checkpoint_id=path, no_dist=True)
    else:
        both = {**weights, **state}
        torch.save({"app": both, "step": 3} if container == "below" else both, path)
    with ckptmap.open(path) as ckpt:
        assert set(ckpt) == set(weights) and set(ckpt.optimizer) == set(weights)
        for fqn in weights:
            assert torch.equal(ckpt[fqn].read(), weights[fqn])
            moment = ckpt.optimizer[fqn]["exp_avg_sq"].read()
            assert torch.equal(moment, state[f"state.{fqn}.exp_avg_sq"])
    ckptmap.convert(path, tmp_path / "hf", to="hf", optimizer="drop")
    with ckptmap.open(tmp_path / "hf") as ckpt:
        assert set(ckpt) == set(weights), "moments were written as weights"
    ckptmap.convert(path, tmp_path / "out.pt", to="full", optimizer_keys="index")
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert ckptmap.verify(tmp_path / "out.pt", against=path).ok


def test_a_kept_layout_stays_one_dict(tmp_path: Path) -> None:
    weights, state, *_ = trained()
    torch.save(
        {f"module.{key}": value for key, value in weights.items()} | state, tmp_path / "a.pt"
    )
    ckptmap.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="full")
    assert set(torch.load(tmp_path / "b.pt", weights_only=True)) == {*weights, *state}


@pytest.mark.parametrize("keep", [True, False])
def test_what_an_optimizer_returns_among_the_weights(keep: bool, tmp_path: Path) -> None:
    """`{**model.state_dict(), **optimizer.state_dict()}`: its output was read back as another checkpoint."""
    *_, model, optimizer = trained()
    both = {**model.state_dict(), **optimizer.state_dict()}
    torch.save(both, tmp_path / "a.pt")
    with ckptmap.open(tmp_path / "a.pt") as ckpt:
        assert set(ckpt) == set(ckpt.optimizer) == set(model.state_dict())
    ckptmap.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="full", keep_layout=keep)
    assert ckptmap.verify(tmp_path / "b.pt", against=tmp_path / "a.pt").ok
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert set(found) == (set(both) if keep else {"model", "optimizer"})


def test_weights_of_modules_with_such_names_stay_weights(tmp_path: Path) -> None:
    """A weight is none of an optimizer because its name begins like one."""
    weights = {"state.a.weight": torch.ones(2), "param_groups.b.weight": torch.zeros(2)}
    torch.save(weights, tmp_path / "a.pt")
    with ckptmap.open(tmp_path / "a.pt") as ckpt:
        assert set(ckpt) == set(weights) and not len(ckpt.optimizer)
