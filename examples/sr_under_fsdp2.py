"""An 8-bit optimizer with stochastic rounding under FSDP2 that is stopped and continued bit for bit.

    torchrun --nproc-per-node 2 examples/sr_under_fsdp2.py runs/sr

torchao 0.17 and 0.18 cannot step such an optimizer at all where the weights are bfloat16
(`ckptmap doctor` reports it). `fix=True` repairs that, as does `fix_lowbit.apply()` before the first step.
The checkpoint holds the random number generators of every rank, and restores them last.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from small_net import build, mesh, ranks, train
from torch.distributed.fsdp import fully_shard
from torchao.optim import AdamW8bit

import ckptmap
from ckptmap.live.quantized import torchao_lowbit_fix as fix_lowbit


def start(seed: int) -> tuple[torch.nn.Module, AdamW8bit]:
    model = build(seed)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    return model, AdamW8bit(model.parameters(), lr=1e-3, bf16_stochastic_round=True)


def main(folder: Path) -> None:
    torch.compiler.set_stance("force_eager")  # the example needs no C++ compiler
    fix_lowbit.apply()
    with ranks() as rank:
        model, optimizer = start(seed=0)
        torch.manual_seed(100 + rank)  # each rank its own random bits
        train(model, optimizer, 0, 5)
        saving = ckptmap.save(folder, model, optimizer, step=5)
        train(model, optimizer, 5, 10)  # goes on while it is written
        saving.wait()

        again, theirs = start(seed=1)
        report = ckptmap.load(folder, again, theirs, exact=True, fix=True)
        assert report.step is not None
        train(again, theirs, report.step, 10)
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one.to_local(), two.to_local())
        if rank == 0:
            print(report)
            print("bit for bit the same after 10 steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
