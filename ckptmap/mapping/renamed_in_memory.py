"""Tell names that a transformers model has in memory from those on disk, for families without a mapping file.

    model.language_model.layers.0.mlp.up_proj.weight     LLaVA in memory: state_dict(), torch.save, FSDP
    language_model.model.layers.0.mlp.up_proj.weight     on disk: save_pretrained

Transformers 5 renames weights while it loads and saves them (5.24, conversion_mapping.py). It loads both: of 74
families that were built small, saved by `state_dict()` and loaded by `from_pretrained`, none lacked a weight.
Other programs know the names on disk, in which models are released. Where the two differ in modules alone,
`renamings_on_disk` says how.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

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


_LANGUAGE_MODEL = """
audioflamingo3 aya_vision fuyu glmasr got_ocr2 granite_speech granite_speech_plus internvl llava llava_next
llava_next_video llava_onevision mistral3 musicflamingo paligemma pp_chart2table qwen2_audio video_llava vipllava voxtral
voxtral_realtime
"""
TEXT_ON_DISK: Mapping[str, str] = {
    **dict.fromkeys(_LANGUAGE_MODEL.split(), "language_model."),
    **dict.fromkeys(["qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl"], ""),
}
"""`model_type` -> what stands on disk before `model.` and `lm_head.`, the names of the text model. Seen by building each with
transformers 5.23 on meta (but for aya_vision), and asking which names it saves."""
BODY, TEXT, HEAD = "model.", "model.language_model.", "lm_head."
TOWERS, INNER = "_tower", "vision_model."
"""How names of vision towers end, and the module that releases older than transformers 5 have inside of them."""


def renamings_on_disk(
    keys: Collection[str], config: Mapping[str, object] | None
) -> Sequence[Mapping[str, str]]:
    """Return the ways to name weights on disk that have these names in memory, as patterns OLD -> NEW: as transformers 5
    saves them, then as before. Empty: the family is not listed, or the keys are not those in memory."""
    before = TEXT_ON_DISK.get(str((config or {}).get("model_type")))
    if before is None or not any(key.startswith(TEXT) for key in keys):
        return []
    way = {f"{TEXT}{{x}}": f"{before}{BODY}{{x}}"}
    if before and any(key.startswith(HEAD) for key in keys):
        way[f"{HEAD}{{x}}"] = f"{before}{HEAD}{{x}}"
    towers = dict(way)
    for key in keys:
        if key.startswith(BODY) and not key.startswith(TEXT):
            module, dot, _ = key.removeprefix(BODY).partition(".")
            end = f"{dot}{{x}}" * bool(dot)
            inner = INNER * module.endswith(TOWERS)
            way[f"{BODY}{module}{end}"] = f"{module}{end}"
            towers[f"{BODY}{module}{end}"] = f"{module}.{inner}{{x}}" if dot else module
    return [way] if towers == way else [way, towers]


def named_as_in_memory(keys: Collection[str], config: Mapping[str, object] | None) -> str | None:
    """Return the first key that the config's model has in memory and not on disk; None: there is none, or the
    family is not listed."""
    kind = str((config or {}).get("model_type"))
    for sign, types in SIGNS:
        if kind in types:
            return next(filter(sign.search, keys), None)
    return None
