"""Which tensors a weight-only quantization takes by default: the weights of linear layers."""

from __future__ import annotations

from ckptmap.tensors import TensorInfo

DTYPES = ("bfloat16", "float16", "float32")

# Last module segments of embeddings, heads and routers, lower case: small, or read by index, or
# so close to the output that 4 bits cost accuracy. The segment must be equal: `gate_proj` is fine.
_KEPT = frozenset({
    "wte", "wpe", "shared", "relative_attention_bias", "codebook", "query_feat",
    "queries_features", "reference_points",
    "head", "output", "score", "classifier", "decoder", "qa_outputs",
    "output_layer", "output_projection", "vocab_projector", "lm_loss", "to_logits",
    "router", "gate", "shared_expert_gate",
})  # fmt: skip
_KEPT_ANYWHERE = frozenset({"router", "pred_layer"})  # `router.layer`, `pred_layer.proj`
_KEPT_WITHIN = ("embed", "norm", "lora_", "modules_to_save", "lm_head")
_KEPT_WORDS = frozenset({"emb", "token", "tokens"})
"""As words between underscores: `tok_emb`, `mask_tokens`."""
_KEPT_AT_ROOT = frozenset({"proj_out"})
"""Whisper's head; the name is that of an ordinary layer elsewhere."""


def is_linear_weight(fqn: str, info: TensorInfo) -> bool:
    """2-D bfloat16, float16 or float32, named `weight`, of a module that is no embedding, head or
    router by its last name (`head`, `output`, `gate`, `tok_emb`, ..., whole names and words only)
    and in no `router`, and with no `embed`, `norm`, `lora_`, `lm_head` or `modules_to_save` in any
    segment of its path. Upper and lower case are the same.

    The names are those of every `nn.Embedding` and output embedding of the 932 model classes of
    transformers 5.23 that build from their default configs, but for CTRL's `w`."""
    *path, last = fqn.lower().split(".")
    if last != "weight" or len(info.shape) != 2 or info.dtype not in DTYPES:
        return False
    if path and (path[-1] in _KEPT or not _KEPT_WORDS.isdisjoint(path[-1].split("_"))):
        return False
    if _KEPT_ANYWHERE.intersection(path) or (len(path) == 1 and path[0] in _KEPT_AT_ROOT):
        return False
    return not any(kept in segment for segment in path for kept in _KEPT_WITHIN)


CONV1D = frozenset({"c_attn", "c_fc", "c_proj", "q_attn"})
"""Modules that transformers' GPT-2 kin build as `Conv1D`, with weights [in, out]."""


def is_linear_module(fqn: str, info: TensorInfo) -> bool:
    """`is_linear_weight`, and by its name no `Conv1D` of GPT-2's kin, nor one that is held in fp32:
    libraries that quantize modules take `nn.Linear` alone, and could not load the others."""
    path = fqn.split(".")
    return is_linear_weight(fqn, info) and not CONV1D.intersection(path[-2:-1]) and not is_wide(fqn)


_WIDE = (".DenseReluDense.wo.", ".indexer.weights_proj.")
_WITHOUT_FORWARD = (".head.attention.out_proj.",)
_CUT_WHILE_LOADING = (".mlp.weights_in.",)
_WIDE_WITHIN = frozenset({"qformer"})


def is_wide(fqn: str) -> bool:
    """By its name a module that transformers holds in fp32 and never quantizes
    (`_keep_in_fp32_modules` of T5 and its kin, BLIP-2, DeepSeek-V3.2), one whose weight is read by
    another module's forward (torch's attention in SigLIP's head), or one that transformers 5 cuts
    into two while loading (DINOv2's SwiGLU)."""
    inside = f".{fqn}"
    names = (*_WIDE, *_WITHOUT_FORWARD, *_CUT_WHILE_LOADING)
    return any(name in inside for name in names) or not _WIDE_WITHIN.isdisjoint(fqn.split("."))


def is_expert(fqn: str) -> bool:
    """By its name one of a layer's experts: `mlp.experts.3.gate_proj.weight`. transformers 5 stacks
    the experts of a layer into one parameter. bitsandbytes and torchao, which quantize modules,
    leave that dense; their codes it would not load, but initialise the experts at random."""
    return "experts" in fqn.split(".")


def is_single_module(fqn: str, info: TensorInfo) -> bool:
    """`is_linear_module`, and no expert."""
    return is_linear_module(fqn, info) and not is_expert(fqn)
