"""FSDP2 with an 8-bit optimizer, for the shapes of a 70B model and without its memory.

    torchrun --nproc-per-node 2 examples/eight_bit_at_size.py runs/big [layers]

The shapes are those of a 70B Llama with its width divided by 32. The model is built on the meta device, so
no rank ever holds more than its shard and `max_memory` of buffers. The checkpoint was trained with AdamW
in float32; the run continues with 8-bit moments, which are quantized shard by shard.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_net import mesh, ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.optim import AdamW8bit

import ckptmap
from ckptmap.live.quantized import torchao_lowbit_fix as fix_lowbit

HIDDEN, INNER, KV, WORDS = 8192 // 32, 28672 // 32, 1024 // 32, 1000
MAX_MEMORY = 1 << 20


class Layer(nn.Module):
    """The matrices of a Llama layer."""

    def __init__(self) -> None:
        super().__init__()
        for name, out, into in (
            ("q_proj", HIDDEN, HIDDEN), ("k_proj", KV, HIDDEN), ("v_proj", KV, HIDDEN),
            ("o_proj", HIDDEN, HIDDEN), ("gate_proj", INNER, HIDDEN), ("up_proj", INNER, HIDDEN),
            ("down_proj", HIDDEN, INNER),
        ):  # fmt: skip
            self.add_module(name, nn.Linear(into, out, bias=False))


def model(layers: int) -> nn.Module:
    made = nn.Module()
    made.embed = nn.Embedding(WORDS, HIDDEN)
    made.layers = nn.ModuleList(Layer() for _ in range(layers))
    return made.to(torch.bfloat16)


def write(path: Path, layers: int) -> None:
    """What one process trained with AdamW."""
    torch.manual_seed(0)
    trained = model(layers)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    for parameter in trained.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    torch.save({"model": trained.state_dict(), "optimizer": optimizer.state_dict()}, path)


def main(folder: Path, layers: int) -> None:
    torch.compiler.set_stance("force_eager")
    fix_lowbit.apply()
    with ranks() as rank:
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            write(folder / "trained.pt", layers)
        dist.barrier()
        with torch.device("meta"):
            live = model(layers)
        for layer in live.layers:
            fully_shard(layer, mesh=mesh())
        fully_shard(live, mesh=mesh())
        live.to_empty(device="cpu")
        optimizer = AdamW8bit(live.parameters(), lr=1.0)
        report = ckptmap.load(folder / "trained.pt", live, optimizer, max_memory=MAX_MEMORY)
        assert report.state is not None
        worst = max(report.state.recoded, key=lambda entry: entry.error)
        shard = max(p.to_local().numel() for p in live.parameters())
        assert report.peak_host_nbytes <= MAX_MEMORY + 8 * shard
        for parameter in live.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        if rank == 0:
            print(report)
            print(f"the largest error of a moment: {worst}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2)
