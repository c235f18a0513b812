"""Families without a mapping file: their names in memory become those that save_pretrained writes, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import ckptmap
from ckptmap.mapping.disk_forms import forms, memory_scheme_of
from ckptmap.mapping.memory_names import SPLIT_ON_DISK
from ckptmap.mapping.scheme_to_scheme import translate
from ckptmap.tensors import TensorInfo

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1,
    "n_routed_experts": 3, "num_experts": 3, "num_local_experts": 3, "moe_num_experts": 3, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "expert_ffn_hidden_size": 24, "ffn_hidden_size": 48, "zero_expert_num": 2, "num_layers": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "sliding_window": 16, "swa_head_dim": 8,
    "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_head": 16, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1,
}  # fmt: skip
"""Sizes by the names that configs give them; each config takes those that it has."""
OWN: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_moe": {"moe_topk": [2, 2], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "moe"], "mlp_hidden_act": "relu2"},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip
SEVERAL_MODELS = frozenset(
    [
        "aria",
        "glm4v_moe",
        "glm5_next",
        "hyperclovax_vision_v2",
        "minimax_m3_vl",
        "paddleocr_vl",
        "qwen2_5_omni",
        "qwen3_5_moe",
        "qwen3_omni_moe",
        "qwen3_omni_moe_thinker",
        "t5gemma2",
    ]
)
OMNI = frozenset({"qwen2_5_omni", "qwen3_omni_moe"})
"""Families with a text model inside."""
CAUSAL = sorted(forms().keys() - SEVERAL_MODELS - {"dots3_note_text", "glm5_next_text"})
"""Those left out cannot be built of SIZES, and are parts of others."""
OTHERWISE = {"kimi_linear"}
"""Families of which save_pretrained of 5.23 writes other names than the release has, in dense layers."""


def config_of(kind: str) -> Any:
    config = type(transformers.AutoConfig.for_model(kind))
    known = set(vars(config())) | set(config.attribute_map)
    return config(**{k: v for k, v in SIZES.items() if k in known} | OWN.get(kind, {}))


def made(kind: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_of(kind))


def small_on_meta(kind: str) -> Any:
    """Return a model of the released sizes on meta, with few layers and experts."""
    config = transformers.AutoConfig.for_model(kind)
    inner = [
        vars(config).get(f"{name}_config") for name in ("text", "encoder", "decoder", "thinker")
    ]
    for one in filter(None, (config, *inner, *(getattr(i, "text_config", None) for i in inner))):
        for name, kept in vars(one).copy().items():
            if name.endswith("layer_types"):
                setattr(one, name, kept[:4] if kept else kept)
            elif name in (
                "num_hidden_layers",
                "n_routed_experts",
                "num_experts",
                "num_local_experts",
            ):
                setattr(one, name, min(kept, 4))
    (architecture,) = {
        name
        for table in (
            transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            transformers.models.auto.modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        )
        if (name := table.get(kind))
    }
    with torch.device("meta"):
        return getattr(transformers, architecture)(config)


def assert_equals_save_pretrained(model: Any, kind: str) -> None:
    state = model.state_dict()
    config: dict[str, object] = {"model_type": kind}
    scheme = memory_scheme_of(state, config)
    assert scheme is not None
    infos = {name: TensorInfo(tuple(t.shape), "float32") for name, t in state.items()}
    written = translate(infos, scheme, None, config)
    assert not written.unmapped
    truth = {name: tuple(t.shape) for name, t in revert_weight_conversion(model, state).items()}
    shapes = {name: mapped.info.shape for name, mapped in written.targets.items()}
    assert shapes == truth
    assert memory_scheme_of(truth, config) is None


@pytest.mark.parametrize("kind", sorted(set(CAUSAL) - OTHERWISE))
def test_names_and_shapes_are_those_of_save_pretrained(kind: str) -> None:
    if kind not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {kind}")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind))
    assert_equals_save_pretrained(model, kind)


@pytest.mark.parametrize("stem", ["Qwen2_5Omni", "Qwen3OmniMoe"])
def test_names_of_models_that_hear_and_see_are_those_of_save_pretrained(stem: str) -> None:
    config = getattr(transformers, f"{stem}Config")(enable_audio_output=False)
    text = config.thinker_config.text_config
    text.num_hidden_layers, text.num_experts = 2, 3
    if hasattr(text, "layer_types"):
        text.layer_types = text.layer_types[:2]
    with torch.device("meta"):
        model = getattr(transformers, f"{stem}ForConditionalGeneration")(config)
    assert_equals_save_pretrained(model, config.model_type)


@pytest.mark.parametrize("kind", sorted(SEVERAL_MODELS - OMNI))
def test_names_of_models_with_others_inside_are_those_of_save_pretrained(kind: str) -> None:
    assert_equals_save_pretrained(small_on_meta(kind), kind)


@pytest.mark.parametrize(
    "kind",
    ["glm4_moe", "qwen3_next", "olmoe", "minimax_m2", "phimoe", "ernie4_5_moe", "hy_v3", "nemotron_h", "lfm2_moe"]
)  # fmt: skip
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
    again, told = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    live = made(kind)
    assert ckptmap.load(tmp_path / "out", live).names == f"hf -> {kind}/hf-memory"
    for found in (live, again):
        pairs = zip(found.state_dict().items(), model.state_dict().items(), strict=True)
        assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)
    with ckptmap.open(tmp_path / "run.pt") as run:
        assert ckptmap.plan(run, "hf", config_from=config, names="hf-memory").unresolved == []
    ckptmap.convert(tmp_path / "run.pt", tmp_path / "as", as_=tmp_path / "disk")
    copy = load_file(tmp_path / "as/model.safetensors")
    assert all(torch.equal(copy[key], truth[key]) for key in truth)


def test_kimi_linear_is_named_as_the_release_and_both_are_read(tmp_path: Path) -> None:
    """Dense layers of the release have `mlp`, where save_pretrained of 5.23 writes `block_sparse_moe`; the convolutions of
    q, k and v are three tensors on disk."""
    model = made("kimi_linear")
    model.save_pretrained(tmp_path / "disk")
    torch.save(model.state_dict(), tmp_path / "run.pt")
    ckptmap.convert(tmp_path / "run.pt", tmp_path / "out", to="hf", config_from=tmp_path / "disk")
    written, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "disk"))
    dense = {
        key.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): tensor
        for key, tensor in theirs.items()
    }
    assert written.keys() == dense.keys() != theirs.keys()
    assert "model.layers.0.self_attn.q_conv1d.weight" in written
    assert all(torch.equal(written[key], dense[key]) for key in dense)
    loaded, told = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    live = [loaded, made("kimi_linear"), made("kimi_linear")]
    for folder, one in zip(("out", "disk"), live[1:], strict=True):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.zero_()
        ckptmap.load(tmp_path / folder, one)
    for one in live:
        state = one.state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())


def test_what_is_no_family_without_a_mapping_file_has_no_form() -> None:
    split = {kind for kind, form in forms().items() if form.experts}
    assert split - {"dots3_note_text", "qwen3_5_moe"} <= SPLIT_ON_DISK
    assert memory_scheme_of(["model.layers.0.mlp.experts.gate_up_proj"], None) is None
    assert memory_scheme_of(["model.norm.weight"], {"model_type": "olmoe"}) is None


def test_names_of_both_kinds_stay_as_they_are_and_are_told(tmp_path: Path) -> None:
    """One layer was converted before: transformers loads both, and no rule may join two tensors."""
    model = made("minimax_m2")
    model.save_pretrained(tmp_path / "disk")
    state, disk = model.state_dict(), load_file(tmp_path / "disk/model.safetensors")
    half = {k: v for k, v in state.items() if ".layers.1." not in k}
    half |= {k: v for k, v in disk.items() if ".layers.1." in k}
    torch.save(half, tmp_path / "half.pt")
    report = ckptmap.convert(
        tmp_path / "half.pt", tmp_path / "out", to="hf", config_from=tmp_path / "disk"
    )
    assert any("all experts of a layer in one tensor" in note for note in report.notes)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == half.keys()
    assert all(torch.equal(written[key], half[key]) for key in half)
