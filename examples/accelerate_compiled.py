"""accelerate, FSDP2 and torch.compile: a checkpoint whose names do not fit the next run.

    torchrun --nproc-per-node 2 examples/accelerate_compiled.py runs/acc

`save_state` writes `_orig_mod.` into the names of layers that are compiled under activation
checkpointing. A run that compiles other layers, or none, has other names and cannot load the checkpoint.
`ckptmap.load` matches plain names and loads the optimizer state, too.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from small_net import Block, build, mesh, ranks, train
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ckptmap


def accelerator() -> Any:
    """Return an Accelerator; accelerate runs its FSDP code on GPUs only, so without one it is told otherwise."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy=ModuleWrapPolicy({Block}),
        state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False,
    )  # fmt: skip
    if torch.cuda.is_available():
        return Accelerator(fsdp_plugin=plugin)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    shared = PartialState(cpu=True)._shared_state
    shared["distributed_type"] = DistributedType.MULTI_GPU
    made = Accelerator(cpu=True, fsdp_plugin=plugin)
    for where in (made.state._shared_state, shared):
        where["device"] = torch.device("cpu")
    return made


def first_run(folder: Path) -> torch.nn.Module:
    """Train and save with accelerate, every layer compiled and under activation checkpointing."""
    made = accelerator()
    model = build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = made.prepare(model, optimizer)
    train(model, optimizer, 0, 3)
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(torch.compile(layer, backend="eager"))
    made.save_state(str(folder))
    return model


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    with ranks() as rank:
        model = first_run(folder)
        with ckptmap.open(folder) as ckpt:
            names = [stored for stored in ckpt.names.values() if "_orig_mod" in stored]
        assert names, "accelerate wrote plain names"

        again = build(seed=1)  # not compiled
        for layer in again.layers:
            fully_shard(layer, mesh=mesh())
        fully_shard(again, mesh=mesh())
        optimizer = torch.optim.AdamW(again.parameters(), lr=9.0)
        report = ckptmap.load(folder, again, optimizer)
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one.to_local(), two.to_local())
        assert report.state is not None and not report.state.initialised
        assert optimizer.param_groups[0]["lr"] == 1e-3
        train(again, optimizer, 3, 5)
        if rank == 0:
            print(report)
            print(f"{len(names)} names such as {names[0]} found their weights")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
