"""Saves of two ranks that go wrong, and that follow each other.

python -m tests.ranks.resume_save FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptmap
from ckptmap.errors import CkptmapError, LoadError, RunError
from ckptmap.live.save.save import save
from tests.support.resume_model import built, net, train


def expect(kind: type[CkptmapError], text: str, call: Any) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def drifted(folder: Path) -> None:
    model = built("ddp", "eager", 0)
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        model.module.layers[0].up.weight[3, 3] += dist.get_rank()
    expect(RunError, "replicas that differ", lambda: save(folder / "drifted", model, optimizer))
    save(folder / "drifted", model, optimizer, replicas="first").wait()
    with ckptmap.open(folder / "drifted") as ckpt:
        want = net(0).layers[0].up.weight  # type: ignore[union-attr]
        assert torch.equal(ckpt["layers.0.up.weight"].read(), want)  # type: ignore[arg-type]
    text = "each rank had its own layers.0.up.weight, one was saved"
    expect(LoadError, text, lambda: ckptmap.load(folder / "drifted", model, optimizer, exact=True))


def buffers_may_differ(folder: Path) -> None:
    """DDP makes them equal at the next forward only; rank 0's are saved, as everywhere."""
    model = built("ddp", "eager", 0)
    model.module.calls.fill_(dist.get_rank() + 5)
    save(folder / "buffers", model).wait()
    with ckptmap.open(folder / "buffers") as ckpt:
        assert torch.equal(ckpt["calls"].read(), torch.full((3,), 5.0))


def one_rank_fails(folder: Path) -> None:
    """Its own error there, a RunError that names it elsewhere; and nothing is published."""
    model = built("fsdp2", "eager", 0)
    mine = model if dist.get_rank() == 0 else net(0)
    kind = CkptmapError
    expect(
        kind, "optimizer" if dist.get_rank() else "[rank 1]", lambda: other_optimizer(folder, mine)
    )
    dist.barrier()
    assert not (folder / "failed").exists()


def other_optimizer(folder: Path, model: Any) -> None:
    wrong = net(5) if dist.get_rank() else model
    save(folder / "failed", model, torch.optim.AdamW(wrong.parameters())).wait()


def sharded_extra(folder: Path) -> None:
    """A shard is no value of rank 0, which alone gives extra ones."""
    model = built("fsdp2", "eager", 0)
    average = {"average": dict(model.state_dict())}
    for background in (True, False):
        expect(
            CkptmapError, "extra.average.embed.weight: is a tensor of class DTensor",
            lambda background=background: save(
                folder / "sharded", model, extra=average, background=background
            ),
        )  # fmt: skip
    assert not (folder / "sharded").exists()


def extra_of_ranks(folder: Path) -> None:
    """Shared values are the same on all ranks, or given by rank 0 alone; others are per rank."""
    model, rank = built("fsdp2", "eager", 0), dist.get_rank()
    values: dict[str, Any] = {"epoch": 3, "loader": {"seen": torch.arange(rank + 1)}}
    text = "extra['loader']: differs between rank 0 and rank 1"
    expect(CkptmapError, text, lambda: save(folder / "extra", model, extra=values))
    text = "step: is 3 on rank 0 and 4 on rank 1"
    expect(CkptmapError, text, lambda: save(folder / "extra", model, step=3 + rank))
    shared = {"epoch": 3, "nan": float("nan"), "seen": torch.ones(2)}
    mine = {"loader": {"seen": torch.arange(rank + 1), "epoch": rank}, "name": f"rank {rank}"}
    save(
        folder / "extra", model, extra=shared if rank == 0 else None, extra_per_rank=mine
    ).wait()  # fmt: skip
    report = ckptmap.load(folder / "extra", model, exact=True)
    assert report.extra["epoch"] == 3 and "per_rank" not in report.extra
    found: Any = report.extra_per_rank
    assert found["name"] == f"rank {rank}" and found["loader"]["epoch"] == rank
    assert torch.equal(found["loader"]["seen"], torch.arange(rank + 1))


def one_after_another(folder: Path) -> None:
    """The second waits for the first; both are whole."""
    model = built("fsdp2", "eager", 0)
    optimizer = torch.optim.AdamW(model.parameters())
    handles = []
    for step in range(3):
        train(model, optimizer, step, step + 1)
        handles.append(save(folder / f"step-{step}", model, optimizer, step=step))
    notes = [handle.wait() for handle in handles]
    assert notes == [(), (), ()]
    dist.barrier()
    for step in range(3):
        with ckptmap.open(folder / f"step-{step}") as ckpt:
            assert ckpt.extra["step"] == step
            assert float(ckpt.optimizer["embed.weight"]["step"].read()) == step + 1
            assert ckpt.world_size == 2
    assert len(list((folder / "step-2").glob("*.distcp"))) == 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scenario in (
        drifted, buffers_may_differ, one_rank_fails, sharded_extra, extra_of_ranks, one_after_another,
    ):  # fmt: skip
        scenario(Path(sys.argv[1]))
        dist.barrier()
    dist.destroy_process_group()
