"""Layers that transformers renames or cuts while loading: what it would not find is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import ckptmap
from ckptmap.errors import PlanError
from ckptmap.formats.huggingface.loaded_names import CUT
from tests.support.bnb_cases import refused

HARMLESS = (
    "conv1d",
    "mlp.gate.",
    "moe_statics",
    "lm_head",
    "ngram_embedding",
    "cross_pass_queries",
)
"""What transformers cuts or joins that no library quantizes: convolutions, routers, heads and embeddings."""
FILE = "hf-bnb-nf4", "hf-bnb-int8", "hf-fp8", "hf-ct-int8", "hf-int8"


def nomic_bert() -> Any:
    """One layer `Wqkv` on disk is three in memory."""
    config = transformers.AutoConfig.for_model(
        "nomic_bert", vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    return transformers.AutoModel.from_config(config)


def exaone() -> Any:
    """Its layers have the names of GPT-2 on disk and those of Llama in memory."""
    config = transformers.AutoConfig.for_model(
        "exaone", vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def segformer() -> Any:
    config = transformers.SegformerConfig(
        hidden_sizes=[64] * 4, num_attention_heads=[1] * 4, depths=[1] * 4, decoder_hidden_size=64
    )
    return transformers.SegformerForImageClassification(config)


def olmo_hybrid() -> Any:
    """transformers joins three convolutions, by a rule that fails on parts of compressed-tensors."""
    config = transformers.AutoConfig.for_model(
        "olmo_hybrid", vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_num_key_heads=4, linear_num_value_heads=4, pad_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def dinov2() -> Any:
    """It has no layer `weights_in`, which others of its family have."""
    return transformers.Dinov2Model(
        transformers.Dinov2Config(
            hidden_size=128, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8
        )
    )


def bert_generation() -> Any:
    """Its head `lm_head.decoder` is tied to the embedding, so that no file holds its weight."""
    config = transformers.BertGenerationConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertGenerationDecoder(config)


def gpt_neox_japanese() -> Any:
    """Its head `embed_out` is tied, too."""
    config = transformers.AutoConfig.for_model(
        "gpt_neox_japanese", vocab_size=128, hidden_size=64, intermediate_multiple_size=2,
        num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def whisper() -> Any:
    """The decoder alone, whose head `proj_out` is tied."""
    config = transformers.WhisperConfig(
        vocab_size=128, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_target_positions=32,
        pad_token_id=0, is_encoder_decoder=False,
    )  # fmt: skip
    return transformers.WhisperForCausalLM(config)


def phimoe() -> Any:
    """Its routers are linear layers, called `block_sparse_moe.gate` on disk and `mlp.router` in memory."""
    config = transformers.PhimoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_local_experts=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=1, pad_token_id=None,
    )  # fmt: skip
    return transformers.PhimoeForCausalLM(config)


def axk2() -> Any:
    """Its gated norms hold linear layers, called `W_down` on disk and `mlp.fc1` in memory."""
    config = transformers.AutoConfig.for_model(
        "axk2", vocab_size=128, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=32,
        q_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, pad_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def ibert() -> Any:
    """Its linear layers are of a class of its own."""
    config = transformers.AutoConfig.for_model(
        "ibert", vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.AutoModel.from_config(config)


def saved(make: Any, path: Path) -> Any:
    torch.manual_seed(0)
    model = make().bfloat16().eval()
    model.save_pretrained(path)
    return model


def alike(path: Path, model: Any) -> None:
    """transformers loads the directory, every key of it used, and its logits are near to those of `model`."""
    loaded, said = type(model).from_pretrained(path, output_loading_info=True)
    assert not any(said.values()), said
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        theirs, found = (m.bfloat16()(tokens).logits.float() for m in (model, loaded.eval()))
    assert torch.cosine_similarity(found.flatten(), theirs.flatten(), 0) > 0.9


def test_every_model_type_whose_layers_transformers_cuts_is_listed() -> None:
    """Of the installed release: a family that is new to it is met here, not by a user."""
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("llava")
    rules = conversion_mapping._checkpoint_conversion_mapping_cache
    cut = {
        kind
        for kind, found in rules.items()
        if kind in CONFIG_MAPPING_NAMES
        for rule in found
        if any(type(op).__name__ != "LayerPairCollapse" for op in getattr(rule, "operations", ()))
        and "expert" not in f"{rule.source_patterns}{rule.target_patterns}"
        and not any(word in f"{rule.source_patterns}".replace("\\", "") for word in HARMLESS)
    }
    assert cut | {"molmo2_text"} == CUT.intersection(
        CONFIG_MAPPING_NAMES
    )  # it has the rules of its class


@pytest.mark.parametrize("to", FILE)
def test_what_is_cut_while_loading_is_refused(to: str, tmp_path: Path) -> None:
    saved(nomic_bert, tmp_path / "in")
    with refused(PlanError, "CKM203", match=r"cuts or joins layers of nomic_bert"):
        ckptmap.plan(tmp_path / "in", to)
    assert ckptmap.plan(tmp_path / "in", "hf-bf16") and ckptmap.plan(tmp_path / "in", "full-int8")


def test_transformers_still_loses_codes_that_it_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a later release find them, the refusal can go."""
    monkeypatch.setattr("ckptmap.planning.renamed_layers.CUT", frozenset())
    model = saved(nomic_bert, tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-bnb-int8")
    _, said = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert "layers.0.self_attn.q_proj.SCB" in said["unexpected_keys"]


@pytest.mark.skipif("exaone" not in CONFIG_MAPPING_NAMES, reason="transformers 5.24 has EXAONE 3")
@pytest.mark.parametrize("to", FILE)
def test_exaone_is_loaded(to: str, tmp_path: Path) -> None:
    """Its `mlp.c_proj` stays dense, as the layers of that name do in GPT-2, under its name in memory."""
    model = saved(exaone, tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to=to)
    alike(tmp_path / "out", model)


def test_a_layer_that_stays_dense_under_a_name_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """bitsandbytes is told of it by the name on disk, and would take it for a quantized one."""
    saved(segformer, tmp_path / "in")
    assert ckptmap.plan(tmp_path / "in", "hf-bnb-int8")
    with refused(PlanError, "CKM203", match=r"dense1\.weight: cannot stay dense beside bnb-int8"):
        ckptmap.plan(tmp_path / "in", "hf-bnb-int8", no_encode=("*.dense1.weight",))


@pytest.mark.parametrize("to", ["hf-int8", "hf-float8"])
def test_the_hint_is_not_refused_itself(to: str, tmp_path: Path) -> None:
    """bitsandbytes finds by module what it takes itself; a layer that stays dense is refused there, too."""
    saved(segformer, tmp_path / "in")
    kept = ("*.dense1.weight",)
    with refused(PlanError, "CKM203", match=r"would not find") as caught:
        ckptmap.plan(tmp_path / "in", to)
    assert "--to hf-bnb-int8" in caught.value.hint
    assert ckptmap.plan(tmp_path / "in", "hf-bnb-int8")
    with refused(PlanError, "CKM203", match=r"would not find") as caught:
        ckptmap.plan(tmp_path / "in", to, no_encode=kept)
    assert "bnb" not in caught.value.hint
    full = to.replace("hf", "full")
    assert f"--to {full}" in caught.value.hint
    assert ckptmap.plan(tmp_path / "in", full, no_encode=kept)


@pytest.mark.parametrize(
    ("make", "to", "loads"),
    [(olmo_hybrid, "hf-ct-int8", "hf-bnb-int8"), (dinov2, "hf-ct-fp8", "hf-bnb-nf4"), (dinov2, "hf-fp8", "hf-int8")],
)  # fmt: skip
def test_a_rule_that_fails_beside_the_parts_of_a_library(
    make: Any, to: str, loads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused for that library alone, and rightly so: should a later release load it, the refusal can go."""
    model = saved(make, tmp_path / "in")
    with refused(PlanError, "CKM203", match=r"cuts or joins layers of"):
        ckptmap.plan(tmp_path / "in", to)
    ckptmap.convert(tmp_path / "in", tmp_path / "loads", to=loads)
    _, said = type(model).from_pretrained(tmp_path / "loads", output_loading_info=True)
    assert not any(said.values()), said
    monkeypatch.setattr("ckptmap.planning.renamed_layers.FAILS_BESIDE", {})
    ckptmap.convert(tmp_path / "in", tmp_path / "fails", to=to)
    with pytest.raises((RuntimeError, ValueError), match=r"source keys|automatic conversion"):
        type(model).from_pretrained(tmp_path / "fails")


@pytest.mark.parametrize("make", [bert_generation, gpt_neox_japanese, whisper, phimoe, axk2])
def test_what_stays_dense_is_declared_by_its_name_in_memory(make: Any, tmp_path: Path) -> None:
    model = saved(make, tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-ct-int8")
    alike(tmp_path / "out", model)


def test_layers_of_a_class_of_their_own_are_refused(tmp_path: Path) -> None:
    saved(ibert, tmp_path / "in")
    with refused(PlanError, "CKM203", match="of ibert of a class of its own"):
        ckptmap.plan(tmp_path / "in", "hf-bnb-nf4")
