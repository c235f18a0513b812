"""The calls that torchtitan's trainer makes of its checkpoint manager, with a CheckpointManager behind them.

python examples/integrations/manager_torchtitan.py runs/manager

The trainer here is an imitation: a loop that makes these calls in torchtitan's order.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptmap
from ckptmap.integrations.manager import TitanManager


class Containers(torch.optim.Optimizer):
    """As torchtitan's OptimizersContainer: an optimizer without state of its own around others."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01)]
        super().__init__([*model.parameters()], {"lr": 0.01})

    def step(self, closure: Any = None) -> Any:
        return [optimizer.step() for optimizer in self.optimizers]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Trainer:
    """A model, torchtitan's containers, a loader with a position, and the count of steps."""

    def __init__(self, seed: int, manager: ckptmap.CheckpointManager) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizers = Containers(self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers.optimizers[0], 2)
        self.step = self.tokens = 0
        self.checkpointer = TitanManager(
            manager, [self.model], self.optimizers, self.schedule,
            states={"train_state": self},
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens = state["step"], state["tokens"]

    def train(self, steps: int) -> None:
        self.checkpointer.load(step=-1)
        while self.step < steps:
            self.step += 1
            self.tokens += 32
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.step))
            self.model(x).square().mean().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedule.step()
            self.checkpointer.save(self.step, last_step=self.step == steps)
        self.checkpointer.close()


def main(folder: Path) -> None:
    whole = Trainer(0, ckptmap.CheckpointManager(folder / "whole", every=100))
    whole.train(9)
    first = Trainer(0, ckptmap.CheckpointManager(folder / "runs", every=2, keep=2))
    first.train(5)
    again = Trainer(1, ckptmap.CheckpointManager(folder / "runs", every=2, keep=2))
    again.train(9)
    assert again.tokens == 9 * 32 and again.checkpointer.manager.steps() == [8, 9]
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
    print("resumed at step 5, the same weights after step 9")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
