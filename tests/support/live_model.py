"""The model that live tests load into, and the checkpoints that torch and torchao write of it."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, to_nf4

HIDDEN, VOCAB = 64, 101
QUANTIZED = {
    "up.weight": (256, 64),  # 256 blocks: 4 ranks need scaler blocks of 64
    "down.weight": (64, 256),
    "odd.weight": (66, 64),  # 66 blocks: scaler blocks of 1 on 2 ranks, no cut on 4
    "narrow.weight": (128, 66),  # rows end inside blocks, shards of 2 or 4 ranks do not
    "back.weight": (64, 128),
}


class Net(nn.Module):
    """Frozen linear weights, a trainable rest, buffers of both kinds, a head tied to the embedding."""

    steps: Tensor
    scale: Tensor
    window: Tensor
    up: nn.Linear
    back: nn.Linear
    head: nn.Linear
    norm: nn.RMSNorm
    embed: nn.Embedding

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.RMSNorm(HIDDEN)
        for name, (out, into) in QUANTIZED.items():
            linear = nn.Linear(into, out, bias=name == "odd.weight")
            self.add_module(name.removesuffix(".weight"), linear)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("window", torch.ones(2), persistent=False)
        for name in QUANTIZED:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        for name in QUANTIZED:
            x = torch.tanh(self.get_submodule(name.removesuffix(".weight"))(x))
        return self.head(x)  # type: ignore[no-any-return]


def net(seed: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Net:
    """The model with seeded values; without a seed, filled with one that no checkpoint has."""
    torch.manual_seed(99 if seed is None else seed)
    model = Net().to(dtype)
    model.scale = torch.rand(3)
    model.steps = torch.tensor(-1 if seed is None else 1000 + seed)
    return model


def meta_net(dtype: torch.dtype = torch.bfloat16) -> Net:
    """The model without data, save its non-persistent buffer."""
    with torch.device("meta"):
        model = Net().to(dtype)
    model.window = torch.ones(2)
    model.scale = torch.ones(3, device="meta")
    return model


def quantized(weight: Tensor) -> Tensor:
    """torchao's own, with the largest legal scaler block up to 256."""
    whole: Tensor = to_nf4(weight.detach(), 64, math.gcd(256, weight.numel() // 64))
    return whole


def quantize(model: nn.Module) -> None:
    """Replace the frozen weights of an unwrapped model by torchao's NF4Tensors."""
    for name in QUANTIZED:
        module = model.get_submodule(name.removesuffix(".weight"))
        module.weight = nn.Parameter(quantized(model.get_parameter(name)), requires_grad=False)


def tokens() -> Tensor:
    return torch.arange(40).view(2, 20) % VOCAB


def write(folder: Path) -> None:
    """dense.pt, nf4.pt and fp32.pt, by torch.save of the state dicts."""
    torch.save(net(0).state_dict(), folder / "dense.pt")
    torch.save(net(0, torch.float32).state_dict(), folder / "fp32.pt")
    model = net(0)
    quantize(model)
    torch.save(model.state_dict(), folder / "nf4.pt")


def inner(tensor: Tensor) -> dict[str, Tensor]:
    """The five tensors of an NF4Tensor."""
    assert isinstance(tensor, NF4Tensor), type(tensor)
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def same(a: Tensor, b: Tensor) -> bool:
    """The same type, dtype and bits."""
    if isinstance(a, NF4Tensor) or isinstance(b, NF4Tensor):
        mine, other = inner(a), inner(b)
        return a.shape == b.shape and all(same(mine[name], other[name]) for name in mine)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, row-major."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8)
