"""Rounding by position under tensor parallelism, alone and with FSDP2: 8- and 4-bit moments whose blocks are cut by columns.

python -m tests.ranks.rounding_columns FOLDER PARTS OPTIMIZERS

Each step computes the gradient of the whole model on every rank, from all of its weights, so that gradients have the same
bits on any mesh, and depend on what the steps before made of the weights.
"""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.integrations.dcp import load_planner, save_planner
from ckptmap.live.model.live_tensor import like
from ckptmap.live.quantized import torchao_lowbit_fix
from ckptmap.live.rounding import install, shared_scales
from ckptmap.live.rounding.blocks_around import decode, is_around
from ckptmap.live.rounding.moments import CUT, grid_of
from ckptmap.live.rounding.positions import boxes_of
from ckptmap.quantization.blockwise.dequantize import window
from tests.support.cpu_sharding import fully_shard
from tests.support.resume_optimizers import torchao

SEED, WIDTH = 11, 128


class Block(nn.Module):
    """TP cuts `up` by rows and `down` by columns."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Columns of `down` on 4 ranks, in blocks of 256 or 128 elements: 90, which are none; 37, an odd number; 256, whole
    blocks; and of [64, 148], whose rows two ranks cut inside a block, too."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = Block(WIDTH, 360), Block(WIDTH, 148)
        self.narrow, self.whole = Block(64, 148), Block(16, 1024)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.odd(self.even(x)))
        found: torch.Tensor = self.narrow(x[:, :64]) + self.whole(x[:, :16]).mean(-1, keepdim=True)
        return found


BUILT = {
    "ao8": torchao("AdamW8bit", bf16_stochastic_round=True),
    "ao4": torchao("AdamW4bit", bf16_stochastic_round=True),
    "aofp8": torchao("AdamWFp8", bf16_stochastic_round=True),
    "adam8": torchao("Adam8bit", weight_decay=0.1, bf16_stochastic_round=True),
}
ENCODINGS = ("ao8", "ao4", "aofp8")
"""One optimizer for each encoding of moments: `adam8` has that of `ao8`, and another weight decay."""
IN_PARTS = {f"{block}.down.weight" for block in ("even", "odd", "narrow")}
"""Weights of which each rank has a part of nearly every block."""


def made(setup: str, name: str, seed: int = 0) -> tuple[Net, Any]:
    torch.manual_seed(seed)
    model = Net().to(torch.bfloat16)
    model.odd.up.float()  # weights that are not rounded
    world = 1 if setup == "alone" else dist.get_world_size()
    if setup == "fsdp-columns":  # of the last dim
        fully_shard(model, shard_placement_fn=lambda param: Shard(param.dim() - 1))
    elif setup != "alone":
        sizes, names = ((world,), ("tp",)) if setup == "tp" else ((2, world // 2), ("dp", "tp"))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for block in (model.even, model.odd, model.whole, model.narrow):
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        if setup == "fsdp-tp":
            fully_shard(model, mesh=mesh["dp"])
    optimizer = BUILT[name](model.parameters())
    installed = install(optimizer, seed=SEED, model=model, same_gradients=True)
    assert installed.blocks_of_shards() == ()
    block = optimizer.block_size
    cut = {name for name, param in model.named_parameters() if grid_of(param, block) == CUT}
    assert cut >= (set() if setup == "alone" else IN_PARTS), (setup, cut)
    return model, optimizer


def train(model: Net, optimizer: Any, first: int, last: int) -> None:
    """Steps first..last-1; the random generators of ranks are never alike."""
    for step in range(first, last):
        torch.manual_seed(step + (1000 * dist.get_rank() if dist.is_initialized() else 77))
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        whole = {name: _whole(param) for name, param in model.named_parameters()}
        with torch.device("meta"):
            plain: Any = Net()
        out = functional_call(plain, whole, batch.float())
        grads = torch.autograd.grad(out.square().sum(), [*whole.values()])
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = _cut_as(param, grad.to(param.dtype))
        optimizer.step()


def _whole(param: torch.Tensor) -> torch.Tensor:
    found = param.full_tensor() if isinstance(param, DTensor) else param
    return found.detach().float().clone().requires_grad_()


def _cut_as(param: Any, whole: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return whole
    if len(param.placements) == 1 or Replicate() in param.placements:
        return distribute_tensor(whole, param.device_mesh, param.placements)
    return _as_weight(param, whole)


def _as_weight(param: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """Cut as FSDP2 cuts what TP has cut, which `distribute_tensor` does not: its boxes are those of the weight."""
    local = torch.empty(param.to_local().shape, dtype=whole.dtype)
    for box, place in boxes_of(param):
        window(local, place).copy_(window(whole, box))
    return like(param, local)


def steps_of(name: str) -> tuple[int, int]:
    """Steps until the run is stopped, and of the whole run: ten of one optimizer, five of the others. A step reads
    what the one before it has left, so that what is wrong in a step is wrong in the first of them, too."""
    return (4, 10) if name == "ao8" else (2, 5)


def without_stop(folder: Path, name: str) -> None:
    """All steps; the state after some of them is saved on the way."""
    stop, steps = steps_of(name)
    for setup in setups():
        model, optimizer = made(setup, name)
        train(model, optimizer, 0, stop)
        ckptmap.save(folder / f"{name}-{setup}-some", model, optimizer, step=stop).wait()
        train(model, optimizer, stop, steps)
        ckptmap.save(folder / f"{name}-{setup}-all", model, optimizer).wait()


def goes_on(folder: Path, name: str) -> None:
    """The other steps, from what others saved."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    for setup, sources in GOES_ON[world].items():
        for source in sources:
            model, optimizer = made(setup, name, seed=1)
            path = folder / f"{name}-{source}-some"
            report = ckptmap.load(path, model, optimizer, exact=True)
            assert report.inexact == (), report
            train(model, optimizer, *steps_of(name))
            ckptmap.save(folder / f"{path.name}-then-{setup}-of-{world}", model, optimizer).wait()


def setups() -> list[str]:
    return [*SETUPS] if dist.is_initialized() else ["alone"]


SETUPS = ("tp", "fsdp-tp", "fsdp-columns")
GOES_ON: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"alone": ("fsdp-tp", "tp")},
    2: {"tp": ("alone", "fsdp-tp"), "fsdp-columns": ("tp",)},
    3: {"tp": ("fsdp-columns",)},
    4: {"tp": ("tp",), "fsdp-tp": ("alone",)},
}
"""Number of ranks -> setup -> the setups on four ranks, and on one, that it goes on from."""


# ------------------------------------------------------------------------------- odd cases


def given(model: Net, optimizer: Any, steps: int, wrong: float | None = None) -> None:
    """Steps with gradients that depend on step and parameter alone; one element of each of `wrong`."""
    for step in range(steps):
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            grad = torch.randn(param.shape, generator=generator)
            if wrong is not None and step:
                grad.view(-1)[7] = wrong
            param.grad = _cut_as(param, grad.to(param.dtype))
        optimizer.step()


def values_that_are_none(folder: Path, name: str) -> None:
    """NaN and infinity in gradients; and scales that ranks agree on one moment after the other."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    kept, shared_scales.LIMIT = shared_scales.LIMIT, 1
    for number in (float("nan"), float("inf")):
        model, optimizer = made("tp" if world > 1 else "alone", name)
        given(model, optimizer, 3, number)
        ckptmap.save(folder / f"{name}-{number}-of-{world}", model, optimizer).wait()
    shared_scales.LIMIT = kept


def recoded(folder: Path, name: str) -> None:
    """Moments of torch's AdamW, quantized; and those of this optimizer, decoded by torch's."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    model, optimizer = made("tp" if world > 1 else "alone", name)
    report = ckptmap.load(folder / "torch", model, optimizer)
    assert report.state and len(report.state.recoded) > 8, report
    target = folder / f"{name}-recoded-of-{world}"
    ckptmap.save(target, model, optimizer).wait()
    plain = torch.optim.AdamW(model.parameters())
    ckptmap.load(target, model, plain)
    ckptmap.save(folder / f"{name}-decoded-of-{world}", model, plain).wait()


def some_gradients(folder: Path, name: str) -> None:
    """One rank has no gradient: said before anything is stepped. A parameter without any is left as it is."""
    model, optimizer = made("tp", name)
    given(model, optimizer, 1)
    weight, other = model.odd.down.weight, model.even.down.weight
    before = weight.to_local().clone(), other.to_local().clone()
    grad, weight.grad = weight.grad, None
    other.grad = other.grad if dist.get_rank() else None
    try:
        optimizer.step()
    except LoadError as error:
        assert error.code == "CKM520" and "even.down.weight has a gradient on 3 of 4 ranks" in str(
            error
        ), error
    else:
        raise AssertionError("stepped")
    assert torch.equal(other.to_local(), before[1])
    other.grad = None
    optimizer.step()
    assert torch.equal(weight.to_local(), before[0]) and optimizer.state[weight]["step"] == 1
    weight.grad = grad
    optimizer.step()
    assert not torch.equal(weight.to_local(), before[0])


def as_tensors(folder: Path, name: str) -> None:
    """torch's own ways to save say what is to be done; torchao's own step goes on with decoded moments."""
    torchao_lowbit_fix.apply()  # torchao's own step needs it, with weights of bfloat16
    model, _ = made("tp", name)
    optimizer = BUILT[name](model.parameters())
    installed = install(optimizer, seed=SEED, model=model)
    given(model, optimizer, 1)
    weight = model.odd.down.weight
    moment = optimizer.state[weight]["exp_avg"]
    values = decode(moment).to_local()
    assert values.any() and torch.equal(decode(copy.deepcopy(moment)).to_local(), values)
    for call in (lambda: pickle.dumps(moment), moment.full_tensor, lambda: moment + 1):
        try:
            call()
        except RuntimeError as error:
            assert "ckptmap.save" in str(error), error
        else:
            raise AssertionError("wrong values in silence")
    other = decode(optimizer.state[weight]["exp_avg_sq"]).to_local()
    assert other.min() >= 0
    installed.uninstall()
    assert torch.equal(optimizer.state[weight]["exp_avg"].to_local(), values)
    given(model, optimizer, 1)


def by_planners(folder: Path, name: str) -> None:
    """torch.distributed.checkpoint with the planners of ckptmap writes and reads them, in place."""
    path = folder / f"{name}-dcp"
    model, optimizer = made("tp", name)
    given(model, optimizer, 2)
    dcp.save(moments_of(model, optimizer), checkpoint_id=path, planner=save_planner())
    other, theirs = made("tp", name, seed=1)
    given(other, theirs, 1)
    state = moments_of(other, theirs)
    dcp.load(state, checkpoint_id=path, planner=load_planner())
    for key, moment in moments_of(model, optimizer).items():
        if is_around(moment.to_local()):
            found = decode(state[key]).to_local()
            assert found.any() and torch.equal(found, decode(moment).to_local()), key


def moments_of(model: Net, optimizer: Any) -> dict[str, Any]:
    return {
        f"{fqn}.{entry}": optimizer.state[param][entry]
        for fqn, param in model.named_parameters()
        for entry in ("exp_avg", "exp_avg_sq")
        if fqn.endswith("weight") and isinstance(param, DTensor)
    }


def without_rounding(folder: Path, name: str) -> None:
    """Moments of torchao's own step, in blocks of each rank's shard: those of `whole.down` are the whole tensor's, too."""
    torchao_lowbit_fix.apply()
    model, _ = made("tp", name)
    optimizer = BUILT[name](model.parameters())
    given(model, optimizer, 1)
    ckptmap.save(folder / f"{name}-own-step", model, optimizer).wait()


def replicas(folder: Path, name: str) -> None:
    """Two replicas of two ranks that cut columns; the digests of replicas are compared."""
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16)
    for block in (model.even, model.odd, model.whole, model.narrow):
        columns = [Replicate(), Shard(1)]
        block.down.weight = nn.Parameter(
            distribute_tensor(block.down.weight.detach(), mesh, columns)
        )
    optimizer = BUILT[name](model.parameters())
    install(optimizer, seed=SEED, model=model, same_gradients=True)
    given(model, optimizer, 3)
    ckptmap.save(folder / f"{name}-replicas", model, optimizer).wait()


PARTS = {
    one.__name__: one
    for one in (
        without_stop, goes_on, values_that_are_none, recoded, some_gradients, as_tensors, by_planners,
        without_rounding,
        replicas,
    )
}  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo")
    for part in sys.argv[2].split(","):
        for optimizer_name in sys.argv[3].split(","):
            PARTS[part](Path(sys.argv[1]), optimizer_name)
    dist.barrier()
    dist.destroy_process_group()
