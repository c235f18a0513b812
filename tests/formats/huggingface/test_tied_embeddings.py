"""One rule says whether a config.json ties the embeddings: that of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ckptmap
from ckptmap.formats.huggingface.tied_embeddings import FORWARDING, TEXT_MODELS, states_tied
from ckptmap.mapping.dims_table import Dims
from ckptmap.mapping.expressions import parse_expr

TIED = "tie_word_embeddings"
TINY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 2,
    "num_experts_per_tok": 1, "vocab_size": 64,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4},
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({}, None),
        ({TIED: None}, None),
        ({TIED: True}, True),
        ({TIED: False}, False),
        ({TIED: False, "text_config": {TIED: True}}, False),
        ({TIED: True, "text_config": {TIED: False}}, True),
        ({TIED: False, "model_type": "qwen2_5_vl", "text_config": {TIED: True}}, True),
        ({TIED: None, "text_config": {TIED: True}}, True),
        ({"decoder": {TIED: True}}, True),
        ({"text_config": None}, None),
    ],
)
def test_the_outermost_statement_holds(config: dict[str, Any], tied: bool | None) -> None:
    assert states_tied(config) is tied
    holds = Dims({}, config).holds(parse_expr(f"{TIED} ?? true"))
    assert holds is (tied is not False), "mapping files ask by the same rule"


def _texts(kind: str) -> list[str]:
    parts = getattr(CONFIG_MAPPING[kind], "sub_configs", None) or {}
    return [name for name in TEXT_MODELS if name in parts]


def test_every_config_of_transformers_with_a_text_model_reads_as_transformers_reads_it() -> None:
    """What is false outside and true inside is tied by some classes, and the reverse by all."""
    kinds = [kind for kind in CONFIG_MAPPING if _texts(kind)]
    assert len(kinds) > 100
    compared = set()
    for kind in kinds:
        for own, inner in ((False, True), (True, False)):
            config = {"model_type": kind, TIED: own, _texts(kind)[0]: {TIED: inner}}
            try:
                theirs = getattr(CONFIG_MAPPING[kind].from_dict(config), TIED)
            except Exception:  # their class cannot be made from so little
                continue
            if (kind, own) != ("vibevoice", True):
                assert states_tied(config) is theirs, (kind, own)
            compared.add(kind)
    assert len(compared) > 100 and compared >= FORWARDING


def test_untied_outside_and_tied_inside_as_transformers_writes_qwen3_vl_moe(tmp_path: Path) -> None:
    """Its lm_head is no copy of the embedding, and was refused with CKM310 while running."""
    config = transformers.Qwen3VLMoeConfig(text_config=TINY, vision_config=VISION)
    torch.manual_seed(0)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "in")
    written = json.loads((tmp_path / "in" / "config.json").read_text())
    written["text_config"][TIED] = True
    (tmp_path / "in" / "config.json").write_text(json.dumps(written))
    assert written[TIED] is False
    assert ckptmap.plan(tmp_path / "in", "hf").tied == {}
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight)
    loaded = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_class_that_never_ties_keeps_both_weights(tmp_path: Path) -> None:
    """BigBird-Pegasus' decoder alone saves both, though its config ties them, and loads both."""
    config = transformers.BigBirdPegasusConfig(
        vocab_size=64, d_model=32, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32,
        encoder_layers=1, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BigBirdPegasusForCausalLM(config)
    model.save_pretrained(tmp_path / "in")
    assert json.loads((tmp_path / "in" / "config.json").read_text()).get(TIED, True)
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-bf16")
    loaded, told = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    for get in ("get_input_embeddings", "get_output_embeddings"):
        wanted = getattr(model, get)().weight.to(torch.bfloat16)
        assert torch.equal(getattr(loaded, get)().weight.to(torch.bfloat16), wanted)
    whole = transformers.BigBirdPegasusForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "whole")
    assert states_tied(json.loads((tmp_path / "whole" / "config.json").read_text())) is not False
