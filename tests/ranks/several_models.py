"""A policy in FSDP2 with a sharded average, a critic in DDP and a reward in FSDP1, saved as one.

python -m tests.ranks.several_models PATH    saves where PATH is absent, and loads

At the world size of the save training goes on bit for bit; at another one values are compared.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptmap
from ckptmap.errors import LoadError
from tests.support.resume_model import ddp, fsdp1, fsdp2, net, train


class Loader:
    """The position of one rank's data: torch's Stateful."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": torch.arange(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["order"], torch.arange(state["at"]))
        self.at = state["at"]


def built(seed: int) -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    policy, critic, reward = net(seed), ddp(net(seed + 1)), fsdp1(net(seed + 2))
    ema = AveragedModel(policy, use_buffers=True)  # before FSDP2, which cannot be copied
    models = {
        "policy": fsdp2(policy), "target": fsdp2(net(seed)), "ema": ema,
        "critic": critic, "reward": reward,
    }  # fmt: skip
    fsdp2(ema.module)
    return models, {
        "policy": torch.optim.AdamW(policy.parameters(), lr=0.01),
        "critic": torch.optim.SGD(critic.parameters(), lr=0.01, momentum=0.9),
        "reward": torch.optim.AdamW(reward.parameters(), lr=0.01),
    }


def go_on(models: Any, optimizers: Any, first: int, last: int) -> None:
    for step in range(first, last):
        for name, optimizer in optimizers.items():
            train(models[name], optimizer, step, step + 1)
        models["ema"].update_parameters(models["policy"])


def local(model: Any) -> list[torch.Tensor]:
    return [
        (p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in model.parameters()
    ]


def saved_and_resumed(path: Path) -> None:
    rank = dist.get_rank()
    models, optimizers = built(0)
    go_on(models, optimizers, 0, 2)
    loader, scaler = Loader(), torch.amp.GradScaler("cpu", init_scale=4.0)
    loader.at = 3 + rank
    ckptmap.save(
        path, models, optimizers, step=2, stateful={"loader": loader, "scaler": scaler}
    ).wait()
    go_on(models, optimizers, 2, 4)

    others, theirs = built(7)
    go_on(others, theirs, 0, 1)  # FSDP1 and DDP build state and buckets in their first step
    again = Loader()
    scaler = torch.amp.GradScaler("cpu")
    report = ckptmap.load(
        path, others, theirs, exact=True, stateful={"loader": again, "scaler": scaler}
    )
    assert report.inexact == () and again.at == 3 + rank and scaler.get_scale() == 4.0
    go_on(others, theirs, 2, 4)
    for name in models:
        for a, b in zip(local(models[name]), local(others[name]), strict=True):
            assert torch.equal(a, b), name


def at_another_world_size(path: Path) -> None:
    """Values are the checkpoint's; the loader's position, which was each rank's own, is refused."""
    models, optimizers = built(7)
    try:
        ckptmap.load(path, models, optimizers, stateful={"loader": Loader()})
    except LoadError as error:
        assert error.code == "CKM519" and "differs between ranks" in error.message, error
    else:
        raise AssertionError("a position of other ranks was taken")
    ckptmap.load(path, models, optimizers, stateful={"scaler": torch.amp.GradScaler("cpu")})
    again = path.with_name(f"{path.name}-again")
    ckptmap.save(again, models, optimizers).wait()
    with ckptmap.open(path) as first, ckptmap.open(again) as second:
        assert list(first) == list(second)
        for fqn in first:
            assert torch.equal(first[fqn].read(), second[fqn].read()), fqn
        assert first.optimizer.keys() == second.optimizer.keys()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = Path(sys.argv[1])
    (at_another_world_size if place.exists() else saved_and_resumed)(place)
    dist.barrier()
    dist.destroy_process_group()
