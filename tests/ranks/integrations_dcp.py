"""Plain dcp.save and dcp.load with our planners: NF4 and low-bit state, on any number of ranks.

python -m tests.ranks.integrations_dcp save|load FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

import ckptmap
from ckptmap.integrations.dcp import load_planner, save_planner
from tests.support.cpu_sharding import fully_shard


class Net(nn.Module):
    """A frozen NF4 base; a weight whose moments are in 8 bits; one whose shards are uneven."""

    def __init__(self, seed: int, quantized: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(256, 512, bias=False)
        self.up = nn.Linear(128, 256, bias=False)
        self.odd = nn.Linear(128, 79)
        weight = self.base.weight.detach()
        self.base.weight = nn.Parameter(
            to_nf4(weight) if quantized else weight, requires_grad=False
        )

    def forward(self, x: Any) -> Any:
        return self.base(torch.tanh(self.up(x))).sum() + self.odd(x).square().mean()


def built(seed: int) -> tuple[Any, Any]:
    """3 ranks cannot cut the base: there it is dense."""
    model = Net(seed, dist.get_world_size() != 3)
    if dist.get_world_size() > 1:
        fully_shard(model)
    optimizer = AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    model(torch.randn(4, 128, generator=torch.Generator().manual_seed(dist.get_rank()))).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    moments = get_optimizer_state_dict(model, optimizer)
    return {"model": get_model_state_dict(model), "optimizer": moments, "step": 7}


def save(folder: Path) -> None:
    model, optimizer = built(0)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder, planner=save_planner())
    with ckptmap.open(folder) as ckpt:
        assert ckpt["base.weight"].encoding == "nf4"
        compare(ckpt, model, optimizer, exact=True)
    load(folder)


def load(folder: Path) -> None:
    model, optimizer = built(1)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder, planner=load_planner())
    assert state["step"] == 7
    # what DCP fills are the live tensors themselves
    with ckptmap.open(folder) as ckpt:
        compare(ckpt, model, optimizer, exact=dist.get_world_size() == ckpt.world_size)
    step(model, optimizer)


def compare(ckpt: Any, model: Any, optimizer: Any, exact: bool) -> None:
    for name, param in model.state_dict().items():
        want = part(ckpt[name].read(), param)
        found = param.to_local() if isinstance(param, DTensor) else param
        found = found.get_original_weight() if hasattr(found, "quantized_data") else found
        assert torch.equal(found.reshape(want.shape), want), name
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        for moment in ("exp_avg", "exp_avg_sq"):
            want = part(ckpt.optimizer[name][moment].read().float(), param)
            live = optimizer.state[param][moment]
            local = live.to_local() if isinstance(live, DTensor) else live
            found = local.dequantize() if hasattr(local, "codes") else local
            if exact or not hasattr(local, "codes"):
                assert torch.equal(found, want), (name, moment)
            else:  # its blocks are others here: encoded anew
                error = float((found - want).norm() / max(float(want.norm()), 1e-30))
                assert error < 0.02, (name, moment, error)


def part(whole: Any, like: Any) -> Any:
    """The rows of this rank."""
    if not isinstance(like, DTensor):
        return whole
    each = -(-whole.shape[0] // dist.get_world_size())
    return whole[dist.get_rank() * each : (dist.get_rank() + 1) * each]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.compiler.set_stance("force_eager")
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
