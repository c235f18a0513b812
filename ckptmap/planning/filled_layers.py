"""Layers whose `weight` transformers fills before it loads them, by the model's type: a table of facts.

The initialization of such a model reads `module.sampling_offsets.weight` by name, though the file holds the layer.
`layers[]` is any numbered layer of `layers`. Source: `_init_weights` in modeling_*.py of transformers 5.23, run for
each class with a layer that has no weight; tests/planning/test_packed_layers.py does that for the installed release.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

_FILLED = """
align: text_projection
altclip chinese_clip owlv2 owlvit xclip: text_projection visual_projection
altclip_vision_model chinese_clip_vision_model clipseg_text_model clipseg_vision_model groupvit_text_model
    groupvit_vision_model kosmos_2_text_model kosmos_2_vision_model mlcd_vision_model owlv2_text_model
    owlv2_vision_model owlvit_text_model owlvit_vision_model phi4_multimodal_vision siglip2_text_model
    siglip2_vision_model siglip_text_model siglip_vision_model xclip_text_model xclip_vision_model: fc1
    fc2 k_proj out_proj q_proj v_proj
clipseg: fc1 fc2 k_proj out_proj q_proj text_projection v_proj visual_projection
clvp_encoder: fc2 proj projection
d_fine: attention_weights enc_score_head layers[] sampling_offsets
data2vec-audio sam3_lite_text_text_model seamless_m4t seamless_m4t_v2 speecht5 wav2vec2-bert wavlm:
    projection
deformable_detr: attention_weights output_proj sampling_offsets value_proj
deimv2: attention_weights down_proj enc_score_head gate_proj layers[] sampling_offsets up_proj
esmfold2: adaln_linear attn_gate mlp_gate out_proj
falcon_mamba mamba: dt_proj out_proj
gpt_bigcode: c_proj
grounding-dino mm-grounding-dino: attention_weights layers[] out_text_proj out_vision_proj output_proj
    sampling_offsets text_proj value_proj values_text_proj values_vision_proj vision_proj
groupvit: fc1 fc2
kosmos-2: dense
longt5 pop2piano switch_transformers udop: k o q v wi wi_0 wi_1 wo
mamba2 t5gemma t5gemma2: out_proj
mask2former: 0[] 1[] 2[] attention_weights output_proj sampling_offsets value_proj
modernbert: Wi Wo Wqkv
modernvbert: modality_projection
mt5 t5 umt5: dense k o out_proj q v wi wi_0 wi_1 wo
nanochat: o_proj
neomme: down_proj o_proj
omdet-turbo: encoder_vision_features[] layers[]
oneformer: 0[] 1[] 2[] attention_weights output_proj sampling_offsets value_proj
pix2struct_text_model: key query value wi_0 wi_1 wo
pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 rt_detr rt_detr_v2: attention_weights enc_score_head
    output_proj sampling_offsets value_proj
recurrent_gemma: k_proj linear_out linear_x linear_y o_proj q_proj v_proj
unispeech unispeech-sat: projection weight_proj
vjepa2: fc2 out_proj
wav2vec2 wav2vec2-conformer: project_hid project_q projection weight_proj
"""
"""Model types: names of their layers. A line that is indented goes on with the one before it."""

_FILLS_EVERY = """
blt bridgetower clap cvt dinov2 dinov2_with_registers dinov3_vit fastspeech2_conformer hiera ijepa
mgp-str modernbert-decoder phi4_multimodal_vision pix2struct pvt pvt_v2 radio rwkv sapiens2 seggpt swiftformer swin2sr
timesformer tipsv2_vision_model videoprism videoprism_text_model videoprism_vision_model vitdet vjepa2
xcodec xlstm
"""
FILLS_EVERY = frozenset(_FILLS_EVERY.split())
"""Model types that fill the `weight` of each linear layer that they meet, without asking whether it has one.

SigLIP's do, too, and are listed by name above, since they are mostly towers of other models."""
EVERY: frozenset[str] = frozenset({""})
"""What stands for the names of all layers."""


def filled_names(model_type: str) -> frozenset[str]:
    """Return the last names of the layers that transformers fills in a model of this type."""
    return _table().get(model_type, frozenset())


@cache
def _table() -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for line in _lines():
        types, _, names = line.partition(":")
        found |= dict.fromkeys(types.split(), frozenset(names.split()))
    return found


def _lines() -> Iterator[str]:
    return iter(_FILLED.replace("\n    ", " ").strip().splitlines())
