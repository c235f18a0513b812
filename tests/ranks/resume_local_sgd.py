"""torch's PostLocalSGDOptimizer, whose averager counts steps that no parameter's state has: `exact` refuses a
checkpoint without the count, and with it the run goes on bit for bit. So it is with hooks of DDP that keep what they
have not sent yet.

python -m tests.ranks.resume_local_sgd FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import ckptmap
from ckptmap.errors import LoadError
from tests.ranks.resume_save import expect
from tests.support.resume_model import ddp, net, train

INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}


def built(seed: int, name: str) -> tuple[nn.Module, Any]:
    model = ddp(net(seed))
    averager = PeriodicModelAverager(period=3, warmup_steps=1)
    return model, PostLocalSGDOptimizer(optim=INNER[name](model), averager=averager)


def goes_on(folder: Path, name: str) -> None:
    rank = dist.get_rank()
    model, optimizer = built(0, name)
    train(model, optimizer, 0, 4, rank)
    notes = ckptmap.save(folder / "without", model, optimizer).wait()
    assert rank or any("PostLocalSGDOptimizer keeps step of its own" in note for note in notes)
    again, theirs = built(1, name)
    try:
        ckptmap.load(folder / "without", again, theirs, exact=True)
        raise AssertionError("exact took it without the count of its averager")
    except LoadError as error:
        assert error.code == "CKM507" and "keeps step of its own" in str(error), error
    ckptmap.save(folder / "with", model, optimizer, stateful={"sgd": optimizer}).wait()
    report = ckptmap.load(folder / "with", again, theirs, stateful={"sgd": theirs}, exact=True)
    assert not report.changes and theirs.averager.step == optimizer.averager.step == 4
    train(model, optimizer, 4, 9, rank)
    train(again, theirs, 4, 9, rank)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs), name


class Feedback:
    """What a hook has rounded away, by bucket, to be sent in the next step."""

    def __init__(self) -> None:
        self.left: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.left)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = dict(state)


def send(state: Feedback, bucket: Any) -> Any:
    name, whole = str(bucket.index()), bucket.buffer()
    whole = whole + state.left.get(name, torch.zeros_like(whole))
    sent = whole.to(torch.bfloat16).float()
    state.left[name] = whole - sent
    sent.div_(dist.get_world_size())
    work: Any = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


send.__annotations__.clear()  # torch compares them with classes, and finds text


def hooked(seed: int, state: Any = None, hook: Any = send) -> tuple[Any, Any]:
    model: Any = ddp(net(seed))
    if state is not None:
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 50, 51, dist.get_rank())  # DDP orders its buckets anew after a step
    return model, optimizer


def hooks(folder: Path) -> None:
    rank, state, path = dist.get_rank(), Feedback(), folder / "hooks"
    model, optimizer = hooked(0, state)
    train(model, optimizer, 0, 2, rank)
    ckptmap.save(path, model, optimizer, stateful={"hook": state}).wait()
    plain = hooked(1)
    text = "communication hooks: was ['send with a Feedback'], is None"
    expect(LoadError, text, lambda: ckptmap.load(path, *plain, exact=True))
    power = PowerSGDState(None, matrix_approximation_rank=1)
    other = hooked(1, power, powerSGD_hook)
    text = "gradients go through powerSGD_hook with a PowerSGDState, which is not saved"
    expect(LoadError, text, lambda: ckptmap.load(path, *other, exact=True))
    mine = Feedback()
    again, theirs = hooked(1, mine)
    text = "gradients go through send with a Feedback, which is not saved"
    expect(LoadError, text, lambda: ckptmap.load(path, again, theirs, exact=True))
    ckptmap.load(path, again, theirs, stateful={"hook": mine}, exact=True)
    want = train(model, optimizer, 2, 4, rank)
    assert train(again, theirs, 2, 4, rank) == want
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hooks(Path(sys.argv[1]))
    for inner in INNER:
        goes_on(Path(sys.argv[1]) / inner, inner)
        dist.barrier()
    dist.destroy_process_group()
