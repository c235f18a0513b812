"""Four ranks that do not agree: every one of them is told, none waits, nothing is lost in silence.

python -m tests.ranks.resume_agree FOLDER
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import ckptmap
from ckptmap.errors import ArgumentError, CkptmapError, LoadError, RunError
from tests.support.cpu_sharding import fully_shard

LAST = 3
CPU = torch.device("cpu")
PATIENCE = timedelta(seconds=40)
"""A rank that waits for others longer than this fails the test."""


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return optimizer


def refused(call: Callable[[], Any], code: str, text: str) -> CkptmapError:
    try:
        call()
    except CkptmapError as error:
        assert error.code == code and text in str(error), error
        return error
    raise AssertionError(f"no {code}: rank {dist.get_rank()} went on")


def everywhere(call: Callable[[], Any], code: str, text: str, kind: type[CkptmapError]) -> None:
    """The last rank's own error there, one that names it elsewhere."""
    error = refused(call, code, text)
    if dist.get_rank() != LAST:
        assert f"[rank {LAST}]" in str(error) and type(error) is kind, error


# ------------------------------------------------------------------------------- one name, meshes


def groups_of_their_own(folder: Path) -> None:
    """Each expert group has other weights under the same names; a tensor-parallel pair the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    expert = int(mesh["ep"].get_local_rank())
    for name, wrap in (("fsdp2", sharded), ("fsdp1", flat)):
        model = wrap(net(expert), mesh["dp"])
        optimizer = stepped(model)
        target = folder / f"experts-{name}"
        refused(lambda: ckptmap.save(target, model, optimizer), "CKM509", "of different meshes")  # noqa: B023
        ckptmap.save(target, model, optimizer, replicas="first").wait()
        if dist.get_rank() < 2:
            assert same(target, model), name
        same_model = wrap(net(7), mesh["dp"])
        ckptmap.save(folder / f"same-{name}", same_model, stepped(same_model)).wait()
        assert same(folder / f"same-{name}", same_model), name


def only_moments_differ(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    model = sharded(net(0), mesh["dp"])
    optimizer = stepped(model)
    with torch.no_grad():
        optimizer.state[model[1].weight]["exp_avg"].to_local().add_(mesh["ep"].get_local_rank())
    refused(
        lambda: ckptmap.save(folder / "moments", model, optimizer), "CKM509", "state.1.weight.exp_avg"
    )  # fmt: skip


def whole_here_cut_there(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    model = net(0) if dist.get_rank() < 2 else sharded(net(1), mesh["dp"])
    refused(lambda: ckptmap.save(folder / "mixed", model), "CKM510", "holds all of it, rank 2")


def sharded(model: Any, mesh: Any) -> Any:
    return fully_shard(model, mesh=mesh)


def flat(model: Any, mesh: Any) -> Any:
    return FullyShardedDataParallel(
        model, process_group=mesh.get_group(), use_orig_params=True, device_id=CPU
    )


def same(target: Path, model: nn.Module) -> bool:
    """Is what this rank holds what was saved?"""
    before = {name: local(value).clone() for name, value in model.named_parameters()}
    ckptmap.load(target, model)
    return all(torch.equal(before[name], local(p)) for name, p in model.named_parameters())


def local(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found.detach()


# ------------------------------------------------------------------------------- one rank fails


def replicas_are_told(folder: Path) -> None:
    """Those of HYBRID_SHARD, and under `replicate()` before and after its first forward."""
    ckptmap.save(folder / "plain", net(0)).wait()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    hybrid = FullyShardedDataParallel(
        net(0), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=CPU
    )
    new, used = net(0), net(0)
    replicate(new)
    replicate(used)
    used(torch.ones(2, 8))
    path = folder / ("nowhere" if dist.get_rank() == LAST else "plain")
    for model in (hybrid, new, used):
        everywhere(lambda: ckptmap.load(path, model), "CKM101", "nowhere", LoadError)  # noqa: B023


def load_agrees_on_all(folder: Path) -> None:
    """What is refused before the checkpoint is opened: arguments, and kinds of model."""
    model: Any = fully_shard(net(0))
    mine = dist.get_rank() == LAST
    saved = folder / "plain"
    everywhere(
        lambda: ckptmap.load(None if mine else saved, model),  # type: ignore[arg-type]
        "CKM516", "path=None", LoadError,
    )  # fmt: skip
    everywhere(
        lambda: ckptmap.load(saved, model, scheduler=5 if mine else None),
        "CKM516", "scheduler=5", LoadError,
    )  # fmt: skip
    if mine:
        model.add_module("lazy", nn.LazyLinear(3))
    everywhere(lambda: ckptmap.load(saved, model), "CKM505", "no shape yet", LoadError)


def save_agrees_on_all(folder: Path) -> None:
    """As first of all calls, too: the ranks must know each other before an argument is refused."""
    model: Any = fully_shard(net(0))
    mine = dist.get_rank() == LAST
    extra = {"step": 3} if mine else None
    everywhere(
        lambda: ckptmap.save(folder / "no", model, step=1, extra=extra),
        "CKM516", "extra['step']=3", RunError,
    )  # fmt: skip
    everywhere(
        lambda: ckptmap.save(None if mine else folder / "no", model),  # type: ignore[arg-type]
        "CKM516", "path=None", RunError,
    )  # fmt: skip
    assert not (folder / "no").exists() and issubclass(ArgumentError, CkptmapError)


def one_checkpoint_for_all(folder: Path) -> None:
    """Another one of the same names and sizes is told by its bytes; a copy elsewhere is the same."""
    model: Any = fully_shard(net(0))
    ckptmap.save(folder / "first", model).wait()
    other: Any = fully_shard(net(1))
    ckptmap.save(folder / "second", other).wait()
    rank = dist.get_rank()
    copied = shutil.copytree(folder / "first", folder / f"copy{rank}")
    ckptmap.load(copied, model)
    path = folder / ("second" if rank == LAST else "first")
    refused(lambda: ckptmap.load(path, other), "CKM509", "is not the same file for ranks")
    ckptmap.load(folder / "first", other)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(one), local(two))


# ------------------------------------------------------------------------------- buffers


def buffers_of_each_rank(folder: Path) -> None:
    """Statistics of BatchNorm: rank 0's are saved, and both save and load say so."""

    def made() -> Any:
        return fully_shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

    model = made()
    model(torch.arange(12.0).view(3, 4) * (1 + dist.get_rank()))
    (note,) = ckptmap.save(folder / "norm", model).wait()
    assert note.startswith("2 buffers differ between ranks"), note
    assert "1.running_mean, 1.running_var" in note, note
    report = ckptmap.load(folder / "norm", model)
    assert any("its own of 2 buffers" in why for why in report.inexact), report.inexact
    assert ckptmap.save(folder / "norm-again", model).wait() == ()
    report = ckptmap.load(folder / "norm-again", made())
    assert not any("buffer" in why for why in report.inexact), report.inexact


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    for scenario in (
        save_agrees_on_all, groups_of_their_own, only_moments_differ, whole_here_cut_there,
        replicas_are_told, load_agrees_on_all, one_checkpoint_for_all, buffers_of_each_rank,
    ):  # fmt: skip
        scenario(Path(sys.argv[1]))
        dist.barrier()
    dist.destroy_process_group()
