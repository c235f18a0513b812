"""Models in forms that move as bytes only: what a plan says of them as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from tests.quantization.test_unsupported_schemes import LAYERS, assert_same_files
from tests.support.int8_models import llama


def test_codes_of_a_method_that_nobody_knows_here_are_refused(tmp_path: Path) -> None:
    """As gptqmodel 7.7 writes blocks of GGUF into safetensors: once a cast left them, and dropped what config.json
    states of them."""
    blocks = torch.arange(64 * 72).to(torch.uint8).view(64, 72)
    state = {"fc.qweight": blocks, "fc.lut": torch.ones(16), "norm.weight": torch.ones(64).half()}
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    stated = {"quant_method": "gguf", "format": "q_k_m", "bits": 4}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": stated}))
    for to in ("hf-bf16", "full-bnb-nf4"):
        with pytest.raises(
            ckptmap.CkptmapError, match="part of a quant_method 'gguf' tensor"
        ) as caught:
            ckptmap.convert(tmp_path / "in", tmp_path / "never", to=to)
        assert caught.value.code == "CKM202"
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    assert_same_files(tmp_path / "in", tmp_path / "out")
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == stated
    )
    kept = ckptmap.convert(tmp_path / "in", tmp_path / "kept", to="hf-bf16", no_encode=["fc.*"])
    assert kept.fidelity == {"bytes": 2, "cast": 1}


def test_parts_of_a_foreign_form_are_not_names_of_another_model(tmp_path: Path) -> None:
    """Of a layer in SINQ two names in 58 are names of the model: once such a model was refused as another (CKM619)."""
    model = llama()
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    for key in [key for key in state if key.endswith("_proj.weight")]:
        del state[key]
        for part, (shape, dtype) in LAYERS["SINQ"].items():
            state[f"{key.removesuffix('weight')}{part}"] = torch.ones(shape).to(dtype)
    (tmp_path / "in").mkdir()
    model.config.save_pretrained(tmp_path / "in")
    save_file(state, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    notes = ckptmap.plan(tmp_path / "in", "hf").notes
    assert not any("initializes at random" in note for note in notes), notes
    ckptmap.convert(tmp_path / "in", tmp_path / "dcp", to="fsdp2", world_size=2)
    source = str(tmp_path / "in")
    ckptmap.convert(tmp_path / "dcp", tmp_path / "out", to="hf", config_from=source)
    assert_same_files(tmp_path / "in", tmp_path / "out")
