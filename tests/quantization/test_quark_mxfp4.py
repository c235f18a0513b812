"""MXFP4 as AMD Quark exported it (`golden/quark/make_quark.py`); ModelOpt exports the same tensors under its own config."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ckptmap
from tests.support.bnb_cases import same
from tests.support.paths import GOLDEN

QUARK = GOLDEN / "quark" / "mxfp4"
TRUTH: dict[str, str] = json.loads((GOLDEN / "quark" / "truth.json").read_text())
FILE, OWN = "model.safetensors", "hf_quant_config.json"
CODED = "model.layers.0.mlp.down_proj.weight"


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def of_modelopt(folder: Path) -> Path:
    """The same tensors beside what ModelOpt 0.47 states of `MXFP4_DEFAULT_CFG`."""
    shutil.copytree(QUARK, folder)
    config = json.loads((folder / "config.json").read_text())
    producer = {"name": "modelopt", "version": "0.47.0"}
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "mxfp4", "ignore": ["lm_head"], "producer": producer,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    own = {"quant_algo": "mxfp4", "exclude_modules": ["lm_head"], "kv_cache_quant_algo": None}
    (folder / OWN).write_text(json.dumps({"producer": producer, "quantization": own}))
    return folder


def test_the_values_are_those_of_quark() -> None:
    with ckptmap.open(QUARK) as ckpt:
        assert ckpt[CODED].encoding == "quark-mxfp4"
        assert {fqn: digest(ckpt[fqn].read()) for fqn in TRUTH} == TRUTH
        whole = ckpt[CODED].read()
        same(ckpt[CODED][5:41, 30:70], whole[5:41, 30:70])


@pytest.mark.parametrize("writer", ["quark", "modelopt"])
def test_into_training_and_back(writer: str, tmp_path: Path) -> None:
    source = QUARK if writer == "quark" else of_modelopt(tmp_path / "in")
    ckptmap.convert(source, tmp_path / "hf", to="hf-bf16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert {fqn: digest(model.state_dict()[fqn]) for fqn in TRUTH} == TRUTH
    assert not (tmp_path / "hf" / OWN).exists()
    state = load_file(tmp_path / "hf" / FILE)
    state[CODED] = state[CODED] * 1.25
    torch.save(state, tmp_path / "work.pt")
    ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=source)
    before, after = (load_file(path / FILE) for path in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {CODED, f"{CODED}_scale"}
    said = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == writer


def test_changed_weights_get_the_codes_of_quark(tmp_path: Path) -> None:
    """Quantized anew from what the golden was made of, scales and codes are Quark's, but for the sign of zeros: Quark has
    none."""
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(QUARK)
    del config.quantization_config
    state = LlamaForCausalLM(config).bfloat16().state_dict()
    torch.save(state, tmp_path / "dense.pt")
    report = ckptmap.convert(tmp_path / "dense.pt", tmp_path / "back", as_=QUARK)
    assert report.likeness is not None and report.likeness.changed.keys() == TRUTH.keys()
    before, after = (load_file(path / FILE) for path in (QUARK, tmp_path / "back"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        same(unsigned(after[key]) if key in TRUTH else after[key], value)


def unsigned(codes: torch.Tensor) -> torch.Tensor:
    """Return the codes with zeros in place of negative zeros."""
    low, high = codes & 15, codes >> 4
    return torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4


def test_the_codes_go_over_ranks_and_come_back(tmp_path: Path) -> None:
    ckptmap.convert(QUARK, tmp_path / "ranks", to="fsdp2", world_size=3)
    ckptmap.convert(tmp_path / "ranks", tmp_path / "out", to="hf", config_from=str(QUARK))
    before, after = (load_file(path / FILE) for path in (QUARK, tmp_path / "out"))
    for key, value in before.items():
        same(after[key], value)


def test_static_scales_of_activations_move_with_their_weight(tmp_path: Path) -> None:
    source = shutil.copytree(QUARK, tmp_path / "in")
    stored = load_file(source / FILE)
    key = CODED.removesuffix("weight") + "input_scale"
    stored[key] = torch.tensor(0.25)
    save_file(stored, source / FILE, {"format": "pt"})
    with ckptmap.open(source) as ckpt:
        assert key not in ckpt and digest(ckpt[CODED].read()) == TRUTH[CODED]
    ckptmap.convert(source, tmp_path / "out", to="hf")
    assert torch.equal(load_file(tmp_path / "out" / FILE)[key], stored[key])


def test_six_bits_are_not_taken_for_four(tmp_path: Path) -> None:
    """MXFP6 of Quark has the same names: 24 bytes for one scale."""
    source = shutil.copytree(QUARK, tmp_path / "in")
    stored = load_file(source / FILE)
    stored[CODED] = torch.zeros(64, 72, dtype=torch.uint8)
    save_file(stored, source / FILE, {"format": "pt"})
    with pytest.raises(ckptmap.CkptmapError, match=r"down_proj\.weight.*is part of a MXFP6 tensor"):
        ckptmap.convert(source, tmp_path / "out", to="hf-bf16")
