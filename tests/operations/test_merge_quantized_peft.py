"""Adapters of peft merged into quantized bases, compared with peft's own merge into the decoded base, bit for bit."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import ckptmap
from ckptmap.errors import SourceError
from tests.support.gguf_models import MODELS, build, write_model
from tests.support.merge_cases import CONV1D, LINEARS, adapted, gpt2, llama, save_adapter

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BOTH = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
CONFIG = {"num_hidden_layers": 1}


def one_layer(name: str) -> Any:
    return build(replace(MODELS[name], config={**MODELS[name].config, **CONFIG}))


def by_hqq(model: Any, path: Path) -> Path:
    """A directory as hqq's `save_to_safetensors` writes its layers, with the config of the model."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    config = BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    more = {"compute_dtype": torch.float32, "device": "cpu", "del_orig": False}
    state = {k: t for k, t in model.state_dict().items() if k.rpartition(".")[0] not in layers}
    for name, module in layers.items():
        made = HQQLinear(module, config, **more)
        state |= {f"{name}.{key}": torch.as_tensor(t) for key, t in made.state_dict().items()}
    path.mkdir()
    save_file({key: t.clone().contiguous() for key, t in state.items()}, path / "model.safetensors")
    model.config.save_pretrained(path)
    return path


def by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """What peft merges into the values of the base."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged: dict[str, torch.Tensor] = (
        PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    )
    return merged


def same_as_peft(made: dict[str, torch.Tensor], base: Path, adapter: Path) -> None:
    truth = by_peft(base, adapter)
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    assert any(not torch.equal(truth[key], before[key]) for key in truth)
    assert truth.keys() - made.keys() <= {"lm_head.weight"}
    for key in truth.keys() & made.keys():
        assert torch.equal(made[key], truth[key]), key


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("llama", {"target_modules": LINEARS}),
        ("llama", {"target_modules": LINEARS, "use_dora": True}),
        ("qwen3_moe", BOTH),
        ("qwen3_moe", {**BOTH, "use_rslora": True}),
    ],
)
def test_into_hqq(model: str, config: dict[str, Any], tmp_path: Path) -> None:
    made = llama() if model == "llama" else one_layer(model)
    base = by_hqq(made, tmp_path / "base")
    save_adapter(adapted(made, **config), tmp_path / "adapter")
    ckptmap.convert(base, tmp_path / "decoded", to="hf-fp32")
    ckptmap.merge(base, tmp_path / "adapter", tmp_path / "merged.pt", to="full-fp32")
    same_as_peft(torch.load(tmp_path / "merged.pt"), tmp_path / "decoded", tmp_path / "adapter")


@pytest.mark.parametrize("to", ["hf-bnb-nf4", "full-int8"])
def test_conv1d_of_a_quantized_base(to: str, tmp_path: Path) -> None:
    """`fan_in_fan_out`: both factors are those of the transpose of the stored weight."""
    gpt2().save_pretrained(tmp_path / "dense")
    ckptmap.convert(tmp_path / "dense", tmp_path / "base", to=to)
    save_adapter(adapted(gpt2(), target_modules=CONV1D, fan_in_fan_out=True), tmp_path / "adapter")
    more = {"config_from": tmp_path / "dense"}
    ckptmap.convert(tmp_path / "base", tmp_path / "decoded", to="hf-fp32", **more)
    ckptmap.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged.pt", to="full-fp32")
    same_as_peft(torch.load(tmp_path / "merged.pt"), tmp_path / "decoded", tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
def test_experts_that_gguf_has_in_other_tensors(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """gpt-oss' two stacks are three in GGUF: the merge left them as they were, without a word."""
    base = write_model(
        replace(MODELS["gpt_oss"], config={**MODELS["gpt_oss"].config, **CONFIG}), one_layer("gpt_oss"),
        tmp_path / "base.gguf", kind,
    )  # fmt: skip
    save_adapter(adapted(one_layer("gpt_oss"), **BOTH), tmp_path / "adapter")
    with pytest.raises(
        SourceError, match=r"experts\.(gate_up|down)_proj: is computed from other"
    ) as caught:
        ckptmap.merge(base, tmp_path / "adapter", tmp_path / "merged.pt", to="full-fp32")
    assert caught.value.code == "CKM322" and not (tmp_path / "merged.pt").exists()
    convert, merge = (
        shlex.split(
            line.strip()
            .replace("NAMED", str(tmp_path / "named"))
            .replace("DST", str(tmp_path / "out"))
        )
        for line in caught.value.hint.partition(": ")[2].split(", then ")
    )
    ckptmap.convert(convert[2], convert[3], to=convert[5])
    ckptmap.merge(*merge[2:5])
    made = load_file(tmp_path / "out" / "model.safetensors")
    same_as_peft(made, tmp_path / "named", tmp_path / "adapter")
