"""FP8 by gptqmodel 7.7, which divides codes by their scales, and has config.json state it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import PlanError
from tests.support.bnb_cases import same

FILE, CONFIG = "model.safetensors", "config.json"
FC = "layers.0.fc.weight"
METHODS = ("tensor", "row", "block")


def written(folder: Path, method: str) -> torch.Tensor:
    """Return the values [96, 128] of a layer as `quantize_fp8_weight` made it (nn_modules/qlinear/fp8.py)."""
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)) / 50
    blocks = weight.view(3, 32, 2, 64).abs()
    scale = 448 / {
        "tensor": weight.abs().amax(), "row": weight.abs().amax(1), "block": blocks.amax((1, 3)),
    }[method]  # fmt: skip
    wide = scale.view(-1, 1) if method == "row" else scale
    if method == "block":
        wide = scale.repeat_interleave(32, 0).repeat_interleave(64, 1)
    codes = (weight * wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    folder.mkdir()
    state = {FC: codes, f"{FC}_scale_inv": scale, "norm.weight": torch.ones(128)}
    save_file(state, folder / FILE, {"format": "pt"})
    stated = {
        "quant_method": "fp8", "format": "float8_e4m3fn", "weight_scale_method": method,
        "weight_scale_semantics": "inverse",
    } | ({"weight_block_size": [32, 64]} if method == "block" else {})  # fmt: skip
    (folder / CONFIG).write_text(json.dumps({"quantization_config": stated}))
    return codes.float() / wide


@pytest.mark.parametrize("method", METHODS)
def test_divided_by_its_scales_wherever_it_goes(method: str, tmp_path: Path) -> None:
    """Once codes were multiplied by them, and the values called exact."""
    values = written(tmp_path / "in", method)
    ckptmap.convert(tmp_path / "in", tmp_path / "dcp", to="fsdp2", world_size=2)
    for path in ("in", "dcp"):
        with ckptmap.open(tmp_path / path) as ckpt:
            assert ckpt[FC].encoding == "fp8-inverse"
            same(ckpt[FC].read(), values)
            same(ckpt[FC][5:70, 3:100], values[5:70, 3:100])
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / CONFIG).write_text("{}")
    ckptmap.convert(tmp_path / "dcp", tmp_path / "out", to="hf", config_from=str(plain))
    before, after = (load_file(tmp_path / path / FILE) for path in ("in", "out"))
    for key, value in before.items():
        same(after[key], value)
    stated, given = (
        json.loads((tmp_path / path / CONFIG).read_text())["quantization_config"]
        for path in ("out", "in")
    )
    assert stated == given


def test_given_back_unchanged_and_refused_changed(tmp_path: Path) -> None:
    written(tmp_path / "in", "row")
    ckptmap.convert(tmp_path / "in", tmp_path / "dense", to="full-fp32")
    back = tmp_path / "back"
    ckptmap.convert(tmp_path / "dense", back, as_=str(tmp_path / "in"))
    before, after = (load_file(path / FILE) for path in (tmp_path / "in", back))
    for key, value in before.items():
        same(after[key], value)
    state = torch.load(tmp_path / "dense")
    torch.save(state | {FC: state[FC] * 2}, tmp_path / "new.pt")
    with pytest.raises(PlanError, match="divided by their scales are read"):
        ckptmap.convert(tmp_path / "new.pt", tmp_path / "never", as_=str(tmp_path / "in"))


def test_its_codes_go_into_no_form_that_multiplies(tmp_path: Path) -> None:
    values = written(tmp_path / "in", "block")
    done = ckptmap.convert(tmp_path / "in", tmp_path / "out", to="full-float8", encode=[FC])
    assert done.fidelity == {"bytes": 1, "requantize": 1}
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert (ckpt[FC].read() - values).norm() < 0.05 * values.norm()
