"""Tell whether weights have the names that a transformers model has in memory, and not those on disk.

    model.layers.0.mlp.experts.gate_up_proj [e, 2m, i]    in memory: all experts of a layer in one tensor
    model.layers.0.mlp.experts.3.gate_proj.weight [m, i]  on disk

    model.language_model.layers.0.mlp.up_proj.weight      LLaVA in memory
    language_model.model.layers.0.mlp.up_proj.weight      on disk

`save_pretrained` of transformers 5 writes the names on disk, torch.save and FSDP those in memory (5.24,
conversion_mapping.py). Transformers 5 loads both: of 74 families that were built small, saved by `state_dict()` and
loaded by `from_pretrained`, none lacked a weight. Transformers 4 and inference servers know only those on disk.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ckptmap.mapping.catalog import CatalogEntry, available
from ckptmap.mapping.detect import MEMORY, KeyCounts, model_types

_SPLIT = """
afmoe axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32
deepseek_v4 dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm4v_moe glm5_next
glm5_next_text glm_moe_dsa hunyuan_v1_moe hy_v3 jamba kimi_k25 kimi_linear kolibri1 laguna lfm2_moe
longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl mistral_large4_text mixtral
nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe
qwen3_omni_moe_text qwen3_omni_moe_thinker qwen4_exp_text sarvam_mla sarvam_moe solar_open
"""
SPLIT_ON_DISK = frozenset(_SPLIT.split())
"""Model types whose experts transformers 5.24 joins when it loads a model and splits when it saves one
(conversion_mapping.py, converters with MergeModulelist). Others, such as gpt_oss and llama4, have
joined experts on disk, too."""
JOINED = (".experts.gate_up_proj", ".experts.up_proj")
"""How names of joined experts end."""

_TOWERS = """
audioflamingo3 aya_vision cosmos3_edge fuyu glmasr got_ocr2 granite_speech granite_speech_plus
hunyuan_vl internvl llava llava_next llava_next_video llava_onevision mistral3 mllama musicflamingo
paligemma pp_chart2table qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_vl shieldgemma2
step3p7 vibevoice_asr video_llava vipllava voxtral voxtral_realtime
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
        (r"(?:^|\.)layers\.\d+\.post_mlp_layernorm\.", "gte jina_embeddings_v3 nomic_bert"),
        (r"\.layers\.\d+\.mlp\.fc1\.", "pp_doclayout_v3 pp_doclayout_v4 rt_detr rt_detr_v2"),
        (r"\.layers\.\d+\.self_attn\.o_proj\.", "d_fine"),
        (r"\.layers\.\d+\.self_attn_layer_norm\.", "rf_detr"),
        (r"(?:^|\.)layer\.\d+\.norm1\.", "radio sapiens2 tipsv2"),
        (r"^model\.layer\.\d+\.norm1\.", "dinov3_vit"),
        (r"^model\.stages\.\d+\.", "dinov3_convnext"),
        (r"\.layers\.\d+\.linear_attn\.conv1d\.", "olmo_hybrid"),
        (r"\.encoder\.layers\.\d+\.attention\.self\.", "altclip"),
        (r"\.attention\.attention\.(?:query|value)\.bias$", "videomae"),
        (r"^model\.[HL]_module\.layers\.\d+\.self_attn\.", "hrm_text"),
        (r"^decoder\.decoder_seanet\.", "mimi"),
        (r"(?:^|\.)layers\.\d+\.mlp\.fc1\.", "timesfm2_5"),
        (r"^model\.embed_tokens\.", "inkling2_text"),
    )
)  # fmt: skip
"""(what a name in memory has and none on disk, the `model_type` of the families)."""


def memory_scheme(
    keys: Collection[str], config: Mapping[str, object] | None
) -> CatalogEntry | None:
    """Return the scheme of a model in memory that these keys have; None: they have another.

    config  the model's config.json, which must be of a family that the scheme is for; None: any
    """
    types = set(model_types(config))
    entries = [
        entry
        for entry in available()
        if entry.name == MEMORY and (config is None or types.intersection(entry.models))
    ]
    if not entries:
        return None
    seen = KeyCounts(keys)
    return next((entry for entry in entries if seen.match(entry.detect)), None)


def joined_experts(keys: Collection[str], config: Mapping[str, object] | None) -> str | None:
    """Return the first key of joined experts, where the config's model has them split on disk; else None."""
    if not SPLIT_ON_DISK.intersection(model_types(config)):
        return None
    return next((key for key in keys if key.endswith(JOINED)), None)


def named_as_in_memory(keys: Collection[str], config: Mapping[str, object] | None) -> str | None:
    """Return the first key that the config's model has in memory and not on disk, for families without a mapping file;
    None: there is none, or the family is not listed."""
    kind = str((config or {}).get("model_type"))
    for sign, types in SIGNS:
        if kind in types:
            return next(filter(sign.search, keys), None)
    return None
