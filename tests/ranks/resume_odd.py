"""Odd optimizers, groups and schedulers: a run that is saved, loaded and goes on is the uninterrupted one.

python -m tests.ranks.resume_odd FOLDER WRAP...     each wrapper in turn, on all ranks of this start
python -m tests.ranks.resume_odd FOLDER from WRAP   what WRAP saved, on one rank
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import lr_scheduler as lr

import ckptmap
from tests.support.resume_model import WRAPS, batch, net


def make(kind: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(model.parameters(), **{"lr": 1e-2, **options})


def unlike_groups(model: nn.Module) -> Any:
    """Each group has other keys: options of its own, names of the user's, a nested value."""
    params = list(model.parameters())
    return optim.AdamW(
        [
            {"params": params[:3], "lr": 1e-3, "betas": (0.8, 0.95), "layer": "first"},
            {"params": params[3:6], "weight_decay": 0.0, "decay": {"at": [2, 4], "by": 0.5}},
            {"params": params[6:], "amsgrad": True, "lr_scale": 0.1},
        ],
        lr=1e-2,
    )


def matrices(model: nn.Module) -> Any:
    """Muon takes matrices alone."""
    return optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-3)


def frozen_and_unused(model: nn.Module) -> Any:
    """Some parameters are frozen, and listed all the same: they have no state."""
    return optim.AdamW(model.parameters(), lr=1e-2)


def factored(model: nn.Module) -> Any:
    """That of transformers, which Trainer uses: rows, columns, and plain numbers as state."""
    from transformers.optimization import Adafactor

    return Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True)


class Lion(optim.Optimizer):
    """An imitation of lion-pytorch 0.2: one average, no step count."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self._update(param, group["lr"], *group["betas"])

    def _update(self, param: torch.Tensor, lr: float, first: float, second: float) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        average = state["exp_avg"]
        param.sub_(average.lerp(param.grad, 1 - first).sign_(), alpha=lr)  # type: ignore[arg-type]
        average.lerp_(param.grad, 1 - second)  # type: ignore[arg-type]


def lion(model: nn.Module) -> Any:
    return Lion(model.parameters(), {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0})


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": make(optim.SGD),
    "sgd-nesterov": make(optim.SGD, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "sgd-maximize": make(optim.SGD, momentum=0.5, dampening=0.1, lr=1e-4, maximize=True),
    "adafactor": make(optim.Adafactor),
    "muon": matrices,
    "adagrad": make(optim.Adagrad, lr_decay=0.1),
    "rmsprop-centered": make(optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "nadam-foreach": make(optim.NAdam, foreach=True),
    "nadam-decoupled": make(optim.NAdam, foreach=False, decoupled_weight_decay=True),
    "radam": make(optim.RAdam, foreach=True),
    "adamax": make(optim.Adamax),
    "adadelta": make(optim.Adadelta, lr=1.0),
    "asgd": make(optim.ASGD),
    "rprop": make(optim.Rprop, lr=1e-3),
    "adam-amsgrad-fused": make(optim.Adam, amsgrad=True, fused=True),
    "adam-tensor-lr": lambda model: optim.Adam(
        model.parameters(), lr=torch.tensor(1e-2), foreach=False
    ),
    "unlike-groups": unlike_groups,
    "frozen": frozen_and_unused,
    "transformers-adafactor": factored,
    "lion": lion,
}
FROZEN: dict[str, Callable[[nn.Parameter], bool]] = {
    "frozen": lambda param: param.numel() < 200,
    "muon": lambda param: param.dim() != 2,
}
"""Parameters that are frozen before the model is wrapped."""
NOT_CUT = {"adafactor", "rprop", "transformers-adafactor"}
"""Those whose step fails on DTensors, in torch 2.13 and transformers 5.23."""

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "onecycle": lambda optimizer: lr.OneCycleLR(optimizer, max_lr=1e-2, total_steps=9),
    "plateau": lambda optimizer: lr.ReduceLROnPlateau(optimizer, patience=0),
    "restarts": lambda optimizer: lr.CosineAnnealingWarmRestarts(optimizer, 3),
    "sequential": lambda optimizer: lr.SequentialLR(
        optimizer, [lr.LinearLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "lambda": lambda optimizer: lr.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}
CASES = [(name, "none") for name in OPTIMIZERS] + [
    ("unlike-groups", "sequential"), ("sgd-nesterov", "onecycle"), ("adafactor", "plateau"),
    ("adam-tensor-lr", "lambda"), ("nadam-foreach", "restarts"),
]  # fmt: skip


TAKEN: dict[str, Callable[[tuple[str, str]], bool]] = {
    "fsdp2": lambda case: case[0] not in NOT_CUT,
    "ddp": lambda case: case[1] != "none" or case[0] in FROZEN,
}
"""Wrapper -> the cases that it takes; others take all."""


class Run:
    """A model with optimizer, scheduler and the loss scaler of mixed precision."""

    def __init__(self, optimizer: str, scheduler: str, wrap: str, seed: int) -> None:
        model = net(seed)
        for param in model.parameters():
            param.requires_grad_(not FROZEN.get(optimizer, lambda _: False)(param))
        self.model = WRAPS[wrap](model)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            words = batch(step, self.rank)
            logits = self.model(words[:, :-1])
            loss: Any = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                metric = (0.5,) if isinstance(self.scheduler, lr.ReduceLROnPlateau) else ()
                self.scheduler.step(*metric)

    def values(self) -> list[torch.Tensor]:
        """Return what this rank holds of parameters and state: each rank compares its own part."""
        found = [mine(p).detach().clone() for p in self.model.parameters()]
        for param in self.model.parameters():
            state = self.optimizer.state.get(param, {})
            found += [
                mine(v).detach().clone() for v in state.values() if isinstance(v, torch.Tensor)
            ]
        return found

    def save(self, folder: Path) -> None:
        extra = {"scaler": self.scaler.state_dict()}
        ckptmap.save(folder, self.model, self.optimizer, self.scheduler, step=2, extra=extra).wait()

    def load(self, folder: Path, exact: bool) -> Any:
        report = ckptmap.load(folder, self.model, self.optimizer, self.scheduler, exact=exact)
        self.scaler.load_state_dict(dict(report.extra["scaler"]))  # type: ignore[call-overload]
        return report


def mine(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    pairs = zip(one, two, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def goes_on(optimizer: str, scheduler: str, wrap: str, folder: Path) -> None:
    run = Run(optimizer, scheduler, wrap, 0)
    run.train(0, 2)
    run.save(folder)
    before = run.values()
    run.train(2, 4)
    again = Run(optimizer, scheduler, wrap, 1)
    if wrap == "ddp":
        again.train(0, 1)  # a DDP that has run has other buckets
    report = again.load(folder, exact=True)
    assert same(again.values(), before), "other values than were saved"
    assert not report.state.initialised and not report.state.left, report
    again.train(2, 4)
    assert same(run.values(), again.values()), "other values than the uninterrupted run's"
    if run.scheduler is not None:
        assert run.scheduler.get_last_lr() == again.scheduler.get_last_lr()


def on_one_rank(optimizer: str, scheduler: str, wrap: str, folder: Path) -> None:
    """Nothing is lost on the way to one process, but what the world size decides."""
    alone = Run(optimizer, scheduler, "plain", 1)
    report = alone.load(folder, exact=False)
    assert not report.state.initialised and not report.state.left, report
    text = ("world size", "mesh", "how tensors are cut", "no random streams", "gradients averaged")
    assert all(reason.startswith(text) for reason in report.inexact), report.inexact
    with ckptmap.open(folder) as ckpt:
        for fqn, param in alone.model.named_parameters():
            assert torch.equal(param, ckpt[fqn].read())
            for name, value in alone.optimizer.state.get(param, {}).items():
                lazy = ckpt.optimizer[fqn][name]
                assert torch.equal(value, lazy.read()), (fqn, name)
    alone.train(2, 3)


def main(folder: Path, *wraps: str) -> None:
    torch.set_num_threads(1)
    if wraps[0] != "plain" and wraps[0] != "from":
        dist.init_process_group("gloo")
    call = goes_on
    if wraps[0] == "from":
        call, wraps = on_one_rank, wraps[1:]
    failed = []
    for wrap in wraps:
        for optimizer, scheduler in filter(TAKEN.get(wrap), CASES):
            try:
                call(optimizer, scheduler, wrap, folder / f"{wrap}-{optimizer}-{scheduler}")
            except Exception as error:  # all cases are told of at once
                traceback.print_exc(limit=3)
                failed.append(f"{wrap} {optimizer} {scheduler}: {error!r:.300}")
    if dist.is_initialized():
        dist.destroy_process_group()
    assert not failed, "\n".join(["", *failed])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
