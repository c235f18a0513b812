"""Tell names that a transformers model has in memory from those on disk, for families without a mapping file.

    model.language_model.layers.0.mlp.up_proj.weight     LLaVA in memory: state_dict(), torch.save, FSDP
    language_model.model.layers.0.mlp.up_proj.weight     on disk: save_pretrained

Transformers 5 renames weights while it loads and saves them (5.24, conversion_mapping.py). It loads both: of 74
families that were built small, saved by `state_dict()` and loaded by `from_pretrained`, none lacked a weight.
Other programs know the names on disk, in which models are released.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_TOWERS = """
aria audioflamingo3 aya_vision cosmos3_edge fuyu glmasr got_ocr2 granite_speech granite_speech_plus
hunyuan_vl internvl llava llava_next llava_next_video llava_onevision mistral3 musicflamingo paddleocr_vl
paligemma pp_chart2table qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_vl shieldgemma2
step3p7 video_llava vipllava voxtral voxtral_realtime
"""
_VIT = """
beit deit dinov2 dinov2_with_registers ijepa lw_detr pixio segformer swin vit vit_mae vit_msn vivit
"""
SIGNS: tuple[tuple[re.Pattern[str], frozenset[str]], ...] = tuple(
    (re.compile(sign), frozenset(types.split()))
    for sign, types in (
        (r"^model\.language_model\.layers\.\d+\.", _TOWERS),
        (r"\.attention\.k_proj\.", _VIT),
        (r"^model\.layers\.\d+\.self_attn\.", "exaone"),
        (r"\.block_sparse_moe\.experts\.", "granitemoe granitemoehybrid granitemoeshared"),
        (r"(?:^|\.)layers\.\d+\.post_mlp_layernorm\.", "gte jina_embeddings_v3 nomic_bert"),
        (r"\.layers\.\d+\.mlp\.fc1\.", "pp_doclayout_v3 pp_doclayout_v4 rt_detr rt_detr_v2"),
        (r"\.layers\.\d+\.self_attn\.o_proj\.", "d_fine"),
        (r"\.layers\.\d+\.self_attn_layer_norm\.", "rf_detr"),
        (r"(?:^|\.)layer\.\d+\.norm1\.", "radio sapiens2 tipsv2"),
        (r"^model\.layer\.\d+\.norm1\.", "dinov3_vit"),
        (r"^model\.stages\.\d+\.", "dinov3_convnext"),
        (r"\.mlp\.experts\.gate_up_proj$", "aria_text"),
        (r"\.layers\.\d+\.linear_attn\.conv1d\.", "olmo_hybrid"),
        (r"\.layers\.\d+\.attn_hc\.", "hy_v4"),
        (r"\.encoder\.layers\.\d+\.attention\.self\.", "altclip"),
        (r"\.attention\.attention\.(?:query|value)\.bias$", "videomae"),
        (r"\.self_attn\.sinks$", "flint"),
        (r"^model\.[HL]_module\.layers\.\d+\.self_attn\.", "hrm_text"),
        (r"^decoder\.decoder_seanet\.", "mimi"),
        (r"(?:^|\.)layers\.\d+\.mlp\.fc1\.", "timesfm2_5"),
        (r"^model\.embed_tokens\.", "inkling2_text"),
    )
)  # fmt: skip
"""(what a name in memory has and none on disk, the `model_type` of the families)."""


def named_as_in_memory(keys: Collection[str], config: Mapping[str, object] | None) -> str | None:
    """Return the first key that the config's model has in memory and not on disk; None: there is none, or the
    family is not listed."""
    kind = str((config or {}).get("model_type"))
    for sign, types in SIGNS:
        if kind in types:
            return next(filter(sign.search, keys), None)
    return None
