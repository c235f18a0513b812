"""Mixtures of experts without a mapping file: joined in memory, one by one on disk, in optimizer state, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ckptmap
from ckptmap.mapping.memory_names import SPLIT_ON_DISK
from ckptmap.mapping.split_experts import FAMILIES, memory_scheme_of

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "head_dim": 16, "moe_intermediate_size": 24, "n_routed_experts": 3, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "qwen3_next": {
        "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 3, "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    },
    "olmoe": {"num_experts": 3},
}  # fmt: skip


def made(kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **OWN[kind])
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", OWN)
def test_experts_are_written_one_by_one_and_loaded_back(kind: str, tmp_path: Path) -> None:
    """`--to hf` equals save_pretrained; a live model takes the release, and moments follow their weights."""
    model = made(kind)
    model.save_pretrained(tmp_path / "disk")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model.save_pretrained(tmp_path / "trained")
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "run.pt")
    config = tmp_path / "disk/config.json"
    report = ckptmap.convert(tmp_path / "run.pt", tmp_path / "out", to="hf", config_from=config)
    assert any("as save_pretrained writes them" in note for note in report.notes)
    written, truth = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "trained")
    )
    assert written.keys() == truth.keys() != saved["model"].keys()
    assert all(torch.equal(written[key], truth[key]) for key in truth)
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "run.pt").ok
    live = made(kind)
    assert ckptmap.load(tmp_path / "out", live).names == f"hf -> {kind}/hf-memory"
    pairs = zip(live.state_dict().items(), model.state_dict().items(), strict=True)
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)
    with ckptmap.open(tmp_path / "run.pt") as run:
        assert ckptmap.plan(run, "hf", config_from=config, names="hf-memory").unresolved == []
    ckptmap.convert(tmp_path / "run.pt", tmp_path / "as", as_=tmp_path / "disk")
    again = load_file(tmp_path / "as/model.safetensors")
    assert all(torch.equal(again[key], truth[key]) for key in truth)


def test_the_families_are_those_that_split_their_experts() -> None:
    assert FAMILIES <= SPLIT_ON_DISK
    assert memory_scheme_of(["model.layers.0.mlp.experts.gate_up_proj"], None) is None
    assert memory_scheme_of(["model.norm.weight"], {"model_type": "olmoe"}) is None
