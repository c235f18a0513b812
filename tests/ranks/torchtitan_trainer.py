"""torchtitan's own trainer (0.3.0) with FSDP2 on CPUs: a run goes on bit for bit from what a CheckpointManager saved, and
what torchtitan itself saved is restored.

It takes its device from torch, and asks it for memory that a CPU does not count: both are replaced. Attention is torch's,
since FlexAttention has no backward on a CPU, and the SPMD backend that of DTensors alone: others, and its pipelines, want
a later torch than 2.13.

python -m tests.ranks.torchtitan_trainer FOLDER whole|first|again|theirs|restored
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.utils.data import IterableDataset  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import ckptmap  # noqa: E402
from ckptmap.integrations.manager import TitanManager  # noqa: E402

WORDS, LENGTH, LAST = 2048, 16, 6


class Monitor:
    """Of the device's memory: a CPU has no statistics."""

    device_name = "CPU"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None: ...


metrics.build_device_memory_monitor = Monitor
dist_utils.set_pg_timeouts = lambda *_, **__: None  # by a function that torch 2.13 does not have


class Text(IterableDataset[Any]):
    """Sequences without end; which comes next is its state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.at + self.rank)
            self.at += 1
            words = torch.randint(0, WORDS, (LENGTH + 1,), generator=generator)
            yield {"input": words[:-1]}, words[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        super().__init__(Text(dp_rank), dp_rank, dp_world_size, batch_size=local_batch_size)


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


def built(folder: Path, saves: bool) -> Any:
    spec = model_registry("debugmodel")
    for _, _, layer, name in [*spec.model.traverse(FlexAttention.Config)]:
        setattr(layer, str(name), ScaledDotProductAttention.Config())
    config = Trainer.Config(
        loss=CrossEntropyLoss.Config(),
        model_spec=spec,
        tokenizer=Tokenizer.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=2, decay_ratio=0.5, decay_type="linear"
        ),
        training=TrainingConfig(
            local_batch_size=4, seq_len=LENGTH, steps=LAST, disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        dataloader=Loader.Config(),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",
        ),
        checkpoint=CheckpointManager.Config(
            enable=saves, interval=3, last_save_model_only=False, keep_latest_k=0
        ),
        activation_checkpoint=None,
        dump_folder=str(folder),
    )  # fmt: skip
    config.debug.seed = 1
    trainer = config.build()
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale as it sums
    return trainer


def ours(trainer: Any, folder: Path) -> TitanManager:
    """Put a CheckpointManager in place of torchtitan's: the line of a script."""
    manager = ckptmap.CheckpointManager(folder, every=3)
    trainer.checkpointer = TitanManager(
        manager, trainer.model_parts, trainer.optimizers, trainer.lr_schedulers,
        trainer.dataloader, {"train_state": trainer}, exact=True,
    )  # fmt: skip
    return trainer.checkpointer


def values(trainer: Any) -> dict[str, torch.Tensor]:
    return {
        name: getattr(param, "full_tensor", lambda p=param: p)().detach().clone()
        for part in trainer.model_parts
        for name, param in part.named_parameters()
    }


def moments(trainer: Any) -> dict[str, torch.Tensor]:
    state = trainer.optimizers.optimizers[0].state
    return {
        f"{name} {entry}": state[param][entry].full_tensor().clone()
        for part in trainer.model_parts
        for name, param in part.named_parameters()
        for entry in ("exp_avg", "exp_avg_sq")
    }


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def ended(trainer: Any, last: int) -> None:
    trainer.config.training.steps = last
    trainer.train()
    trainer.close()


def main(folder: Path, phase: str) -> None:
    """Run a phase of a story in processes of its own: torchtitan sets up its process groups once."""
    torch.set_num_threads(1)
    trainer = built(folder, saves=phase == "theirs")
    truth = folder / f"{dist.get_rank()}.pt"
    if phase == "whole":
        ended(trainer, LAST)
        torch.save(values(trainer), truth)
    elif phase == "first":
        ours(trainer, folder / "ours")
        ended(trainer, 3)
    elif phase == "theirs":
        ended(trainer, 3)
        torch.save(values(trainer) | moments(trainer), folder / f"{dist.get_rank()}-theirs.pt")
    elif phase == "restored":
        spoil(trainer)
        manager = ckptmap.CheckpointManager(folder / "checkpoint")
        report = manager.restore(trainer.model_parts[0], trainer.optimizers.optimizers[0])
        assert report is not None and report.step == 3 and "torchtitan-fused" in report.names
        found = values(trainer) | moments(trainer)
        assert same(found, torch.load(folder / f"{dist.get_rank()}-theirs.pt"))
    else:
        spoil(trainer)
        again(trainer, folder)
        assert same(values(trainer), torch.load(truth))
    dist.barrier()
    dist.destroy_process_group()


def spoil(trainer: Any) -> None:
    with torch.no_grad():
        for part in trainer.model_parts:
            for param in part.parameters():
                param.add_(1.0)


def again(trainer: Any, folder: Path) -> None:
    manager = ours(trainer, folder / "ours")
    ended(trainer, LAST)
    assert manager.report is not None and manager.report.step == 3
    assert manager.report.inexact == (), manager.report


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
