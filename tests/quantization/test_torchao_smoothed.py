"""Weights that torchao's SmoothQuant divides the columns of: their values are codes times scales times the factors.

The activations are multiplied by the same factors, so that codes and scales alone are another weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.prototype.smoothquant import SmoothQuantConfig
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    PerRow,
    quantize_,
)

import ckptmap
from ckptmap.errors import CkptmapError
from tests.support.bnb_cases import same

NAME = "fc.weight"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def smoothed() -> Any:
    """Calibrated on activations of which some columns are large."""
    torch.manual_seed(1)
    model, config = Net(), Int8DynamicActivationInt8WeightConfig(version=2)
    quantize_(model, SmoothQuantConfig(config, "prepare"))
    for _ in range(3):
        model.fc(torch.randn(8, 64, dtype=torch.bfloat16) * torch.linspace(0.1, 30, 64).bfloat16())
    quantize_(model, SmoothQuantConfig(config, "convert"))
    assert model.fc.weight.act_pre_scale is not None
    return model


def truth(model: Any) -> torch.Tensor:
    """The weight that x is multiplied by: F.linear(x * factors, w) = F.linear(x, w * factors)."""
    weight = model.fc.weight
    wide = weight.qdata.float() * weight.scale * weight.act_pre_scale.float()
    return wide.to(torch.bfloat16)


@pytest.fixture(params=["pickled", "flattened"])
def stored(request: pytest.FixtureRequest, smoothed: Any, tmp_path: Path) -> Path:
    state = smoothed.state_dict()
    if request.param == "pickled":
        torch.save(state, tmp_path / "in.pt")
        return tmp_path / "in.pt"
    tensors, metadata = flatten_tensor_state_dict(state)
    save_file(tensors, tmp_path / "in.safetensors", metadata)
    return tmp_path / "in.safetensors"


def test_values_are_those_that_the_layer_multiplies_by(
    stored: Path, smoothed: Any, tmp_path: Path
) -> None:
    wanted = truth(smoothed)
    with ckptmap.open(stored) as ckpt:
        same(ckpt[NAME].read(), wanted)
        same(ckpt[NAME][5:40, 3:61], wanted[5:40, 3:61])
    report = ckptmap.convert(stored, tmp_path / "out.pt", to="full-bf16")
    same(torch.load(tmp_path / "out.pt")[NAME], wanted)
    assert not [line for line in str(report).splitlines() if "act_pre_scale" in line]
    model = Net().requires_grad_(False)
    assert not ckptmap.load(stored, model).encoded
    same(model.fc.weight, wanted)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    wide = smoothed.fc(x).float()
    assert float((model.fc(x).float() - wide).norm() / wide.norm()) < 0.03


@pytest.mark.parametrize("suffix", ["ct-int8", "bnb-int8", "int8"])
def test_codes_alone_are_no_codes_of_the_weight(
    suffix: str, stored: Path, smoothed: Any, tmp_path: Path
) -> None:
    """They are quantized anew, from the values; torchao's int8 without the factors is another form, too."""
    if suffix == "int8":  # it is stored so already, and stays as it is
        ckptmap.convert(stored, tmp_path / "out", to="hf")
    else:
        report = ckptmap.convert(stored, tmp_path / "out", to=f"hf-{suffix}", encode=(NAME,))
        assert report.fidelity == {"requantize": 1}
    with ckptmap.open(tmp_path / "out") as ckpt:
        got, wanted = ckpt[NAME].read().float(), truth(smoothed).float()
    assert float((got - wanted).norm() / wanted.norm()) < 0.02


def test_factors_are_not_made_anew(stored: Path, tmp_path: Path) -> None:
    ckptmap.convert(stored, tmp_path / "release", to="full")
    torch.save({NAME: torch.randn(48, 64, dtype=torch.bfloat16)}, tmp_path / "trained.pt")
    with pytest.raises(CkptmapError, match="act_pre_scale"):
        ckptmap.convert(tmp_path / "trained.pt", tmp_path / "as", as_=tmp_path / "release")


def test_too_few_factors_are_damage(smoothed: Any, tmp_path: Path) -> None:
    tensors, metadata = flatten_tensor_state_dict(smoothed.state_dict())
    key = next(key for key in tensors if key.endswith("act_pre_scale"))
    tensors[key] = tensors[key].view(-1)[:60].clone()
    save_file(tensors, tmp_path / "bad.safetensors", metadata)
    with pytest.raises(CkptmapError, match="expected 64, found"):
        ckptmap.convert(tmp_path / "bad.safetensors", tmp_path / "out.pt", to="full-bf16")


def test_a_narrower_range_of_codes_is_kept(tmp_path: Path) -> None:
    """Weights that training changed get codes in the range that the release states."""
    model = Net().requires_grad_(False)
    values = model.fc.weight.detach().flip(0).contiguous()
    release = Int8Tensor.from_hp(model.fc.weight, PerRow(), reduce_range=True)
    torch.save({NAME: release}, tmp_path / "release.pt")
    ckptmap.convert(tmp_path / "release.pt", tmp_path / "release", to="full")
    torch.save({NAME: values}, tmp_path / "trained.pt")
    ckptmap.convert(tmp_path / "trained.pt", tmp_path / "as", as_=tmp_path / "release")
    found = torch.load(tmp_path / "as")
    wanted = Int8Tensor.from_hp(values, PerRow(), reduce_range=True)
    same(found["fc._weight_qdata"], wanted.qdata)
    same(found["fc._weight_scale"], wanted.scale)
