"""A small model whose optimizer state is worth resuming, in every wrapping, and a truth to compare.

Shapes: one weight that 2, 3 and 4 ranks cut evenly or not, one that is quantized by low-bit
optimizers, a bias of few elements, a tied weight, a buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.support.cpu_sharding import fully_shard

WIDTH, WORDS = 128, 50


class Layer(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, out)
        self.down = nn.Linear(out, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + hidden


class Net(nn.Module):
    """Words [B, S] -> logits [B, S, WORDS]; the head is the embedding."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer(128), Layer(79)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def net(seed: int, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    model = Net().to(dtype)
    model.calls = torch.rand(3)
    return model


def batch(step: int, rank: int = 0, size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, WORDS, (size, 6), generator=generator)


def train(model: Any, optimizer: Any, first: int, last: int, rank: int = 0) -> list[float]:
    """Steps first..last-1 over words that depend on step and rank alone; the losses."""
    losses = []
    for step in range(first, last):
        words = batch(step, rank)
        logits = model(words[:, :-1]).float()
        loss: Any = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ------------------------------------------------------------------------------- wrappings


def plain(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp1(model: nn.Module, use_orig_params: bool = True) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def fsdp2(model: nn.Module, mesh: Any = None) -> nn.Module:
    options = {} if mesh is None else {"mesh": mesh}
    for layer in inner(model).layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def hsdp(model: nn.Module) -> nn.Module:
    """Two replicas; of an odd number of ranks each is one."""
    world = dist.get_world_size()
    sizes = (world, 1) if world % 2 else (2, world // 2)
    return fsdp2(model, init_device_mesh("cpu", sizes, mesh_dim_names=("r", "s")))


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": plain,
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp1-flat": functools.partial(fsdp1, use_orig_params=False),
    "fsdp2": fsdp2,
    "hsdp": hsdp,
}


def eager(model: Any, wrap: Callable[[Any], Any]) -> Any:
    return wrap(model)


def compiled(model: Any, wrap: Callable[[Any], Any]) -> Any:
    return torch.compile(wrap(model))


def compiled_layers(model: Any, wrap: Callable[[Any], Any]) -> Any:
    wrapped = wrap(model)
    for module in wrapped.modules():
        if isinstance(module, Net):
            for number, layer in enumerate(module.layers):
                module.layers[number] = torch.compile(layer)  # type: ignore[assignment]
            return wrapped
    raise AssertionError("no Net in it")


def checkpointed(model: Any, wrap: Callable[[Any], Any]) -> Any:
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
    return wrap(model)


class OneWeight(Net):
    """Of one trainable matrix: a compiled optimizer step has one shape to compile."""

    def __init__(self) -> None:
        super().__init__()
        for name, param in self.named_parameters():
            param.requires_grad_(name == "layers.0.up.weight")


def one_weight(model: Any, wrap: Callable[[Any], Any]) -> Any:
    small = OneWeight().to(model.embed.weight.dtype)
    small.load_state_dict(model.state_dict())
    return wrap(small)


def one_weight_compiled(model: Any, wrap: Callable[[Any], Any]) -> Any:
    return torch.compile(one_weight(model, wrap))


MODES: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "eager": eager,
    "compiled": compiled,
    "compiled-layers": compiled_layers,
    "checkpointed": checkpointed,
    "one-weight": one_weight,
    "one-weight-compiled": one_weight_compiled,
}


def built(wrap: str, mode: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    return MODES[mode](net(seed, dtype), WRAPS[wrap])


def inner(model: nn.Module) -> Net:
    for module in model.modules():
        if isinstance(module, Net):
            return module
    raise AssertionError("no Net in it")
