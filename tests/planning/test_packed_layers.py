"""Layers whose initialization in transformers needs a parameter `weight`: SigLIP's towers, T5, Mask2Former."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

import ckptmap
from ckptmap.errors import PlanError
from ckptmap.planning.filled_layers import filled_names
from tests.support.mask2former import mask2former

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


def t5() -> PreTrainedModel:
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=128,
        decoder_start_token_id=0, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def dinov3() -> PreTrainedModel:
    """Its initialization reads the weight of every linear layer."""
    return transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**{**SIZES, "image_size": 32, "patch_size": 8})
    )


MODELS: dict[str, Any] = {
    "dinov3_vit": dinov3,
    "tower": lambda: SiglipVisionModel(SiglipVisionConfig(**VISION)),
    "inside": paligemma,
    "t5": t5,
    "mask2former": mask2former,
}
SIGLIP = ("tower", "inside")


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
@pytest.mark.parametrize("form", ["ct-int8", "ct-int4"])
def test_some_layers_of_a_model(form: str, tmp_path: Path) -> None:
    """The hint names those of Mask2Former's pixel decoder; all others are packed, and the model computes."""
    made = saved("mask2former", tmp_path / "in")
    with pytest.raises(PlanError, match=r"sampling_offsets\.weight'") as caught:
        ckptmap.plan(tmp_path / "in", f"hf-{form}")
    words = shlex.split(caught.value.hint.partition(", or")[0])
    left = [words[at + 1] for at, word in enumerate(words) if word == "--no-encode"]
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to=f"hf-{form}", no_encode=left)
    ckptmap.convert(tmp_path / "out", tmp_path / "values", to="hf-bf16")
    image = torch.ones(1, 3, 64, 64, dtype=torch.bfloat16)
    found = []
    for name in ("out", "values"):
        model, said = made.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(said.values()), said
        with torch.no_grad():
            found.append(model.eval()(pixel_values=image).masks_queries_logits)
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "dinov3_vit"])
def test_all_layers_of_a_model(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path / "in")
    with pytest.raises(PlanError, match=rf"config.json with {kind}: .*; choose --to hf-ct-fp8"):
        ckptmap.plan(tmp_path / "in", "hf-ct-int8")


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
    monkeypatch.setattr("ckptmap.planning.packed_layers.filled_names", lambda kind: frozenset())
    monkeypatch.setattr("ckptmap.planning.packed_layers.FILLS_EVERY", frozenset())
    made = saved(kind, tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-ct-int8")
    with pytest.raises(AttributeError, match="weight"):
        made.from_pretrained(tmp_path / "out")


LOOKED_AT = """
afmoe align altclip bridgetower chinese_clip clap clipseg clvp conditional_detr d_fine dab_detr data2vec
deformable_detr deimv2 detr distilbert esm esmfold2 evolla falcon_mamba flaubert funnel git gpt2 gpt_bigcode
grounding_dino groupvit kosmos2 longcat_flash longt5 lw_detr mamba mamba2 mask2former maskformer minicpm_ocr
minicpmv4_6 minicpmv4_7 mlcd mm_grounding_dino mt5 nanochat nemotron3_diarization neomme omdet_turbo oneformer
owlv2 owlvit patchtsmixer phi4_multimodal pix2struct pop2piano pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4
qwen3_5_moe qwen3_next qwen3_omni_moe qwen4_exp recurrent_gemma rf_detr rt_detr rt_detr_v2 sam3_lite_text
seamless_m4t seamless_m4t_v2 sew sew_d siglip siglip2 speecht5 switch_transformers t5 t5gemma t5gemma2
table_transformer udop umt5 unispeech unispeech_sat unlimited_ocr videoprism vitdet vjepa2 wav2vec2
wav2vec2_bert wav2vec2_conformer wavlm wavtokenizer whisper x_clip xlm xlstm
"""
"""Families whose `_init_weights` names a weight. Those of `filled_layers` fail where a layer lacks it; the others name
embeddings, convolutions and routers, or a layer in a case that no released config has."""
BODY = re.compile(r"    def _init_weights\(.*?(?=\n    def |\n    @|\n\w|\Z)", re.S)
READ = re.compile(r"\w+(?:\.\w+)+(?:\[-?\d+\])?(?:\.\w+)*\.weight\b|\w+\[[^\]]+\]\.weight\b")


def test_every_family_that_names_weights_was_looked_at() -> None:
    """Of the installed release: a family that is new to it is met here, not by a user."""
    folder = Path(transformers.__file__).parent / "models"
    naming = {
        file.parent.name
        for file in folder.glob("*/modeling_*.py")
        if any(map(READ.search, BODY.findall(file.read_text(encoding="utf-8"))))
    }
    assert naming == {name for name in LOOKED_AT.split() if (folder / name).is_dir()}


@pytest.mark.parametrize("kind", ["siglip_vision_model", "t5", "mask2former"])
def test_the_table_is_what_transformers_does(kind: str) -> None:
    """Each module is initialized while one of the layers inside lacks its weight."""
    made = {"siglip_vision_model": MODELS["tower"], "t5": t5, "mask2former": mask2former}[kind]
    with torch.device("meta"):
        model = made()
        filled = set()
        for stem, module in model.named_modules():
            for path, layer in module.named_modules():
                if path and type(layer) is torch.nn.Linear and path.count(".") < 2:
                    weight = layer._parameters.pop("weight")
                    try:
                        model._init_weights(module)
                    except AttributeError:
                        *_, above, last = f"..{stem}.{path}".split(".")
                        filled.add(f"{above}[]" if last.isdigit() else last)
                    layer._parameters["weight"] = weight
    assert filled - {"lm_head"} <= filled_names(kind)
    assert len(filled) > 3


def test_a_layer_that_others_share_with_its_bias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a later release load it, the refusal can go."""
    config = transformers.AutoConfig.for_model(
        "pp_doclayout_v3", d_model=128, encoder_layers=1, decoder_layers=1
    )
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(tmp_path / "in")
    with pytest.raises(PlanError, match=r"enc_\w+_head.* pads its bias") as caught:
        ckptmap.plan(tmp_path / "in", "hf-bnb-nf4")
    assert caught.value.code == "CKM203"
    for hinted in ("hf-bnb-int8", "full-bnb-nf4"):
        assert f"--to {hinted}" in caught.value.hint
        assert ckptmap.plan(tmp_path / "in", hinted)
    monkeypatch.setattr("ckptmap.planning.packed_layers.PADS_BIASES", {})
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-bnb-nf4")
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert loaded.enc_score_head.bias.shape != model.enc_score_head.bias.shape


def test_a_tower_that_fills_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DINOv3 within LLaVA; the language model beside it is loaded. Both hints work."""
    sizes = {
        "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    }  # fmt: skip
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, **sizes},
        vision_config={"model_type": "dinov3_vit", "image_size": 16, "patch_size": 8, **sizes},
        image_token_index=63,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "in")
    with pytest.raises(PlanError, match=r"^vision_tower.* with dinov3_vit") as caught:
        ckptmap.plan(tmp_path / "in", "hf-ct-int8")
    (glob,) = re.findall(r"--no-encode '([^']+)'", caught.value.hint)
    for number, given in enumerate(
        ({"to": "hf-ct-int8", "no_encode": (glob,)}, {"to": "hf-ct-fp8"})
    ):
        out = tmp_path / str(number)
        ckptmap.convert(tmp_path / "in", out, **given)
        _, told = type(model).from_pretrained(out, output_loading_info=True)
        assert not any(told.values()), told
    monkeypatch.setattr("ckptmap.planning.packed_layers.TOWERS", {})
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-ct-int8")
    with pytest.raises(AttributeError, match="weight"):
        type(model).from_pretrained(tmp_path / "out")
