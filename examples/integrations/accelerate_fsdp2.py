"""accelerate: save with compiled layers under FSDP2, and load into a run without compiled layers.

    PYTHONPATH=examples torchrun --nproc-per-node 2 examples/integrations/accelerate_fsdp2.py runs/acc

Without `install` the first run writes `_orig_mod.` into names, and the second cannot load it.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate_compiled import accelerator
from small_net import build, ranks, train
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptmap
from ckptmap.integrations.accelerate import install


def prepared(seed: int) -> tuple[Any, Any, Any, Any]:
    made = accelerator()
    model = build(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (1 + seed))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return (made, *made.prepare(model, optimizer, scheduler))


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    with ranks() as rank:
        made, model, optimizer, _ = prepared(seed=0)
        train(model, optimizer, 0, 3)
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(torch.compile(layer, backend="eager"))
        with install(made):
            made.save_state(str(folder))

        with ckptmap.open(folder) as ckpt:
            wrapped = [name for name in ckpt.names.values() if "_orig_mod" in name]
        assert not wrapped, wrapped

        again, other, theirs, _ = prepared(seed=1)
        with install(again) as handle:
            again.load_state(str(folder))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.to_local(), two.to_local())
        assert theirs.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        report = handle.reports["model"]
        assert report.state is not None and not report.state.initialised
        train(other, theirs, 3, 5)
        if rank == 0:
            print(report)
            print(f"plain names, and a step of {theirs.param_groups[0]['lr']} as before")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
