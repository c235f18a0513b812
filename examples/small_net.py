"""Shared by the resume examples: a small network in bfloat16, its data, and the process group."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + hidden


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(torch.bfloat16)


def train(model: Any, optimizer: Any, first: int, last: int) -> float:
    """Steps first..last-1 of learning to double its input; the last loss."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    loss = torch.zeros(())
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, WIDTH, generator=generator).to(torch.bfloat16)
        loss = (model(x) - 2 * x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def mesh() -> DeviceMesh:
    """Return all ranks as a mesh of CPUs: without one `fully_shard` takes the GPUs that there are."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


@contextmanager
def ranks() -> Iterator[int]:
    """Join the process group that torchrun describes; yields this process's rank. It ends the
    process when done: gloo may abort one that ends while its models still refer to a group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
