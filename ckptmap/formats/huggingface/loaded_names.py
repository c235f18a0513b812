"""Compute the names that transformers 5 gives to modules in memory if they differ from those on disk.

    language_model.model.layers.0.mlp.up_proj    -> model.language_model.layers.0.mlp.up_proj
    vit.encoder.layer.0.attention.attention.key  -> vit.layers.0.attention.k_proj

The loader renames keys while it reads (transformers 5.24, conversion_mapping.py), but looks up
modules by their new names in the quantization settings of a file or config. So these settings must
list the new names as well. A file does not state which class will load it. Therefore one module may
get several new names here; a name that fits no module does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class ModuleRenaming:
    """How transformers renames the modules of one model family.

    If a key of the checkpoint matches `sign`, the `rules` (pattern, replacement) are applied in turn.
    """

    sign: re.Pattern[str]
    rules: tuple[tuple[re.Pattern[str], str], ...]

    def __call__(self, name: str) -> str:
        for pattern, put in self.rules:
            name = pattern.sub(put, name, count=1)
        return name


def _renaming(sign: str, *rules: tuple[str, str]) -> ModuleRenaming:
    return ModuleRenaming(
        re.compile(sign), tuple((re.compile(pattern), put) for pattern, put in rules)
    )


_TOWER = r"(?:language_model|(?:vision|audio|image|video)_tower|vision_model|visual)\."
_VIT = r"(?:^|\.)attention\.attention\.query\."
_SWIN = r"\.blocks\.\d+\.attention\.self\.query\."
_FLAT_BLOCK = (
    (r"\.attention\.(?:attention|self)\.query$", ".attention.q_proj"),
    (r"\.attention\.(?:attention|self)\.key$", ".attention.k_proj"),
    (r"\.attention\.(?:attention|self)\.value$", ".attention.v_proj"),
    (r"\.attention\.output\.dense$", ".attention.o_proj"),
    (r"\.intermediate\.dense$", ".mlp.fc1"),
    (r"\.output\.dense$", ".mlp.fc2"),
    (r"\.mlp\.weights_out$", ".mlp.down_proj"),
)
RENAMINGS = (
    _renaming(_VIT, *_FLAT_BLOCK),  # ViT and its kin, DINOv2
    _renaming(_VIT, (r"(^|\.)encoder\.layer\.(?=\d)", r"\1layers.")),  # ViT and its kin
    _renaming(_VIT, (r"\.mlp\.weights_in$", ".mlp.gate_proj")),  # DINOv2's SwiGLU, cut in two
    _renaming(_VIT, (r"\.mlp\.weights_in$", ".mlp.up_proj")),
    _renaming(_SWIN, *_FLAT_BLOCK),
    _renaming(_SWIN, (r"(^|\.)(?<!swin\.)(encoder\.layers\.\d+\.(?:blocks|downsample)\.)", r"\1swin.\2")),  # as a backbone
    _renaming(r"(?:^|\.)layer\.\d+\.attention\.q_proj\.", (r"(^|\.)layer\.", r"\1model.layer.")),  # DINOv3
    _renaming(
        r"\.mlp\.c_fc_0\.",  # EXAONE 3
        (r"^transformer\.h\.", "model.layers."),
        (r"\.attn\.attention\.out_proj$", ".self_attn.o_proj"),
        (r"\.attn\.attention\.", ".self_attn."),
        (r"\.mlp\.c_fc_0$", ".mlp.gate_proj"),
        (r"\.mlp\.c_fc_1$", ".mlp.up_proj"),
        (r"\.mlp\.c_proj$", ".mlp.down_proj"),
    ),
    _renaming(r"\.block_sparse_moe\.gate\.", (r"\.block_sparse_moe\.gate$", ".mlp.router")),  # Phi-3.5-MoE
    _renaming(r"norm\.W_down\.", (r"norm\.W_down$", "norm.mlp.fc1"), (r"norm\.W_up$", "norm.mlp.fc2")),  # A.X K2
    _renaming(r"\.ffn\.experts\.", (r"^head$", "lm_head")),  # DeepSeek-V4
    _renaming(r"^embed_out\.", (r"^embed_out$", "lm_head")),  # GPT-NeoX
    _renaming(r"^backbone\.layers\.\d+\.mixer\.", (r"^backbone\.", "model.")),  # Nemotron-H
    _renaming(r"^thinker\.", (r"^thinker\.", "")),  # Qwen2.5-Omni
    _renaming(r"^vlm\.language_model\.model\.", (r"^(vlm\.language_model)\.model\.", r"\1.")),  # ColPali
    # CLIP and SigLIP, alone or as the tower of another model
    _renaming(r"(?:^|_tower\.)vision_model\.", (r"(^|_tower\.)vision_model\.", r"\1")),
    # models of several towers, which the loader puts into `model`, heads taken out of them
    _renaming(
        rf"^(?:thinker\.)?(?:[^.]+\.)?{_TOWER}",
        (r"^model\.(?!language_model\.|(?:vision|audio|image|video)_tower\.|visual\.)", "."),
        (r"^language_model\.(?:model\.)?", "."),
        (r"^\.lm_head$", "lm_head"),
        (r"^\.", "model.language_model."),
        (r"^(?!model\.|lm_head$)", "model."),
    ),
)  # fmt: skip


def loaded_as(keys: Collection[str]) -> Callable[[str], list[str]]:
    """Return a function for a checkpoint of these keys. It returns, for a module's name on disk, the
    other names that the module may have in memory."""
    renamings = [each for each in RENAMINGS if any(map(each.sign.search, keys))]

    def others(module: str) -> list[str]:
        """Return the other names of a module."""
        names = {module: None}
        for each in renamings:
            names |= {each(name): None for name in names}
        return [name for name in names if name != module]

    return others if renamings else lambda module: []


_UNKNOWN = """
altclip apertus1p5_text axk2 bailing_hybrid cohere_asr colqwen2 conditional_detr cosmos3_edge
cosmos3_omni d_fine deepseek_ocr2 deepseek_v4 deformable_detr detr dinov3_convnext dory dots3_note
dots3_note_audio_encoder dots3_note_vision_encoder emu3 ernie4_5_vl_moe gemma4_unified glm5_next
glm5_next_text gradium_phonon_tts granite_speech granite_speech_plus gte hrm_text hunyuan_vl hy_v4
hy_v4_vl hy_v4_vl_text hyperclovax_vision_v2 inkling2 inkling2_loop inkling2_loop_text inkling2_text
inkling_mm_model jev jina_embeddings_v3 kimi_k25 kimi_linear lara_mini lfm3 lfm3_vl_vision lw_detr
maskformer mimi mimi_decoder mimi_encoder minimax_m3_vl mistral_large4 mistral_large4_text molmo2
molmo2_text nemo_speechlm nemotron_h_omni nomic_bert paddleocr_vl pi0 pixio pp_doclayout_v2
pp_doclayout_v3 pp_doclayout_v4 qianfan_ocr qwen4_exp_text radio rf_detr rt_detr rt_detr_v2
sam3_tracker sam3_tracker_video sapiens2 sarvam_moe segformer shieldgemma2 step3p5_vision step3p7
t5gemma2_encoder timesfm2_5 timm_wrapper tipsv2 tipsv2_dpt tipsv2_text_model tipsv2_vision_model
ultrabert ultravbert unlimited_ocr vibevoice_asr vit_mae
"""
UNKNOWN = frozenset(_UNKNOWN.split())
"""Model types whose linear layers transformers 5.24 renames or cuts differently from RENAMINGS."""
_CUT = """
gradium_phonon_tts gte hrm_text inkling_mm_model jina_embeddings_v3 kimi_k25 lara_mini minimax_m3_vl
mistral_large4 molmo2_text nemo_speechlm nomic_bert qianfan_ocr radio sapiens2 sarvam_moe step3p5_vision
"""
CUT = frozenset(_CUT.split())
"""Model types with linear layers that transformers 5.24 cuts, joins or permutes while it loads them: `Wqkv` into
`q_proj`, `k_proj` and `v_proj`. It does so to dense weights alone."""
_JOINED = frozenset({"bailing_hybrid", "glm5_next", "glm5_next_text", "kimi_linear", "olmo_hybrid"})
_CUT_IN_SOME = frozenset({"dinov2", "dinov2_with_registers", "tipsv2_vision_model"})
FAILS_BESIDE = {
    "compressed-tensors": _JOINED | _CUT_IN_SOME,
    "fp8": _CUT_IN_SOME,
}
"""`quant_method` -> model types with a rule that joins three convolutions, or cuts a layer that some of them have: with
the parts that the library adds to each weight, transformers 5.24 fails at that rule, whatever layer is quantized."""
