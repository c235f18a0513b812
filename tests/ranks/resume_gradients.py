"""Gradients of an accumulation that a save came into, under DDP, FSDP1 and FSDP2, on two ranks.

python -m tests.ranks.resume_gradients FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ckptmap
from ckptmap.errors import CkptmapError
from tests.ranks.resume_save import expect
from tests.support.cpu_sharding import fully_shard
from tests.support.resume_model import WRAPS, Layer, batch, net, train


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


@contextmanager
def fsdp1_second_apart(model: Any) -> Iterator[None]:
    """Reduced at first, then without reduction: FSDP1 keeps both."""
    count = model.__dict__["count"] = model.__dict__.get("count", 0) + 1
    with nullcontext() if count % 2 else model.no_sync():
        yield


def fsdp1(model: Any, **options: Any) -> Any:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        device_id=torch.device("cpu"),
        **options,
    )


def no_sync(model: Any) -> Any:
    return model.no_sync()


PARAMS = len(list(net(0).parameters()))
Wrap = Callable[[nn.Module], Any]
BF16 = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=False)
ZERO2, NO_SHARD = ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
ORIG, FLAT = {"use_orig_params": True}, {"use_orig_params": False}
FSDP1: dict[str, tuple[dict[str, Any], Callable[[Any], Any], bool]] = {
    "orig": (ORIG, no_sync, True),
    "orig-reduced": (ORIG, lambda model: nullcontext(), False),
    "orig-both": (ORIG, fsdp1_second_apart, True),
    "flat": (FLAT, no_sync, True),
    "flat-reduced": (FLAT, lambda model: nullcontext(), False),
    "flat-both": (FLAT, fsdp1_second_apart, True),
    "zero2-both": (ORIG | {"sharding_strategy": ZERO2}, fsdp1_second_apart, True),
    "no-shard": (FLAT | {"sharding_strategy": NO_SHARD}, no_sync, False),
    "bf16-both": (ORIG | {"mixed_precision": BF16}, fsdp1_second_apart, True),
}
CASES: dict[str, tuple[Wrap, Callable[[Any], Any], bool]] = {
    "ddp": (WRAPS["ddp"], lambda model: model.no_sync(), True),
    "ddp-reduced": (WRAPS["ddp"], lambda model: nullcontext(), False),
    "fsdp2": (WRAPS["fsdp2"], fsdp2_apart, True),
    "fsdp2-float32": (reducing_in_float32, fsdp2_apart, True),
    "fsdp2-reduced": (WRAPS["fsdp2"], lambda model: nullcontext(), False),
    **{
        f"fsdp1-{k}": (partial(fsdp1, **how), apart, told)
        for k, (how, apart, told) in FSDP1.items()
    },
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
    if not name.startswith("fsdp1-orig"):  # those have not run a forward yet
        # DDP has built its buckets, as that of the run has.
        train(again, theirs, 0, 1, dist.get_rank())
    report = ckptmap.load(out, again, theirs, exact=True)
    assert len(report.gradients) == PARAMS, report
    assert "gradients restored" in str(report) and not report.extra, report
    second_half(again, theirs)
    for one, two in zip(wanted, values(again), strict=True):
        assert torch.equal(one, two), name
    if told:
        expect(CkptmapError, "gradients of an accumulation were left out",
               lambda: ckptmap.load(folder / f"{name}-without", again, theirs, exact=True))  # fmt: skip


def into_another_wrapper(folder: Path) -> None:
    """What FSDP1 has reduced, and what it has not, goes on under FSDP2; and the other way round."""
    for name, wrap in (("fsdp1-flat-both", WRAPS["fsdp2"]), ("fsdp2", partial(fsdp1, **FLAT))):
        ends = []
        for kind in (CASES[name][0], wrap):
            model, optimizer = run(kind, 1)
            report = ckptmap.load(folder / name, model, optimizer)
            assert len(report.gradients) == PARAMS, report
            second_half(model, optimizer)
            ckptmap.save(folder / f"{name}-end", model, overwrite=True).wait()
            ends.append(net(2))
            ckptmap.load(folder / f"{name}-end", ends[-1])
            dist.barrier()
        for one, two in zip(*(end.parameters() for end in ends), strict=True):
            assert torch.equal(one, two), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        it_goes_on(case, Path(sys.argv[1]))
        dist.barrier()
    into_another_wrapper(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
