"""Train 7 steps; in another process 3, after loading what the first saved at 4: the same bits.

python -m tests.ranks.resume_exact first|second FOLDER OPTIMIZERS WRAPS MODE

`first` trains and saves, with what it has after 7 steps; `second` loads, trains and compares, also
without the random streams, which must then differ wherever an optimizer rounds stochastically.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptmap
from tests.support.resume_model import built, train
from tests.support.resume_optimizers import ALL, LOW_BIT, ROUNDING, inner

SAVED, LAST = 4, 7
"""Steps; the scheduler changes the learning rate after 3 and 6, before the save and after it."""


def run(name: str, wrap: str, mode: str, seed: int) -> tuple[Any, Any, Any]:
    from ckptmap.live.quantized import torchao_lowbit_fix as fix_lowbit

    fix_lowbit.apply()
    model = built(wrap, mode, seed, torch.bfloat16)
    optimizer = {**ALL, **LOW_BIT}[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return model, optimizer, scheduler


def steps(model: Any, optimizer: Any, scheduler: Any, first: int, last: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, last):
        train(model, optimizer, step, step + 1, rank)
        scheduler.step()


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """All that this rank holds, as plain tensors."""
    found: dict[str, Any] = {}
    for number, param in enumerate(model.parameters()):
        values = inner(param.detach())[0]
        # A flat parameter of FSDP1 is padded by what happens to be in memory.
        padding: int = getattr(param, "_shard_numel_padded", 0)
        found[f"{number}"] = values[: len(values) - padding].clone()
        for key, value in optimizer.state[param].items():
            if isinstance(value, torch.Tensor):
                for at, part in enumerate(inner(value)):
                    found[f"{number}.{key}.{at}"] = part.detach().clone()
            else:
                found[f"{number}.{key}"] = value
    found["lr"] = [float(group["lr"]) for group in optimizer.param_groups]
    return found


def differing(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    assert one.keys() == two.keys()
    return [
        key
        for key, value in one.items()
        if not (
            torch.equal(value, two[key]) and value.dtype == two[key].dtype
            if isinstance(value, torch.Tensor)
            else value == two[key]
        )
    ]


def first(folder: Path, name: str, wrap: str, mode: str) -> None:
    torch.manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))
    state = torch.get_rng_state()
    run_ = run(name, wrap, mode, seed=0)
    torch.set_rng_state(state)  # building a model draws the same on all ranks
    steps(*run_, 0, SAVED)
    handle = ckptmap.save(folder / name, *run_, step=SAVED)
    steps(*run_, SAVED, LAST)  # while it is written
    handle.wait()
    torch.save(everything(*run_[:2]), folder / f"{name}.{rank()}.pt")


def second(folder: Path, name: str, wrap: str, mode: str) -> None:
    want = torch.load(folder / f"{name}.{rank()}.pt")
    run_ = run(name, wrap, mode, seed=1)
    report = ckptmap.load(folder / name, *run_, exact=True)
    assert report.step == SAVED and report.streams == "restored" and not report.inexact, report
    steps(*run_, SAVED, LAST)
    wrong = differing(everything(*run_[:2]), want)
    assert not wrong, (name, wrong)
    if name in ROUNDING or name.endswith("-sr"):
        without = run(name, wrap, mode, seed=2)
        report = ckptmap.load(folder / name, *without, random="leave")
        assert "random streams are left as they are" in report.inexact
        torch.manual_seed(1234)
        steps(*without, SAVED, LAST)
        assert differing(everything(*without[:2]), want), f"{name}: equal without its streams"


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def main(part: str, folder: Path, names: str, wraps: str, mode: str) -> None:
    for wrap in wraps.split(","):
        (folder / wrap).mkdir(exist_ok=True)
        for name in names.split(","):
            {"first": first, "second": second}[part](folder / wrap, name, wrap, mode)


if __name__ == "__main__":
    import os

    torch.set_num_threads(1)
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    if os.environ.get("CKPTMAP_TEST_EAGER"):
        torch.compiler.set_stance("force_eager")
    if "CKPTMAP_TEST_BACKEND" in os.environ:  # torchao's step says none
        backend = os.environ["CKPTMAP_TEST_BACKEND"]
        torch.compile = functools.partial(torch.compile, backend=backend)  # type: ignore[assignment]
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    if several:
        dist.barrier()
        dist.destroy_process_group()
