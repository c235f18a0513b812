"""Decide which tensors a weight-only quantization takes by default: the weights of linear layers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.tensors import Cut, Opaque, TensorInfo

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
"""Matched as words between underscores: `tok_emb`, `mask_tokens`."""
_KEPT_PATHS = (["transformer", "w"], ["w"])
"""CTRL's embedding, by the whole path of its module."""
_OF_ATTENTION = ["attention", "output"]
"""A layer of RWKV, no head: transformers fails where it is dense and its neighbours are bitsandbytes' codes."""
_KEPT_AT_ROOT = frozenset({"proj_out"})
"""Whisper's head; elsewhere it is the name of an ordinary layer."""


def is_linear_weight(fqn: str, info: TensorInfo) -> bool:
    """Return whether a tensor is, by name, shape and dtype, the weight of a linear layer.

    It must be 2-D in bfloat16, float16 or float32 and be named `weight`. Its module must not be an
    embedding, head or router by its last name (`head`, `output`, `gate`, `tok_emb`, ..., as whole names or
    words), nor lie in a `router`, nor have `embed`, `norm`, `lora_`, `lm_head` or `modules_to_save` in a
    segment of its path. Case does not matter.

    The names cover every `nn.Embedding` and output embedding of the 932 model classes of transformers 5.23
    that build from their default configs.
    """
    *path, last = fqn.lower().split(".")
    if last != "weight" or len(info.shape) != 2 or info.dtype not in DTYPES:
        return False
    is_head = path[-1:] and path[-1] in _KEPT and path[-2:] != _OF_ATTENTION
    if path and (is_head or not _KEPT_WORDS.isdisjoint(path[-1].split("_"))):
        return False
    if (
        path in _KEPT_PATHS
        or _KEPT_ANYWHERE.intersection(path)
        or (len(path) == 1 and path[0] in _KEPT_AT_ROOT)
    ):
        return False
    return not any(kept in segment for segment in path for kept in _KEPT_WITHIN)


CONV1D = frozenset({"c_attn", "c_fc", "c_proj", "q_attn"})
"""Modules that GPT-2 and its relatives in transformers build as `Conv1D`, with weights [in, out]."""
CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
"""Those relatives, by `model_type`; others have linear layers of the same names."""


def is_conv1d_weight(fqn: str, info: TensorInfo) -> bool:
    """Return whether a tensor is, by its name, the weight of a `Conv1D` in one of `CONV1D_MODELS`."""
    return is_linear_weight(fqn, info) and not CONV1D.isdisjoint(fqn.split(".")[-2:-1])


def is_linear_module(fqn: str, info: TensorInfo) -> bool:
    """Return whether a tensor is the weight of an `nn.Linear` that libraries quantize.

    Most libraries that quantize modules take `nn.Linear` only, so `Conv1D` of GPT-2 and modules that are kept in
    fp32 do not count; bitsandbytes' own integration takes `Conv1D`, too.
    """
    path = fqn.split(".")
    return is_linear_weight(fqn, info) and not CONV1D.intersection(path[-2:-1]) and not is_wide(fqn)


_WIDE = (".DenseReluDense.wo.", ".indexer.weights_proj.")
_WITHOUT_FORWARD = (".head.attention.out_proj.",)
_CUT_WHILE_LOADING = (".mlp.weights_in.",)
_WIDE_WITHIN = frozenset({"qformer"})


def is_wide(fqn: str) -> bool:
    """Return whether transformers never quantizes the module, by its name.

    transformers keeps it in fp32 (`_keep_in_fp32_modules` of T5, BLIP-2, DeepSeek-V3.2), or another
    module's forward reads its weight (torch's attention in SigLIP's head), or transformers 5 splits it
    while loading (DINOv2's SwiGLU).
    """
    inside = f".{fqn}"
    names = (*_WIDE, *_WITHOUT_FORWARD, *_CUT_WHILE_LOADING)
    return any(name in inside for name in names) or not _WIDE_WITHIN.isdisjoint(fqn.split("."))


def is_expert(fqn: str) -> bool:
    """Return whether the tensor belongs to one expert, by its name: `mlp.experts.3.gate_proj.weight`.

    transformers 5 stacks the experts of a layer into one parameter. bitsandbytes and torchao quantize
    modules and leave that parameter dense; transformers would not load codes for it, but initialize the
    experts at random.
    """
    return "experts" in fqn.split(".")


def is_embedding(fqn: str) -> bool:
    """Return whether the tensor belongs to an embedding, by the names of its modules."""
    path = fqn.lower().split(".")
    return path[-2:-1] in (["wte"], ["wpe"], ["shared"]) or any("embed" in name for name in path)


def is_single_module(fqn: str, info: TensorInfo) -> bool:
    """Return whether a tensor is the weight of an `nn.Linear` that is not an expert."""
    return is_linear_module(fqn, info) and not is_expert(fqn)


class LinearLayerScheme(ABC):
    """The base of schemes that quantize the weights of linear layers, as far as `encoding` allows."""

    def takes_layer(self, fqn: str, info: TensorInfo) -> bool:
        """Return whether the tensor is the weight of a layer that the scheme's library quantizes."""
        return is_single_module(fqn, info)

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        """Return None: the library pickles no tensor subclass of its own."""
        return None

    @abstractmethod
    def encoding(self, info: TensorInfo) -> Encoding | Refusal: ...

    def target(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """Return the encoding for the weight of a linear layer, else None."""
        if not self.takes_layer(fqn, info):
            return None
        encoding = self.encoding(info)
        return None if isinstance(encoding, Refusal) else encoding
