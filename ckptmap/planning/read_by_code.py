"""Weights that the code of a model reads itself: where a library puts codes in their place, that code fails.

A layer is called, and its library decodes its codes; `dt_proj.weight @ time_step` of Mamba takes the codes for values,
and so does torch's attention. `transformers` 5.23 itself lets a library quantize such layers. Source: `.weight` of
linear layers in the `forward` of modeling_*.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.formats.huggingface.tied_heads import SHARED
from ckptmap.protocols import Scheme

ATTENTION = "in_proj_weight", "in_proj_bias", "q_proj_weight"
"""Parameters of `nn.MultiheadAttention`, which no other module has beside an `out_proj`."""
_READ = """
layoutlmv2 layoutlmv3 pp_doclayout_v2: rel_pos_bias rel_pos_x_bias rel_pos_y_bias
mamba: mixer.dt_proj
mobilebert: predictions.dense
neomme: unembedding_projection
reformer: self_attention.query_key self_attention.value
rwkv: attention.output feed_forward.value
wavlm: attention.k_proj attention.out_proj attention.q_proj attention.v_proj
"""
"""Model types: how the names of these layers end. FalconMamba and Jamba call theirs once they are quantized."""

_DECODED = (("rwkv", "bnb-"),)
"""Models whose code decodes some forms itself: RWKV divides the weights of its layers, or bitsandbytes' scales of them."""


def read_by_code(ckpt: Checkpoint, scheme: Scheme, model_types: Collection[str]) -> dict[str, str]:
    """Return the weights that stay as they are because the model's code reads them, with why.

    model_types  `model_type` of config.json, and of the models that it consists of; none where there is no config
    """
    reasons = _inside_attention(ckpt, scheme)
    for model_type in sorted(SHARED.keys() & set(model_types)):
        for fqn in ckpt:
            if f".{SHARED[model_type]}." in f".{fqn}" and _is_encoded(ckpt, scheme, fqn):
                reasons[fqn] = (
                    f"is shared by several layers of {model_type}, of which one would find its scales"
                )
    for model_type in sorted(_table().keys() & set(model_types)):
        if _decodes(model_type, scheme):
            continue
        ends = tuple(f".{name}.weight" for name in _table()[model_type])
        for fqn in ckpt:
            if f".{fqn}".endswith(ends) and _is_encoded(ckpt, scheme, fqn):
                reasons[fqn] = f"is read by the code of {model_type}, which knows no codes"
    return reasons


def _inside_attention(ckpt: Checkpoint, scheme: Scheme) -> dict[str, str]:
    """Return the weights of `out_proj` that torch's attention takes as a matrix: it never calls that module."""
    reasons: dict[str, str] = {}
    for fqn in ckpt:
        stem = fqn.removesuffix("out_proj.weight")
        if stem == fqn or not any(f"{stem}{name}" in ckpt for name in ATTENTION):
            continue
        if _is_encoded(ckpt, scheme, fqn):
            reasons[fqn] = "is read by torch's MultiheadAttention, which knows no codes"
    return reasons


def _is_encoded(ckpt: Checkpoint, scheme: Scheme, fqn: str) -> bool:
    target = scheme.target(fqn, ckpt[fqn].info)
    return target is not None and target.name != "dense"


def _decodes(model_type: str, scheme: Scheme) -> bool:
    return any(model_type == kind and scheme.name.startswith(form) for kind, form in _DECODED)


@cache
def _table() -> Mapping[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in _READ.strip().splitlines():
        types, _, names = line.partition(":")
        found |= dict.fromkeys(types.split(), tuple(names.split()))
    return found
