"""Two ranks: torchao's low-bit states without the fix and with it; streams of replicas and shards.

python -m tests.ranks.resume_streams
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.live.model.find_targets import find_targets
from ckptmap.live.model.rng_state import shard_of
from ckptmap.live.quantized import torchao_lowbit_fix as fix_lowbit
from ckptmap.live.quantized.library_fixes import states
from tests.support.cpu_sharding import fully_shard
from tests.support.resume_model import built, train
from tests.support.resume_optimizers import ALL


def run(wrap: str, seed: int = 0, name: str = "ao8") -> tuple[Any, Any]:
    model = built(wrap, "one-weight", seed, torch.bfloat16)
    return model, ALL[name](p for p in model.parameters() if p.requires_grad)


def without_the_fix() -> None:
    """The control: the installed torchao fails, and `doctor` says that it will."""
    if not fix_lowbit.needed():
        return
    said = [state.asks for state in states() if "low-bit" in state.name]
    assert any("will fail in step()" in problem for problem in said), said
    model, optimizer = run("fsdp2")
    try:
        train(model, optimizer, 0, 1)
    except Exception as error:
        assert "OptimState8bit" in str(error) or "dtype" in str(error), error
    else:
        raise AssertionError("it steps: the fix is not needed")


def with_the_fix(folder: Path) -> None:
    """Applied by `load` on request; the state then has the parameter's dtype, and steps."""
    model, optimizer = run("plain", name="adamw")
    train(model, optimizer, 0, 1)
    ckptmap.save(folder / "adamw", model, optimizer, replicas="first").wait()
    model, optimizer = run("fsdp2", 1)
    ckptmap.load(folder / "adamw", model, optimizer, fix=True)
    assert not fix_lowbit.needed() and not fix_lowbit.apply()
    assert not [state for state in states() if state.asks or state.problem]
    train(model, optimizer, 1, 2)
    (state,) = optimizer.state.values()
    assert state["exp_avg"].to_local().dtype == torch.bfloat16 == state["exp_avg"].dtype


def streams_of_shards(folder: Path) -> None:
    """Fresh ones: other bits on other shards, the same on replicas, which thus stay equal."""
    for wrap, equal in (("fsdp2", False), ("ddp", True)):
        torch.manual_seed(10 + dist.get_rank())
        model, optimizer = run(wrap, 2)
        report = ckptmap.load(folder / "adamw", model, optimizer)
        assert "fresh" not in report.streams, report.streams  # recorded, of the same world size
        report = ckptmap.load(folder / "adamw", model, optimizer, random="fresh")
        assert report.streams.startswith("fresh, seed")
        mine = torch.get_rng_state()
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(*both) == equal, wrap
        if wrap == "ddp":
            train(model, optimizer, 1, 4, dist.get_rank())
            ckptmap.save(folder / "equal", model, optimizer).wait()  # which checks replicas


def streams_of_tensor_parallel_ranks() -> None:
    """Norms are whole on both ranks, other weights are cut: what both hold is rounded alike."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for frozen in (False, True):
        model = built("plain", "eager", 0)
        parallelize_module(model.layers[0], mesh, plan)
        for name, param in model.named_parameters():
            param.requires_grad_(not frozen or name == "layers.0.up.weight")
        found = shard_of(find_targets(model)[0])
        assert found == ((dist.get_rank(),) if frozen else ()), found


def other_gradients(folder: Path) -> None:
    """Cut alike, but gradients are averaged, or made in another precision: not exact."""
    model, optimizer = run("plain", name="adamw")
    ckptmap.save(folder / "alone", model, optimizer, replicas="first").wait()
    low = functools.partial(fully_shard, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    model, optimizer = run("fsdp2", name="adamw")
    ckptmap.save(folder / "cut", model, optimizer).wait()
    ckptmap.load(folder / "cut", *run("fsdp2", 1, "adamw"), exact=True)
    another: Any = low(built("plain", "one-weight", 1, torch.bfloat16))
    cases = [
        ("alone", run("ddp", 1, "adamw"), "averaged by: was [], is ['DistributedDataParallel']"),
        ("cut", (another, ALL["adamw"](another.parameters())), "is ['param_dtype=torch.bfloat16']"),
    ]
    for name, live, reason in cases:
        try:
            ckptmap.load(folder / name, *live, exact=True)
        except LoadError as error:
            assert error.code == "CKM507" and reason in str(error), error
        else:
            raise AssertionError(f"{name}: exact")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo")
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(place)
    without_the_fix()
    dist.barrier()
    with_the_fix(Path(place[0]))
    streams_of_shards(Path(place[0]))
    streams_of_tensor_parallel_ranks()
    other_gradients(Path(place[0]))
    dist.barrier()
    dist.destroy_process_group()
