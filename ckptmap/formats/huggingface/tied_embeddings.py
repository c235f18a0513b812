"""Tell whether a config.json ties the output embedding of a model to its input embedding.

    {"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}  ->  not tied

The rule is that of transformers 5: the model that has the head reads `tie_word_embeddings` of its own
config, the outermost (`get_expanded_tied_weights_keys` in modeling_utils.py). Where that does not state
it, the config of the text model inside does (`get_text_config(decoder=True)` in configuration_utils.py).
A few model types forward a `true` from the text model, where transformers 4 wrote it, to the outermost
config (their `__post_init__`).
"""

from __future__ import annotations

from collections.abc import Mapping

TIED = "tie_word_embeddings"
TEXT_MODELS = ("decoder", "generator", "text_config")
"""The keys under which a config holds that of its text model, as `get_text_config` looks them up."""
FORWARDING = frozenset({
    "fast_vlm", "glm4v", "glm4v_moe", "glm_ocr", "hunyuan_vl", "llava", "llava_next_video",
    "llava_onevision", "minimax_m3_vl", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "shieldgemma2",
    "vibevoice", "video_llama_3",
})  # fmt: skip
"""The model types of transformers 5.23 that tie where only the config of the text model says true."""

NEVER_TIED = frozenset({"BigBirdPegasusForCausalLM"})
"""Classes of transformers 5.23 that read no such statement: they lack `_tied_weights_keys`, and save both weights."""


def states_tied(config: Mapping[str, object]) -> bool | None:
    """Return whether a config ties the embeddings; None: it does not say."""
    classes = config.get("architectures")
    if isinstance(classes, list) and len(classes) == 1 and str(classes[0]) in NEVER_TIED:
        return False
    own, of_text = _stated(config), _of_text_model(config)
    if own is None or (of_text and str(config.get("model_type")) in FORWARDING):
        return of_text
    return own


def _of_text_model(config: Mapping[str, object]) -> bool | None:
    for name in TEXT_MODELS:
        text = config.get(name)
        if isinstance(text, Mapping):
            return _stated(text)
    return None


def _stated(config: Mapping[str, object]) -> bool | None:
    value = config.get(TIED)
    return bool(value) if isinstance(value, int) else None
