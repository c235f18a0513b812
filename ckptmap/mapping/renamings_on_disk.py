"""How names that a vision-language model has in memory become those that `save_pretrained` writes.

    model.language_model.layers.0.mlp.up_proj.weight      LLaVA in memory
    language_model.model.layers.0.mlp.up_proj.weight      on disk

Source: transformers 5.24, conversion_mapping.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

_LANGUAGE_MODEL = """
audioflamingo3 aya_vision fuyu glmasr got_ocr2 granite_speech granite_speech_plus internvl llava llava_next
llava_next_video llava_onevision mistral3 mllama musicflamingo paligemma pp_chart2table qwen2_audio vibevoice_asr
video_llava vipllava voxtral voxtral_realtime
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
