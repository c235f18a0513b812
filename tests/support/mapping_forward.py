"""Forward passes as the other schemes' models compute them, written from their documentation.

They take a plain state dict, so that a tensor whose rows stand in the wrong order, which no shape
could show, changes the logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]


def meta_logits(state: State, config: dict[str, Any], tokens: Tensor) -> Tensor:
    """[batch, length] -> [batch, length, vocab] of a Llama in Meta's names.

    Meta rotates the numbers 2j and 2j + 1 of a head as one complex number.
    Source: meta-llama/llama, llama/model.py.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d, eps = config["head_dim"], config["rms_norm_eps"]
    turns = _turns(tokens.shape[1], d, config["rope_parameters"]["rope_theta"])
    x = state["tok_embeddings.weight"][tokens]
    for n in range(config["num_hidden_layers"]):
        at = f"layers.{n}."
        y = _rms(x, state[at + "attention_norm.weight"], eps)
        q, k, v = (
            _heads(F.linear(y, state[f"{at}attention.w{name}.weight"]), count)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        mixed = _attention(_complex_rope(q, turns), _complex_rope(k, turns), v)
        x = x + F.linear(mixed, state[at + "attention.wo.weight"])
        y = _rms(x, state[at + "ffn_norm.weight"], eps)
        gate = F.silu(F.linear(y, state[at + "feed_forward.w1.weight"]))
        up = F.linear(y, state[at + "feed_forward.w3.weight"])
        x = x + F.linear(gate * up, state[at + "feed_forward.w2.weight"])
    return F.linear(_rms(x, state["norm.weight"], eps), state["output.weight"])


def gpt_fast_logits(state: State, config: dict[str, Any], tokens: Tensor) -> Tensor:
    """The same from gpt-fast's names, whose q, k and v are blocks of one matrix."""
    d = config["head_dim"]
    counts = [config["num_attention_heads"], *[config["num_key_value_heads"]] * 2]
    split = {key: value for key, value in state.items() if ".wqkv." not in key}
    for key in state.keys() - split.keys():
        for name, part in zip("qkv", torch.split(state[key], [c * d for c in counts]), strict=True):
            split[key.replace("wqkv", "w" + name)] = part
    return meta_logits(split, config, tokens)


def nanogpt_logits(state: State, config: dict[str, Any], tokens: Tensor) -> Tensor:
    """[batch, length] -> [batch, length, vocab] of a GPT-2 in nanoGPT's names, Linear matrices.

    Source: nanoGPT, model.py; with the activation of the published GPT-2.
    """
    heads, i = config["n_head"], config["n_embd"]

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[name + ".weight"], state[name + ".bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (i,), state[name + ".weight"], state[name + ".bias"])

    positions = torch.arange(tokens.shape[1])
    x = state["transformer.wte.weight"][tokens] + state["transformer.wpe.weight"][positions]
    for n in range(config["n_layer"]):
        at = f"transformer.h.{n}."
        q, k, v = torch.split(linear(norm(x, at + "ln_1"), at + "attn.c_attn"), i, dim=-1)
        q, k, v = (_heads(part, heads) for part in (q, k, v))
        x = x + linear(_attention(q, k, v), at + "attn.c_proj")
        y = F.gelu(linear(norm(x, at + "ln_2"), at + "mlp.c_fc"), approximate="tanh")
        x = x + linear(y, at + "mlp.c_proj")
    return F.linear(norm(x, "transformer.ln_f"), state["lm_head.weight"])


def _heads(x: Tensor, count: int) -> Tensor:
    """[…, count d] -> […, count, d]."""
    return x.reshape(*x.shape[:-1], count, -1)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _turns(length: int, d: int, theta: float) -> Tensor:
    """[length, d / 2] complex: by how much each pair of a head is turned at each position."""
    speeds = theta ** (-torch.arange(0, d, 2).float() / d)
    angles = torch.outer(torch.arange(length).float(), speeds)
    return torch.polar(torch.ones_like(angles), angles)


def _complex_rope(x: Tensor, turns: Tensor) -> Tensor:
    """[batch, length, heads, d], neighbours of d turned as one complex number."""
    pairs = torch.view_as_complex(_heads(x, x.shape[-1] // 2).contiguous())
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, length, heads, d] each, k and v of fewer heads -> [batch, length, heads d]."""
    times = q.shape[2] // k.shape[2]
    q, k, v = (
        part.repeat_interleave(count, 2).transpose(1, 2)
        for part, count in ((q, 1), (k, times), (v, times))
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(-2)
