"""Layers of SigLIP, whose initialization in transformers needs a parameter `weight`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

import ckptmap
from ckptmap.errors import PlanError

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
VISION = {**SIZES, "image_size": 28, "patch_size": 14}


def paligemma() -> PreTrainedModel:
    vision = {**VISION, "model_type": "siglip_vision_model", "projection_dim": 64}
    text = {
        **SIZES, "model_type": "gemma", "num_key_value_heads": 4, "vocab_size": 64, "head_dim": 16,
    }  # fmt: skip
    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=63,
            projection_dim=64,
            hidden_size=64,
        )
    )


MODELS = {"tower": lambda: SiglipVisionModel(SiglipVisionConfig(**VISION)), "inside": paligemma}


def saved(kind: str, path: Path) -> type[PreTrainedModel]:
    torch.manual_seed(1)
    model = MODELS[kind]()
    model.to(torch.bfloat16).save_pretrained(path)
    return type(model)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ct-int8", "ct-mxfp4"])
@pytest.mark.parametrize(("kind", "tower"), [("tower", "encoder"), ("inside", "vision_tower")])
def test_packed_layers_are_refused_with_a_command_that_works(
    kind: str, tower: str, form: str, tmp_path: Path
) -> None:
    """A tower alone has no other layers but those of its pooling head, which fail, too."""
    made = saved(kind, tmp_path / "in")
    with pytest.raises(PlanError, match=f"no-encode '{tower}\\.\\*'") as caught:
        ckptmap.plan(tmp_path / "in", f"hf-{form}")
    assert caught.value.code == "CKM203"
    if kind == "inside":
        ckptmap.convert(tmp_path / "in", tmp_path / "out", to=f"hf-{form}", no_encode=f"{tower}.*")
        theirs = made.from_pretrained(tmp_path / "out")
        with torch.no_grad():
            assert theirs(input_ids=torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MODELS))
def test_codes_in_the_weight_itself_load(kind: str, tmp_path: Path) -> None:
    made = saved(kind, tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-ct-fp8")
    made.from_pretrained(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MODELS))
def test_transformers_still_fails_on_packed_layers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a later release load them, the refusal can go."""
    monkeypatch.setattr("ckptmap.planning.packed_layers.SIGLIP", frozenset())
    made = saved(kind, tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-ct-int8")
    with pytest.raises(AttributeError, match="weight"):
        made.from_pretrained(tmp_path / "out")
