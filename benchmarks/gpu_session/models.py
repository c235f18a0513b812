"""Small models and a training loop with seeded batches, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def stack(layers: int, width: int, device: str, seed: int = 0, dropout: float = 0.0) -> Any:
    """Return linear layers with normalization between them, and dropout where it is asked for."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    with torch.device(device):
        return nn.Sequential(*(block(width, dropout) for _ in range(layers)))


def block(width: int, dropout: float) -> Any:
    from torch import nn

    parts = [nn.LayerNorm(width), nn.Linear(width, width, bias=False)]
    return nn.Sequential(*parts, *([nn.Dropout(dropout)] if dropout else []))


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: Any, optimizer: Any, first: int, last: int, device: str) -> list[float]:
    """Take the steps first..last-1, whose batches depend on the step alone; return the losses."""
    import torch

    width = model[0][0].weight.shape[0]
    losses = []
    for number in range(first, last):
        maker = torch.Generator().manual_seed(number)
        given = torch.randn(16, width, generator=maker).to(device)
        loss = (model(given) - given).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """Return every tensor of a model and of its optimizer by name: the tensors themselves, no copies."""
    import torch

    held = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if optimizer is not None:
        for number, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    held[f"optimizer.{number}.{name}"] = value
    return held


def copied(held: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in held.items()}


def different(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the names whose bytes differ or that one side lacks; gathers DTensors."""
    return [
        name
        for name in wanted.keys() | found.keys()
        if name not in wanted or name not in found or not equal(wanted[name], found[name])
    ]


def equal(wanted: Any, found: Any) -> bool:
    """Return whether two tensors have the same bytes; on one device where both are there."""
    import torch

    one, two = (whole(t).detach() for t in (wanted, found))
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    bits = [t.contiguous().view(-1).view(torch.uint8) for t in (one, two.to(one.device))]
    return bool(torch.equal(*bits))


def whole(tensor: Any) -> Any:
    """Return a DTensor's whole value, on its mesh's device; any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != tensor.device_mesh.device_type:  # its shards are offloaded
        tensor = tensor.to(tensor.device_mesh.device_type)
    return tensor.full_tensor()
