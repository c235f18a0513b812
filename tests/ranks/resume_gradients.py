"""Gradients of an accumulation that a save came into, under DDP and FSDP2, on two ranks.

python -m tests.ranks.resume_gradients FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import ckptmap
from ckptmap.errors import CkptmapError
from tests.ranks.resume_save import expect
from tests.support.cpu_sharding import fully_shard
from tests.support.resume_model import WRAPS, batch, net, train


@contextmanager
def fsdp2_apart(model: Any) -> Iterator[None]:
    """Without reduction, and left so: each rank keeps whole gradients of its own."""
    model.set_requires_gradient_sync(False)
    yield


def reducing_in_float32(model: Any) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


Wrap = Callable[[nn.Module], Any]
CASES: dict[str, tuple[Wrap, Callable[[Any], Any], bool]] = {
    "ddp": (WRAPS["ddp"], lambda model: model.no_sync(), True),
    "ddp-reduced": (WRAPS["ddp"], lambda model: nullcontext(), False),
    "fsdp2": (WRAPS["fsdp2"], fsdp2_apart, True),
    "fsdp2-float32": (reducing_in_float32, fsdp2_apart, True),
    "fsdp2-reduced": (WRAPS["fsdp2"], lambda model: nullcontext(), False),
}
"""Name -> wrapper, context of a micro-batch that is not the last, and whether ckptmap can tell that
gradients are pending."""


def backward(model: Any, number: int) -> None:
    words = batch(number, dist.get_rank())
    logits = model(words[:, :-1]).float()
    nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()).backward()


def first_half(model: Any, apart: Callable[[Any], Any]) -> None:
    for number in (10, 11):
        with apart(model):
            backward(model, number)


def second_half(model: Any, optimizer: Any) -> None:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
    backward(model, 12)
    optimizer.step()
    optimizer.zero_grad()


def run(wrap: Wrap, seed: int) -> tuple[Any, Any]:
    model = wrap(net(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def values(model: Any) -> list[torch.Tensor]:
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def it_goes_on(name: str, folder: Path) -> None:
    wrap, apart, told = CASES[name]
    model, optimizer = run(wrap, 0)
    train(model, optimizer, 0, 2, dist.get_rank())
    first_half(model, apart)
    out = folder / name
    if told:
        expect(CkptmapError, "in the middle of gradient accumulation",
               lambda: ckptmap.save(folder / "no", model, optimizer))  # fmt: skip
        ckptmap.save(folder / f"{name}-without", model, optimizer, gradients=False).wait()
    ckptmap.save(out, model, optimizer, gradients=True).wait()
    second_half(model, optimizer)
    wanted = values(model)

    again, theirs = run(wrap, 1)
    train(again, theirs, 0, 1, dist.get_rank())  # DDP has built its buckets, as that of the run has
    report = ckptmap.load(out, again, theirs, exact=True)
    assert len(report.gradients) == len(list(again.parameters())), report
    assert "gradients restored" in str(report) and not report.extra, report
    second_half(again, theirs)
    for one, two in zip(wanted, values(again), strict=True):
        assert torch.equal(one, two), name
    if told:
        expect(CkptmapError, "gradients of an accumulation were left out",
               lambda: ckptmap.load(folder / f"{name}-without", again, theirs, exact=True))  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        it_goes_on(case, Path(sys.argv[1]))
        dist.barrier()
    dist.destroy_process_group()
