"""Experts that transformers stacks while loading: which of compressed-tensors' forms it decodes there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import ckptmap
from ckptmap.errors import PlanError
from tests.support.int8_models import loaded, logits

EXPERT = "model.layers.0.block_sparse_moe.experts.1.w2.weight"


def mixtral(path: Path) -> Path:
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=2, num_experts_per_tok=2,
    )  # fmt: skip
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ct-mxfp4", "ct-mxfp8", "ct-int8", "ct-fp8"])
def test_what_is_written_has_the_logits_of_its_values(form: str, tmp_path: Path) -> None:
    """transformers 5.23 takes the exponents of MXFP8 experts for scales, so that these stay dense."""
    ckptmap.convert(mixtral(tmp_path / "in"), tmp_path / "out", to=f"hf-{form}")
    ckptmap.convert(tmp_path / "out", tmp_path / "plain", to="hf-bf16")
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(loaded(tmp_path / "plain")))
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert (ckpt[EXPERT].encoding == "dense") == (form == "ct-mxfp8")


@pytest.mark.parametrize(
    ("form", "kept"), [("ct-nvfp4", ()), ("ct-int8", "*.experts.*"), ("ct-mxfp4", "*.w2.*")]
)
def test_dense_experts_are_refused_beside_packed_codes(
    form: str, kept: str | tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=r"experts\.0\.w\d\.weight: cannot stay dense") as caught:
        ckptmap.plan(mixtral(tmp_path / "in"), f"hf-{form}", no_encode=kept)
    assert caught.value.code == "CKM203"


@pytest.mark.slow
def test_transformers_decodes_nvfp4_experts_to_other_values(tmp_path: Path) -> None:
    """Should a later release decode them, the refusal and the note can go."""
    to, names = "hf-ct-nvfp4", ("*_proj.weight", "*.experts.*.weight")
    ckptmap.convert(mixtral(tmp_path / "in"), tmp_path / "out", to=to, encode=names)
    ckptmap.convert(tmp_path / "out", tmp_path / "plain", to="hf-bf16")
    assert not torch.equal(logits(loaded(tmp_path / "out")), logits(loaded(tmp_path / "plain")))


@pytest.mark.parametrize("form", ["ct-nvfp4", "ct-mxfp8"])
def test_experts_are_encoded_for_other_programs_with_a_note(form: str, tmp_path: Path) -> None:
    names = ("*_proj.weight", "*.experts.*.weight")
    plan = ckptmap.plan(mixtral(tmp_path / "in"), f"hf-{form}", encode=names)
    (note,) = (note for note in plan.notes if "transformers 5.23" in note)
    assert form in note and ".experts.0.w1.weight and other experts" in note


def qwen(path: Path) -> Path:
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=256, moe_intermediate_size=256, num_hidden_layers=1, head_dim=64,
        num_attention_heads=4, num_key_value_heads=4, num_experts=2, num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.slow
def test_tiled_float8_experts_are_dense_for_transformers(tmp_path: Path) -> None:
    """It multiplies the codes of stacked experts with the scales as they are, which fits no tiles."""
    ckptmap.convert(qwen(tmp_path / "dense"), tmp_path / "in", to="hf-fp8")
    report = ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-ct-fp8")
    ckptmap.convert(tmp_path / "in", tmp_path / "plain", to="hf-bf16")
    assert any("is written dense" in note and "an expert" in note for note in report.notes)
    theirs, ours = loaded(tmp_path / "out"), loaded(tmp_path / "plain").state_dict()
    logits(theirs)  # decompresses the attention
    for name, value in theirs.state_dict().items():
        if "experts" in name:
            assert torch.equal(value, ours[name])
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert ckpt["model.layers.0.self_attn.q_proj.weight"].encoding == "ct-fp8"


@pytest.mark.slow
def test_tiled_experts_keep_their_codes_for_other_programs_with_a_note(tmp_path: Path) -> None:
    ckptmap.convert(qwen(tmp_path / "dense"), tmp_path / "in", to="hf-fp8")
    plan = ckptmap.plan(tmp_path / "in", "hf-ct-fp8", encode="*_proj.weight")
    assert not any("is written dense" in note for note in plan.notes)
    assert any("a scale of tiles or groups" in note for note in plan.notes)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ct-int8", "ct-fp8", "ct-nvfp4"])
def test_experts_of_another_form_than_the_attention_are_found_by_a_pattern(
    form: str, tmp_path: Path
) -> None:
    """transformers takes the first group of the config, unless another's pattern names experts."""
    experts = "*.experts.*.weight"
    ckptmap.convert(qwen(tmp_path / "dense"), tmp_path / "in", to="hf-ct-mxfp4", encode=experts)
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to=f"hf-{form}", no_encode=experts)
    ckptmap.convert(tmp_path / "out", tmp_path / "plain", to="hf-bf16")
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(loaded(tmp_path / "plain")))


@pytest.mark.slow
def test_experts_of_two_forms_are_refused(tmp_path: Path) -> None:
    experts = "*.experts.*.weight"
    ckptmap.convert(qwen(tmp_path / "dense"), tmp_path / "in", to="hf-ct-mxfp4", encode=experts)
    with pytest.raises(PlanError, match=r"experts\.0.* ct-mxfp4 beside .*experts\.1.* ct-int8"):
        ckptmap.plan(tmp_path / "in", "hf-ct-int8", no_encode="*.experts.0.*")
