"""Four ranks: low-bit moments on 2-D meshes and in flat parameters.

python -m tests.ranks.resume_meshes FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ckptmap
from ckptmap.live.quantized import torchao_lowbit_fix as fix_lowbit
from tests.support.cpu_sharding import fully_shard
from tests.support.resume_model import WRAPS, built, net, train
from tests.support.resume_optimizers import ALL, same_state


def fsdp_over_tp(seed: int) -> Any:
    """Columns and rows of the MLPs over two ranks, then FSDP2 over two more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = net(seed)
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan if layer.up.out_features == 128 else {})
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def make(kind: str, name: str, seed: int) -> tuple[Any, Any]:
    dtype = torch.float32 if name == "sgd" else torch.bfloat16
    model = fsdp_over_tp(seed) if kind == "tp" else built(kind, "eager", seed, dtype)
    return model, ALL[name](model.parameters())


def same_layout(folder: Path, kind: str, name: str) -> None:
    """The same bits in the same form: codes of columns are blocks of each rank's own."""
    model, optimizer = make(kind, name, 0)
    rank = 0 if kind == "hsdp" else dist.get_rank() // (2 if kind == "tp" else 1)
    torch.manual_seed(5 + (dist.get_rank() % 2 if kind == "hsdp" else dist.get_rank()))
    train(model, optimizer, 0, 2, rank)
    target = folder / f"{kind}-{name}"
    ckptmap.save(target, model, optimizer).wait()
    again, theirs = make(kind, name, 1)
    report = ckptmap.load(target, again, theirs)
    assert report.state is not None and not report.state.initialised, report
    assert not report.inexact and not report.state.recoded, report
    assert not same_state(optimizer, theirs), (kind, name, same_state(optimizer, theirs))
    train(again, theirs, 2, 3, rank)
    anywhere(target)


def flat_otherwise(target: Path) -> None:
    """Codes of one wrapping's shards are not those of another's: decoded, encoded anew, and said."""
    model, optimizer = make("fsdp1-flat", "ao8", 1)
    report = ckptmap.load(target, model, optimizer)
    assert any("decoded when it was saved" in why for why in report.inexact), report.inexact
    assert report.state is not None and not report.state.copied and not report.state.initialised
    assert all(one.error < 0.02 for one in report.state.recoded), report.state.recoded


def anywhere(target: Path) -> None:
    """In one plain process, too: values are those of the whole tensor."""
    plain = net(9)
    optimizer = torch.optim.AdamW(plain.parameters())
    with ckptmap.open(target) as ckpt:
        ckptmap.load(ckpt, plain, optimizer)
        for fqn, param in plain.named_parameters():
            if "exp_avg" in ckpt.optimizer[fqn]:
                want = ckpt.optimizer[fqn]["exp_avg"].read().float()
                assert torch.equal(optimizer.state[param]["exp_avg"], want), fqn
    if dist.get_rank() == 0:
        assert ckptmap.verify(target).ok
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo")
    fix_lowbit.apply()
    assert "hsdp" in WRAPS
    for chosen in (
        ("hsdp", "ao8"), ("tp", "adamw"), ("fsdp1", "ao8"), ("fsdp1-flat", "ao8"), ("fsdp1", "sgd"),
    ):  # fmt: skip
        same_layout(Path(sys.argv[1]), *chosen)
        dist.barrier()
    flat_otherwise(Path(sys.argv[1]) / "fsdp1-ao8")
    dist.barrier()
    dist.destroy_process_group()
