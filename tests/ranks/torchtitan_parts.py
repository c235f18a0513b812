"""torchtitan's own containers, data loader and checkpoint manager (0.3.0) beside a CheckpointManager: a run goes on
bit for bit from what ckptmap saved, and from what torchtitan saved.

Its trainer needs a GPU; the loop here makes the calls that the trainer makes, in its order.

python -m tests.ranks.torchtitan_parts FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager as TitansManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

import ckptmap
from ckptmap.integrations.manager import TitanManager
from tests.support.resume_model import WORDS, fsdp2, net

GROUPS = [
    ParamGroupConfig(
        pattern="norm", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-3, "amsgrad": True}
    ),
    ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}),
]


class Words(IterableDataset[torch.Tensor]):
    """Sequences without end; which comes next is its state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.at + self.rank)
            self.at += 1
            yield torch.randint(0, WORDS, (7,), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Run:
    def __init__(self, seed: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.model: Any = fsdp2(net(seed))
        config = OptimizersContainer.Config(param_groups=GROUPS, implementation="foreach")
        self.optimizers: Any = OptimizersContainer(config, model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(
            warmup_steps=3, decay_ratio=0.5, decay_type="cosine"
        )
        self.schedules: Any = schedule.build(optimizers=self.optimizers, training_steps=12)
        self.loader: Any = ParallelAwareDataloader(Words(rank), rank, world, batch_size=2)
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": 14 * self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, checkpointer: Any, until: int) -> None:
        checkpointer.load(step=-1)
        batches = iter(self.loader)
        while self.step < until:
            self.step += 1
            words = next(batches)
            logits = self.model(words[:, :-1])
            loss: Any = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
            checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedules.step()
            self.optimizers.zero_grad()
            checkpointer.save(self.step, last_step=False)
        checkpointer.maybe_wait_for_saving()
        checkpointer.close()

    def ours(self, folder: Path, every: int = 2) -> TitanManager:
        manager = ckptmap.CheckpointManager(folder, every=every)
        parts = (self.optimizers, self.schedules, self.loader)
        return TitanManager(manager, [self.model], *parts, {"train_state": self})

    def theirs(self, folder: Path) -> Any:
        config = TitansManager.Config(enable=True, folder=str(folder), interval=2)
        return TitansManager(
            config, dataloader=self.loader, model_parts=[self.model], optimizers=self.optimizers,
            lr_schedulers=self.schedules, states={"train_state": self}, sd_adapter=None,
        )  # fmt: skip

    def values(self) -> list[torch.Tensor]:
        return [param.full_tensor().detach().clone() for param in self.model.parameters()]


def same(one: Run, two: Run) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.values(), two.values(), strict=True))


def main(folder: Path) -> None:
    whole = Run(0)
    whole.train(whole.ours(folder / "whole", every=100), 9)
    first = Run(0)
    first.train(first.ours(folder / "ours"), 5)
    again = Run(1)
    checkpointer = again.ours(folder / "ours")
    again.train(checkpointer, 9)
    assert checkpointer.report is not None and checkpointer.report.step == 4
    assert checkpointer.report.inexact == () and same(whole, again)

    theirs = Run(0)
    theirs.train(theirs.theirs(folder / "theirs"), 5)
    dist.barrier()
    third = Run(1)
    manager = ckptmap.CheckpointManager(folder / "theirs")
    report = manager.restore(third.model, third.optimizers, third.schedules)
    assert report is not None and report.step == 4 and not report.changes, report
    third.step = 4
    third.loader.dataset.at = 8  # the state of its loader is a pickle, which is not opened
    third.train(Unsaved(), 9)
    assert same(whole, third)


class Unsaved:
    """A checkpointer that is switched off."""

    def load(self, step: int) -> bool:
        return False

    def save(self, step: int, last_step: bool) -> bool:
        return False

    def maybe_wait_for_staging(self) -> None: ...
    def maybe_wait_for_saving(self) -> None: ...
    def close(self) -> None: ...


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
