"""GGUF files of models become what transformers loads, with the same logits.

The files are written by the `gguf` package with the changes of values that llama.cpp publishes
(`tests/support/gguf_models.py`), because its converter is no package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ckptmap
from ckptmap.errors import CkptmapError
from ckptmap.operations.inspect import InspectReport
from tests.support.gguf_files import blocks, write
from tests.support.gguf_models import MODELS, build, logits, named, write_model

BY_TRANSFORMERS = ("llama", "llama-tied", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Those that transformers 5.23 loads from GGUF itself. It leaves out biases of Llama and the sizes of the experts
of Qwen, and fails for gpt-oss."""


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    built = build(model)
    path = write_model(model, built, tmp_path / "m.gguf")
    report = ckptmap.convert(path, tmp_path / "out", to="hf-fp32", strict=True)
    loaded, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert np.array_equal(logits(loaded.eval()), logits(built))
    assert any("/gguf -> hf" in note for note in report.notes)
    (scheme,) = InspectReport(ckptmap.open(path)).to_json()["names"]  # type: ignore[misc]
    assert scheme.endswith("/gguf")


@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_the_logits_are_those_of_transformers_own_load(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    path = write_model(model, build(model), tmp_path / "m.gguf", "Q8_0")
    ckptmap.convert(path, tmp_path / "out", to="hf-bf16")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.bfloat16
    ).eval()
    assert np.array_equal(logits(ours), logits(theirs))


def test_the_config(tmp_path: Path) -> None:
    model = MODELS["gpt_oss"]
    path = write_model(model, build(model), tmp_path / "m.gguf")
    ckptmap.convert(path, tmp_path / "out", to="hf-bf16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 64,
        "num_hidden_layers": 2, "intermediate_size": 96, "max_position_embeddings": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-06,
        "rope_theta": 150000.0, "sliding_window": 32, "num_experts_per_tok": 2, "num_local_experts": 4,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 96,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    }  # fmt: skip


def test_a_config_beside_the_file_goes_first(tmp_path: Path) -> None:
    model = MODELS["llama"]
    built = build(model)
    path = write_model(model, built, tmp_path / "m.gguf")
    built.config.save_pretrained(tmp_path)
    ckptmap.convert(path, tmp_path / "out", to="hf-bf16")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["transformers_version"]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt_oss"])
def test_a_config_beside_the_file_that_names_the_family_alone(name: str, tmp_path: Path) -> None:
    """As in thousands of repositories of GGUF files, whose config.json is {"model_type": "llama"}."""
    model = MODELS[name]
    built = build(model)
    path = write_model(model, built, tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model.config["model_type"]}))
    report = ckptmap.convert(path, tmp_path / "out", to="hf-fp32", strict=True)
    loaded, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert np.array_equal(logits(loaded.eval()), logits(built))
    assert any("config.json: states no sizes of the model" in note for note in report.notes)


def test_codes_are_kept_where_only_rows_change_their_order(tmp_path: Path) -> None:
    model = MODELS["llama"]
    path = write_model(model, build(model), tmp_path / "m.gguf", "Q8_0")
    report = ckptmap.convert(path, tmp_path / "out.pt", to="full")
    assert report.fidelity == {"bytes": 17, "exact": 4}  # q and k of two layers
    ckptmap.convert(path, tmp_path / "fp32.pt", to="full-fp32")
    found, expected = ckptmap.open(tmp_path / "out.pt"), ckptmap.open(tmp_path / "fp32.pt")
    assert found["model.layers.0.self_attn.q_proj.weight"].encoding == "gguf-q8_0"
    assert all(torch.equal(found[fqn].read(), expected[fqn].read()) for fqn in expected)


def test_names_stay_where_values_would_change_unasked(tmp_path: Path) -> None:
    model = MODELS["gemma2"]
    path = write_model(model, build(model), tmp_path / "m.gguf", "Q8_0")
    report = ckptmap.convert(path, tmp_path / "out.pt", to="full")
    assert set(report.fidelity) == {"bytes"}
    assert any("the names stay those of gguf" in note for note in report.notes)
    assert set(ckptmap.open(tmp_path / "out.pt")) == set(ckptmap.open(path))


def test_a_gate_of_shared_experts_in_one_row(tmp_path: Path) -> None:
    """As llama.cpp's converter writes it since it does not squeeze tensors: [1, hidden], and [hidden] before."""
    model = MODELS["qwen2_moe"]
    built = build(model)
    write_model(replace(model, change=rows_of_gates), built, tmp_path / "m.gguf")
    ckptmap.convert(tmp_path / "m.gguf", tmp_path / "out", to="hf-fp32", strict=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert np.array_equal(logits(loaded), logits(built))


def rows_of_gates(
    name: str, w: torch.Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    if name.endswith("shared_expert_gate.weight"):
        yield name, w
    else:
        yield from MODELS["qwen2_moe"].change(name, w, config)


def test_into_training(tmp_path: Path) -> None:
    """A sharded checkpoint has Hugging Face's names, too, and the values of `gguf`'s own decoder."""
    model = MODELS["llama"]
    built = build(model)
    path = write_model(model, built, tmp_path / "m.gguf")
    ckptmap.convert(path, tmp_path / "out", to="fsdp2-bf16", world_size=3)
    found = ckptmap.open(tmp_path / "out")
    for name, w in built.state_dict().items():
        assert torch.equal(found[name].read(), w.bfloat16()), name


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    """Names and metadata stay as they are, and a note says so; nothing is guessed."""
    tensors = {
        n: ("F32", w.numpy()) for n, w in named(MODELS["phi3"], build(MODELS["phi3"])).items()
    }
    path = write(tmp_path / "m.gguf", tensors, arch="nemesis")
    report = ckptmap.convert(path, tmp_path / "out", to="hf-bf16", names="gguf")
    assert not (tmp_path / "out/config.json").exists()
    assert "the weights have no config.json; give one with --config-from PATH" in report.notes


@pytest.mark.parametrize("name", ["qwen3_moe", "phi3", "llama"])
def test_names_of_another_architecture_prove_no_model(name: str, tmp_path: Path) -> None:
    """OLMoE has Qwen 3 MoE's names, Cohere has Llama's with q and k in another order: the file says which it is."""
    tensors = {n: ("F32", w.numpy()) for n, w in named(MODELS[name], build(MODELS[name])).items()}
    path = write(tmp_path / "m.gguf", tensors, arch="nemesis")
    report = ckptmap.convert(path, tmp_path / "out", to="hf-bf16")
    assert set(ckptmap.open(tmp_path / "out")) == set(tensors)
    assert any("no mapping file is for 'nemesis'" in note for note in report.notes)
    with pytest.raises(CkptmapError, match="no mapping file is for 'nemesis'"):
        ckptmap.convert(path, tmp_path / "hf", to="hf-bf16", names="hf")
    if name == "phi3":  # needs no config
        ckptmap.convert(path, tmp_path / "hf", to="hf-bf16", names="hf", names_from="phi3/gguf")
        assert "model.layers.0.self_attn.qkv_proj.weight" in ckptmap.open(tmp_path / "hf")


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("factor", [8.0, 32.0, None])
def test_factors_of_llama_3_become_rope_scaling(factor: float | None, tmp_path: Path) -> None:
    """The factors are those that transformers divides its frequencies by; others are told in a note."""
    model = MODELS["llama"]
    scaled = LlamaConfig(
        head_dim=64, rope_theta=500000.0, rope_scaling={**LLAMA3, "factor": factor or 8.0}
    )
    plain = LlamaConfig(head_dim=64, rope_theta=500000.0)
    factors = LlamaRotaryEmbedding(plain).inv_freq / LlamaRotaryEmbedding(scaled).inv_freq
    tensors = {name: ("F32", w.numpy()) for name, w in named(model, build(model)).items()}
    tensors["rope_freqs.weight"] = ("F32", (factors if factor else factors * 2).numpy())
    sizes = {"embedding_length": 64, "block_count": 2, "attention__head_count": 4,
             "attention__head_count_kv": 2, "attention__key_length": 16, "rope__freq_base": 500000.0}  # fmt: skip
    path = write(tmp_path / "m.gguf", tensors, **{f"llama__{k}": v for k, v in sizes.items()})
    report = ckptmap.convert(path, tmp_path / "out", to="hf-bf16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.get("rope_scaling") == (factor and {**LLAMA3, "factor": factor})
    assert any(note.startswith("rope_freqs.weight: ") for note in report.notes) == (factor is None)


def test_factors_of_phi_3_become_rope_scaling(tmp_path: Path) -> None:
    model = MODELS["phi3"]
    tensors = {name: ("F32", w.numpy()) for name, w in named(model, build(model)).items()}
    for name, first in (("long", 4.0), ("short", 1.0)):
        tensors[f"rope_factors_{name}.weight"] = ("F32", np.arange(8, dtype=np.float32) + first)
    sizes = {"embedding_length": 64, "block_count": 2, "attention__head_count": 4, "attention__head_count_kv": 2,
             "feed_forward_length": 96, "rope__scaling__original_context_length": 4096}  # fmt: skip
    path = write(
        tmp_path / "m.gguf", tensors, arch="phi3", **{f"phi3__{k}": v for k, v in sizes.items()}
    )
    ckptmap.convert(path, tmp_path / "out", to="hf-bf16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["original_max_position_embeddings"] == 4096
    assert config["rope_scaling"] == {
        "rope_type": "longrope", "long_factor": [4.0 + n for n in range(8)],
        "short_factor": [1.0 + n for n in range(8)],
    }  # fmt: skip
    AutoConfig.from_pretrained(tmp_path / "out")


def test_weights_that_did_not_change_come_back_as_their_blocks(tmp_path: Path) -> None:
    """GGUF -> bf16 -> the form of its blocks in a torch.save file: `--as`."""
    model = MODELS["llama"]
    path = write_model(model, build(model), tmp_path / "m.gguf", "Q8_0")
    ckptmap.convert(path, tmp_path / "blocks.pt", to="full")
    ckptmap.convert(path, tmp_path / "work.pt", to="full-bf16")
    state = torch.load(tmp_path / "work.pt")
    changed = "model.layers.1.mlp.up_proj.weight"
    state[changed] += 0.5
    torch.save(state, tmp_path / "trained.pt")
    ckptmap.convert(tmp_path / "trained.pt", tmp_path / "back.pt", as_=tmp_path / "blocks.pt")
    before, after = (torch.load(tmp_path / name) for name in ("blocks.pt", "back.pt"))
    assert {key for key in before if not torch.equal(before[key], after[key])} == {changed}
    expected = quants.quantize(state[changed].float().numpy(), GGMLQuantizationType.Q8_0)
    assert np.array_equal(after[changed].numpy(), expected)


def test_types_that_are_not_encoded_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"w": ("Q4_K", blocks("Q4_K", (4, 256)) & 0x3B)})
    ckptmap.convert(path, tmp_path / "blocks.pt", to="full")
    torch.save({"w": torch.ones(4, 256)}, tmp_path / "trained.pt")
    with pytest.raises(CkptmapError, match="has changed, and cannot be made gguf-q4_k"):
        ckptmap.convert(tmp_path / "trained.pt", tmp_path / "back.pt", as_=tmp_path / "blocks.pt")


def test_a_split_model_of_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer splits by tensors; each file leads to all, and the way back is one whole file."""
    from functools import partial

    from gguf import GGUFWriter

    (tmp_path / "split").mkdir()
    built = build(MODELS["llama"])
    one = write_model(MODELS["llama"], built, tmp_path / "one.gguf", "Q8_0")
    splitting = partial(GGUFWriter, split_max_tensors=6)
    monkeypatch.setattr("tests.support.gguf_models.GGUFWriter", splitting)
    write_model(MODELS["llama"], built, tmp_path / "split" / "m.gguf", "Q8_0")
    files = sorted((tmp_path / "split").iterdir())
    assert [file.name for file in files] == [f"m-0000{n}-of-00004.gguf" for n in (1, 2, 3, 4)]
    for path in (tmp_path / "split", files[0], files[2]):
        ckptmap.convert(path, tmp_path / "whole.gguf", to="gguf", overwrite=True)
        before = one.read_bytes()
        assert (tmp_path / "whole.gguf").read_bytes()[: len(before)] == before
