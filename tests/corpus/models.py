"""The models whose checkpoints the corpus holds: tiny, awkwardly shaped, filled by name.

Every value comes from a generator seeded by (seed, clean name), before anything is wrapped. So all
writers, at any world size, save the same values, and the truth is the state dict of a
single-process model of the same recipe.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

State = dict[str, Tensor]


def seeded(name: str, like: Tensor, seed: int) -> Tensor:
    """Values of `like`'s shape and dtype that depend on the name and the seed alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    if like.dtype == torch.bool:
        return torch.rand(like.shape, generator=generator) > 0.5
    if not like.is_floating_point():
        return torch.randint(1, 2**40, like.shape, generator=generator).to(like.dtype)
    values = torch.randn(like.shape, generator=generator) * 0.1
    return (values + 1 if like.ndim == 1 and "norm" in name else values).to(like.dtype)


def fill(model: nn.Module, seed: int) -> None:
    """Give every parameter and persistent buffer its seeded values; tied ones get one name's."""
    with torch.no_grad():
        filled: set[int] = set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in filled:
                tensor.copy_(seeded(name, tensor, seed))
                filled.add(id(tensor))


# ------------------------------------------------------------------------------- plain torch


@dataclass(frozen=True)
class Recipe:
    """Shapes and dtype of a `Tiny`; buffers stay float32, int64 and bool whatever the dtype."""

    vocab: int = 1001
    hidden: int = 48
    ffn: int = 103
    layers: int = 3
    heads: int = 4
    tied: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0


class Attention(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.heads = recipe.heads
        self.q_proj = nn.Linear(recipe.hidden, recipe.hidden)
        self.k_proj = nn.Linear(recipe.hidden, recipe.hidden)
        self.v_proj = nn.Linear(recipe.hidden, recipe.hidden)
        self.o_proj = nn.Linear(recipe.hidden, recipe.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:-1], self.heads, -1)
        q, k, v = (
            p(x).view(split).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(recipe.hidden, recipe.ffn, bias=False)
        self.up_proj = nn.Linear(recipe.hidden, recipe.ffn, bias=False)
        self.down_proj = nn.Linear(recipe.ffn, recipe.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(recipe.hidden)
        self.self_attn = Attention(recipe)
        self.post_norm = nn.RMSNorm(recipe.hidden)
        self.mlp = Mlp(recipe)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))  # type: ignore[no-any-return]


class Rope(nn.Module):
    """A float32 buffer on a submodule; never bf16, as in real models."""

    inv_freq: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.zeros(recipe.hidden // recipe.heads // 2))


class Tiny(nn.Module):
    """A Llama-like model: uneven shards, a dim 0 of 3, buffers of three dtypes, maybe tied."""

    tokens_seen: Tensor
    causal: Tensor
    scratch: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embed = nn.Embedding(recipe.vocab, recipe.hidden)
        self.layers = nn.ModuleList(Layer(recipe) for _ in range(recipe.layers))
        self.norm = nn.RMSNorm(recipe.hidden)
        self.lm_head = nn.Linear(recipe.hidden, recipe.vocab, bias=False)
        self.score = nn.Linear(recipe.hidden, 3)
        self.to(recipe.dtype)
        self.rope = Rope(recipe)
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("causal", torch.zeros(7, 9, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)
        if recipe.tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits = self.lm_head(x).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        scores: Tensor = self.score(x)
        return loss + scores.float().square().mean()


SQUARE = Recipe(vocab=256, hidden=64, ffn=128, layers=2)
"""Every linear can be NF4, and cut over 2 ranks."""


def tiny(recipe: Recipe = Recipe()) -> Tiny:
    model = Tiny(recipe)
    fill(model, recipe.seed)
    return model


def truth(recipe: Recipe = Recipe()) -> State:
    return dict(tiny(recipe).state_dict())


class Nested(nn.Module):
    """Owns a real submodule called `module`, beside others: no wrapper, never to be stripped."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(5, 7)
        self.head = nn.Sequential(nn.Linear(7, 3), nn.ModuleDict({"module": nn.Linear(3, 2)}))

    def forward(self, x: Tensor) -> Tensor:
        return self.head[0](self.module(x))  # type: ignore[no-any-return]


def nested() -> Nested:
    model = Nested()
    fill(model, seed=3)
    return model


def nested_truth() -> State:
    return dict(nested().state_dict())


def compiled(model: nn.Module) -> nn.Module:
    """`torch.compile(model)`: the wrapper and its names; nothing is compiled until it runs."""
    wrapper: Any = torch.compile(model)
    assert isinstance(wrapper, nn.Module)
    return wrapper


# ------------------------------------------------------------------------------- training


def optimizer_for(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    """AdamW in two groups, by name and not by ndim, which FSDP1 flattens; norms do not decay."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Real steps; every rank sees the same tokens, so the mean gradient is that of one rank."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        tokens = torch.randint(0, 256, (2, 8), generator=generator)
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Optimizer state of a single-process model by parameter name."""
    return {n: dict(optimizer.state[p]) for n, p in model.named_parameters()}


def trained(grouped: bool = True, steps: int = 2) -> tuple[Tiny, torch.optim.AdamW]:
    """A `Tiny` after real steps in this process, parameters grouped by decay or named."""
    model = tiny()
    if grouped:
        optimizer = optimizer_for(model)
    else:
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    train(model, optimizer, steps)
    return model, optimizer


# ------------------------------------------------------------------------------- transformers


def tiny_llama(
    tied: bool = False, dtype: torch.dtype = torch.bfloat16, layers: int = 2, seed: int = 0
) -> LlamaForCausalLM:
    """hidden 64, intermediate 128, vocab 256, 2 of 4 kv heads: every linear can be NF4."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        vocab_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(dtype)
    fill(model, seed)
    return model


def llama_truth(tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> State:
    """What `save_pretrained` stores: of tied weights only the embedding."""
    state = dict(tiny_llama(tied, dtype).state_dict())
    return {k: v for k, v in state.items() if not (tied and k == "lm_head.weight")}


# ------------------------------------------------------------------------------- NF4


def nf4_names(model: nn.Module) -> Iterator[str]:
    """The linear weights inside the layers: what QLoRA quantizes."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in f".{name}":
            yield f"{name}.weight"


def scaler_block(numel: int, world_size: int) -> int:
    """The largest scaler block up to torchao's 256 that `world_size` equal shards hold whole."""
    import math

    return math.gcd(256, numel // 64 // world_size)


def quantize(model: nn.Module, world_size: int = 1) -> nn.Module:
    """Replace the linear weights in place by frozen NF4Tensors of the whole weight."""
    from torchao.quantization import to_nf4

    for name in list(nf4_names(model)):
        owner = model.get_submodule(name.rpartition(".")[0])
        weight = owner.get_parameter("weight").detach()
        nf4 = to_nf4(weight, 64, scaler_block(weight.numel(), world_size))
        owner.register_parameter("weight", nn.Parameter(nf4, requires_grad=False))
    return model


NF4_TENSORS = (
    "quantized_data",
    "quantized_scalers",
    "quantization_factor",
    "scaler_mean",
    "nf4",
)
NF4_NUMBERS = ("block_size", "scaler_block_size", "n_blocks")


def nf4_parts(state: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The inner tensors and numbers of every NF4Tensor of a state dict, by name."""
    from torchao.quantization import NF4Tensor

    return {
        name: {part: getattr(value, part) for part in NF4_TENSORS + NF4_NUMBERS}
        for name, value in state.items()
        if isinstance(value, NF4Tensor)
    }


def is_coded(value: Tensor) -> bool:
    """Is it one of torchao's tensors of codes?"""
    return type(value).__name__ in ("NF4Tensor", "Int8Tensor", "Float8Tensor")


def dense(state: Mapping[str, Tensor]) -> State:
    """The same with codes decoded by torchao, in the logical dtype."""
    return {name: _decoded(value) if is_coded(value) else value for name, value in state.items()}


def _decoded(value: Any) -> Tensor:
    nf4 = type(value).__name__ == "NF4Tensor"
    values: Tensor = value.get_original_weight() if nf4 else value.dequantize()
    return values
