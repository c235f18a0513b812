"""Lightning with a CheckpointManager: stopped after 6 steps, it goes on to the same weights.

python examples/integrations/manager_lightning.py runs/manager
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

import ckptmap
from ckptmap.integrations.manager import lightning_callback


class Net(pl.LightningModule):  # type: ignore[misc]
    """Two layers, an optimizer and a schedule."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(model: Net, epochs: int, *callbacks: Any) -> Any:
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(model, DataLoader(rows, batch_size=8))
    return trainer


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    whole, first, again = Net(0), Net(0), Net(1)
    fit(whole, 4)
    rules: Any = {"every": 3, "keep": 1, "keep_best": ("loss", "min")}  # three steps an epoch
    with ckptmap.CheckpointManager(folder / "runs", **rules) as manager:
        fit(first, 2, lightning_callback(manager))
        ours = lightning_callback(manager)
        trainer = fit(again, 4, ours)
        assert ours.report is not None and ours.report.step == 6
        assert trainer.global_step == 12 and manager.steps()[-1] == 12
        assert manager.best() is not None
    for one, two in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    print("resumed at step 6, the same weights after step 12")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
