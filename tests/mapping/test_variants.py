"""The variants of one naming scheme in real checkpoints: other names, buffers, padding, tied weights."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from ckptmap.errors import PlanError
from ckptmap.mapping.scheme_to_scheme import translate
from ckptmap.mapping.translate_state_dict import translate_names
from tests.golden.mappings.tables import rows
from tests.mapping.test_goldens import assert_hub, facts
from tests.support.mapping_state import (
    State,
    config_of,
    entry_of,
    golden,
    hub_state,
    infos,
    state_of,
    translated,
)


def bare(state: State) -> State:
    return {key.removeprefix("transformer."): value for key, value in state.items()}


@pytest.mark.parametrize("scheme", ["nanogpt", "megatron"])
def test_published_gpt2_has_the_names_of_the_bare_model(scheme: str) -> None:
    made = translate_names(bare(hub_state("gpt2")), scheme, config_of("gpt2"))
    assert facts(rows(made)) == facts(golden("gpt2", scheme))


@pytest.mark.parametrize("model", ["gpt2", "bloom"])
def test_hub_file_takes_bare_names_and_writes_full_ones(model: str) -> None:
    made = translate_names(bare(hub_state(model)), "hf", config_of(model))
    assert_hub(made, model)


def test_both_names_of_one_tensor() -> None:
    state = {**hub_state("gpt2"), "ln_f.bias": hub_state("gpt2")["transformer.ln_f.bias"]}
    with pytest.raises(PlanError, match=r"ln_f\.bias.*(twice|two sources)") as caught:
        translate_names(state, "nanogpt", config_of("gpt2"), source="hf")
    assert caught.value.code == "CKM608"


LOCAL = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
    ".linear_q_up_proj.layer_norm_": ".q_layernorm.",
    ".linear_kv_up_proj.layer_norm_": ".kv_layernorm.",
}


@pytest.mark.parametrize(
    "model",
    ["llama", "qwen2", "qwen3", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "phi3", "gpt_oss",
     "gpt_neox_sequential"],
)  # fmt: skip
def test_megatron_without_transformer_engine(model: str) -> None:
    """The names of the local modules, which are those of megatron-core's model on a CPU."""
    state = {}
    for key, value in state_of(model, "megatron").items():
        for engine, local in LOCAL.items():
            key = key.replace(engine, local)
        key = re.sub(r"(linear_fc[12]\.(?:weight|bias))(\d+)$", r"local_experts.\2.\1", key)
        state[key] = value
    assert state.keys() != state_of(model, "megatron").keys()
    assert_hub(translate_names(state, "hf", config_of(model)), model)


def test_an_expert_without_its_bias() -> None:
    state = dict(state_of("gpt_oss", "megatron"))
    del state["decoder.layers.1.mlp.experts.linear_fc1.bias3"]
    with pytest.raises(PlanError, match=r"linear_fc1\.bias3 is missing, found 6 of 7") as caught:
        translate_names(state, "hf", config_of("gpt_oss"))
    assert caught.value.code == "CKM607"


def test_grouped_and_single_experts_of_one_checkpoint() -> None:
    """Both names of one expert: one of them would be lost."""
    state = dict(state_of("mixtral", "megatron"))
    at = "decoder.layers.1.mlp.experts."
    state[f"{at}local_experts.3.linear_fc2.weight"] = state[f"{at}linear_fc2.weight3"]
    with pytest.raises(PlanError, match=r"linear_fc2\.weight3") as caught:
        translate_names(state, "hf", config_of("mixtral"))
    assert caught.value.code == "CKM608"


@pytest.mark.parametrize("number", ["03", "7", "³", "-1"])
def test_number_at_the_end_of_a_name_that_is_no_expert(number: str) -> None:
    state = dict(state_of("mixtral", "megatron"))
    state[f"decoder.layers.1.mlp.experts.linear_fc2.weight{number}"] = torch.ones(60, 18)
    with pytest.raises(PlanError, match=f"weight{number}"):
        translate_names(state, "hf", config_of("mixtral"))


def test_filling_of_the_vocabulary_is_cut_off_whatever_it_holds() -> None:
    state = {key: value.clone() for key, value in state_of("qwen2", "megatron").items()}
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert state[key].shape == (128, 120)
        assert not state[key][102:].any()
        state[key][102:] = -1.0
    assert_hub(translate_names(state, "hf", config_of("qwen2")), "qwen2")


def test_vocabulary_that_needs_no_filling() -> None:
    """A Megatron checkpoint of 102 rows is not one that was filled up to 128."""
    state = dict(state_of("qwen2", "megatron"))
    state["output_layer.weight"] = state["output_layer.weight"][:102]
    with pytest.raises(PlanError, match=r"output_layer\.weight.*128.*found \[102, 120\]"):
        translate_names(state, "hf", config_of("qwen2"))


BUFFERS: list[tuple[str, str, str, tuple[int, ...], str]] = [
    ("llama", "hf", "model.layers.1.self_attn.rotary_emb.inv_freq", (5,), "meta"),
    ("llama", "hf", "model.layers.0.self_attn.rotary_emb.inv_freq", (5,), "torchtune"),
    ("mixtral", "hf", "model.layers.1.self_attn.rotary_emb.inv_freq", (5,), "hf-memory"),
    ("llama", "meta", "rope.freqs", (5,), "hf"),
    ("gpt2", "hf", "transformer.h.1.attn.bias", (1, 1, 64, 64), "nanogpt"),
    ("gpt2", "hf", "h.0.attn.masked_bias", (), "megatron"),
    ("gpt2", "nanogpt", "transformer.h.1.attn.bias", (1, 1, 64, 64), "hf"),
    ("gpt_neox", "hf", "gpt_neox.layers.1.attention.masked_bias", (), "hf-memory"),
    ("gpt_neox", "hf", "gpt_neox.layers.0.attention.rotary_emb.inv_freq", (2,), "hf-memory"),
    ("deepseek_v3", "hf", "model.layers.0.self_attn.rotary_emb.inv_freq", (2,), "megatron"),
]


@pytest.mark.parametrize(("model", "scheme", "key", "shape", "target"), BUFFERS)
def test_buffers_of_old_checkpoints_are_dropped_with_a_reason(
    model: str, scheme: str, key: str, shape: tuple[int, ...], target: str
) -> None:
    state = {**state_of(model, scheme), key: torch.ones(shape)}
    source, wanted = (
        None if end == "hf" else entry_of(model, end).load() for end in (scheme, target)
    )
    found = translate(infos(state), source, wanted, config_of(model))
    assert not found.unmapped
    assert list(found.dropped) == [key]
    assert len(found.dropped[key]) > 10


def test_repeated_tensors_of_the_next_token_layer_are_dropped_with_a_reason() -> None:
    target = entry_of("deepseek_v3_mtp", "torchtitan@2026-07").load()
    found = translate(
        infos(hub_state("deepseek_v3_mtp")), None, target, config_of("deepseek_v3_mtp")
    )
    assert found.dropped == {
        "model.layers.3.embed_tokens.weight": "a copy of model.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight": "a copy of lm_head.weight",
    }


@pytest.mark.parametrize("era", ["2025-07", "2026-04b", "2026-06"])
def test_next_token_layer_has_no_place_in_older_eras(era: str) -> None:
    model = "deepseek_v3_mtp"
    target = entry_of(model, f"torchtitan@{era}").load()
    found = translate(infos(hub_state(model)), None, target, config_of(model))
    gone = {key for key in hub_state(model) if key.startswith("model.layers.3.")}
    assert not found.unmapped
    assert found.dropped.keys() == gone
    assert set(found.dropped.values()) == {"this scheme has no layers that predict further tokens"}
    assert found.targets.keys() == state_of("deepseek_v3", f"torchtitan@{era}").keys()


def test_config_that_announces_a_next_token_layer_which_is_not_there() -> None:
    """transformers writes neither the layer nor another number."""
    config = {**config_of("deepseek_v3"), "num_nextn_predict_layers": 1}
    target = entry_of("deepseek_v3", "torchtitan@2026-07").load()
    made = translated(hub_state("deepseek_v3"), config, None, target)
    assert facts(rows(made)) == facts(golden("deepseek_v3", "torchtitan@2026-07"))


def test_next_token_layer_that_is_not_whole() -> None:
    state = dict(hub_state("deepseek_v3_mtp"))
    del state["model.layers.3.mlp.experts.4.up_proj.weight"]
    with pytest.raises(PlanError, match=r"model\.layers\.3\.mlp\.experts\.4\.up_proj.* is missing"):
        translate_names(state, "torchtitan", config_of("deepseek_v3_mtp"))


# --------------------------------------------------------------------------- ties

TIED: list[tuple[str, str, str]] = [
    ("llama_tied", "torchtune", "output.weight"),
    ("qwen2_tied", "megatron", "output_layer.weight"),
    ("qwen3_tied", "torchtune", "output.weight"),
    ("gemma2", "torchtune", "output.weight"),
]


@pytest.mark.parametrize(("model", "scheme", "head"), TIED)
def test_tied_output_that_is_stored_too_is_left_out(model: str, scheme: str, head: str) -> None:
    """Published Qwen3 has both."""
    state = dict(hub_state(model))
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    made = translate_names(state, scheme, config_of(model))
    assert head not in made
    assert facts(rows(made)) == facts(golden(model, scheme))


@pytest.mark.parametrize(("model", "scheme", "head"), TIED)
def test_tied_output_with_values_of_its_own(model: str, scheme: str, head: str) -> None:
    state = dict(hub_state(model))
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1
    with pytest.raises(PlanError, match=f"{head} is tied to .* their values differ") as caught:
        translate_names(state, scheme, config_of(model))
    assert caught.value.code == "CKM208"


@pytest.mark.parametrize(("model", "scheme"), [("llama", "meta"), ("qwen3", "torchtune")])
def test_output_that_is_missing_and_not_tied(model: str, scheme: str) -> None:
    state = {key: value for key, value in hub_state(model).items() if key != "lm_head.weight"}
    with pytest.raises(PlanError, match=r"lm_head\.weight is missing"):
        translate_names(state, scheme, config_of(model))


@pytest.mark.parametrize(
    ("model", "change", "missing"),
    [
        ("gemma", lambda c: c.pop("tie_word_embeddings"), False),
        ("llama", lambda c: c.pop("tie_word_embeddings"), True),
        ("gpt2", lambda c: c.pop("tie_word_embeddings"), False),
    ],
)
def test_models_that_tie_without_saying_so(
    model: str, change: Callable[[dict[str, object]], object], missing: bool
) -> None:
    """Old configs leave out what is the default of their model."""
    config = dict(config_of(model))
    change(config)
    state = {key: value for key, value in hub_state(model).items() if key != "lm_head.weight"}
    if missing:
        with pytest.raises(PlanError, match=r"lm_head\.weight"):
            translate_names(state, "megatron", config)
    else:
        made = translate_names(state, "megatron", config)
        assert facts(rows(made)) == facts(golden(model, "megatron"))
