"""State of optimizers other than torch's, in files of the form that DeepSpeed writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import CkptmapError
from tests.support.zero_files import write_zero

WEIGHTS = {
    "a.weight": torch.arange(15.0).reshape(5, 3),
    "b.weight": torch.arange(4.0).reshape(2, 2),
}
MOMENT = {"exp_avg": lambda vector: vector * 2, "exp_avg_sq": lambda vector: vector + 1}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5, bias=False), nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize("step", [{"step": 7}, {}, {"step": torch.tensor(7.0)}])
def test_the_count_is_a_number_or_that_of_the_group(tmp_path: Path, step: dict[str, Any]) -> None:
    """DeepSpeedCPUAdam keeps a plain number, FusedAdam one for the group."""
    path = write_zero(tmp_path / "step", WEIGHTS, 2, {**MOMENT, **step})
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    ckptmap.load(path, model, optimizer)
    for name, value in model.named_parameters():
        assert torch.equal(value.detach(), WEIGHTS[name])
        state = optimizer.state[value]
        assert float(state["step"]) == 7
        assert torch.equal(state["exp_avg"], WEIGHTS[name] * 2)
        assert torch.equal(state["exp_avg_sq"], WEIGHTS[name] + 1)


def test_state_that_is_nothing(tmp_path: Path) -> None:
    """SGD without momentum noted a buffer of None."""
    path = write_zero(tmp_path / "step", WEIGHTS, 3, {"momentum_buffer": None})
    with ckptmap.open(path) as ckpt:
        assert ckpt.optimizer_values["a.weight"] == {"momentum_buffer": None, "step": 7}
    ckptmap.convert(path, tmp_path / "out.pt", to="full")


ODD = {
    "codes of 8 bits": {"state1": lambda v: v.to(torch.uint8), "absmax1": torch.ones(1)},
    "factors": {"row": torch.ones(5), **MOMENT},
    "another length": {"exp_avg": lambda v: torch.cat([v, v])},
    "one that differs": {"d": lambda v: float(v.sum())},
}


@pytest.mark.parametrize("state", ODD.values(), ids=ODD)
def test_state_that_means_nothing_for_a_parameter(tmp_path: Path, state: dict[str, Any]) -> None:
    """The weights are read all the same; a conversion that would lose the state says so first."""
    path = write_zero(tmp_path / "step", WEIGHTS, 2, state)
    with ckptmap.open(path) as ckpt:
        assert torch.equal(ckpt["a.weight"].read(), WEIGHTS["a.weight"])
        assert any(note.startswith("optimizer state cannot be read") for note in ckpt.notes)
    with pytest.raises(CkptmapError) as raised:
        ckptmap.convert(path, tmp_path / "out.pt", to="full")
    assert "--optimizer drop" in raised.value.hint
    ckptmap.convert(path, tmp_path / "out.pt", to="full", optimizer="drop")


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("numels", [(1,), (2, 1), (5, 3, 1), (1, 1, 1, 30)])
def test_more_ranks_than_elements(tmp_path: Path, world: int, numels: tuple[int, ...]) -> None:
    """Then ranks hold padding alone, which the weights in the files lack and the state has."""
    tensors = {f"p{at}.weight": torch.rand(1, numel, 1) for at, numel in enumerate(numels)}
    share = -(-sum(numels) // (2 * world)) * 2

    def padded(vector: torch.Tensor) -> torch.Tensor:
        return torch.cat([vector * 3, torch.full((share - vector.numel(),), torch.nan)])

    path = write_zero(tmp_path / "step", tensors, world, {"exp_avg": padded})
    with ckptmap.open(path) as ckpt:
        for name, value in tensors.items():
            assert torch.equal(ckpt[name].read(), value)
            assert torch.equal(ckpt.optimizer[name]["exp_avg"].read(), value * 3)
