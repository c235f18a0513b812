"""Parameters are sharded and buffers are not: what a checkpoint shows of which tensor is which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptmap
from ckptmap.formats.torch_save.reader import load
from ckptmap.sharding.dtensor_spec import is_dtensor
from ckptmap.sharding.sharded_tensor_spec import is_sharded
from ckptmap.storage.files import Files

BUFFERS = {"table", "row"}


class Gated(nn.Module):
    """A parameter and two float buffers whose names say nothing, one of them a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.arange(6.0))
        self.register_buffer("table", torch.arange(8.0).reshape(4, 2))
        self.register_buffer("row", torch.arange(6.0).reshape(1, 6))
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 3)
        self.third = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x * self.gate) + self.get_buffer("row"))
        return self.third(hidden).sum()  # type: ignore[no-any-return]


def save_trained(path: Path, *, frozen: bool = False) -> Path:
    model = Gated()
    model.first.weight.requires_grad_(not frozen)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    model(torch.ones(2, 6)).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def stored(file: Path) -> dict[str, Any]:
    """The model's values as they are pickled, by key."""
    tree: dict[str, Any] = load(Files(), str(file)).tree
    found: dict[str, Any] = tree.get("model", tree)
    return found


def plain_ones(path: Path) -> set[str]:
    """What is no DTensor in the first rank's file."""
    return {
        k for k, v in stored(path / "model_world_size_2_rank_0.pt").items() if not is_dtensor(v)
    }


def test_a_tensor_without_optimizer_state_is_a_buffer(tmp_path: Path) -> None:
    source = save_trained(tmp_path / "a.pt")
    ckptmap.convert(source, tmp_path / "ranks", to="fsdp2-ranks", world_size=2)
    assert plain_ones(tmp_path / "ranks") == BUFFERS
    ckptmap.convert(source, tmp_path / "flat", to="fsdp1-local", world_size=2, optimizer="drop")
    found = stored(tmp_path / "flat" / "model_world_size_2_rank_0.pt")
    assert set(found) == {"_flat_param", *BUFFERS} and is_sharded(found["_flat_param"])
    assert [found[name].info.shape for name in sorted(BUFFERS)] == [(1, 6), (4, 2)]


def test_a_frozen_parameter_is_not_taken_for_a_buffer(tmp_path: Path) -> None:
    """The optimizer lists no frozen parameter, so only names could tell a buffer, and these do not."""
    source = save_trained(tmp_path / "a.pt", frozen=True)
    ckptmap.convert(source, tmp_path / "ranks", to="fsdp2-ranks", world_size=2, optimizer="drop")
    assert plain_ones(tmp_path / "ranks") == set()


@pytest.mark.parametrize("orig", [True, False])
def test_a_tensor_inside_a_flat_parameter_is_no_buffer(orig: bool, tmp_path: Path) -> None:
    """`gate` lies in the shard of one rank, whole as a buffer does; to DTensors and back to FSDP1."""
    source = save_trained(tmp_path / "a.pt")
    made: dict[str, Any] = {
        "to": "fsdp1-local",
        "world_size": 2,
        "use_orig_params": orig,
        "optimizer": "drop",
    }
    ckptmap.convert(source, tmp_path / "flat", **made)
    with ckptmap.open(tmp_path / "flat") as ckpt:
        assert [len(p.chunks) for p in ckpt["gate"].parts.values()] == [1]
    ckptmap.convert(tmp_path / "flat", tmp_path / "ranks", to="fsdp2-ranks")
    assert plain_ones(tmp_path / "ranks") == BUFFERS
    ckptmap.convert(tmp_path / "ranks", tmp_path / "again", like=str(source), **made)
    with ckptmap.open(tmp_path / "again") as ckpt:
        for name, value in Gated().named_buffers():
            assert torch.equal(ckpt[name].read(), value), name
