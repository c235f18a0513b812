"""Rounding by position on several ranks: runs that are cut in time and over ranks give the same bits.

python -m tests.ranks.rounding FOLDER PARTS OPTIMIZERS

Every rank sees the same batch, and sums of gradients are taken in float32: four equal gradients of
bfloat16 add up exactly, in any order.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptmap
from ckptmap.errors import LoadError, RunError
from ckptmap.live.quantized import torchao_lowbit_fix
from ckptmap.live.rounding import install, moments
from ckptmap.live.rounding.blocks_around import is_around
from tests.support.cpu_sharding import fully_shard
from tests.support.resume_model import Layer
from tests.support.resume_optimizers import ROUNDING, torchao

WORDS = 72
SEED = 11


class Model(nn.Module):
    """Words [B, S] -> logits [B, S, WORDS]. One weight is tied, one has 79 rows, which ranks cut unevenly, and
    of one with two rows some ranks hold nothing.
    All shards of quantized moments are whole blocks on 1, 2 and 4 ranks, some of fewer than 4096 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 128)
        self.layers = nn.ModuleList([Layer(128), Layer(72)])
        self.uneven = nn.Linear(128, 79)
        self.tiny = nn.Linear(128, 2)
        self.head = nn.Linear(128, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        for some in (self.uneven, self.tiny):
            x = x + torch.tanh(some(x)).mean(-1, keepdim=True)
        logits: torch.Tensor = self.head(x)
        return logits


def built(seed: int, mesh: Any = None, wrapped: bool = True) -> Model:
    torch.manual_seed(seed)
    model = Model().to(torch.bfloat16)
    if dist.is_initialized() and wrapped:
        options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32), "mesh": mesh}
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    return model


def run(name: str, seed: int = 0, mesh: Any = None, rounding_seed: int = SEED) -> tuple[Any, Any]:
    return with_rounding(name, built(seed, mesh), rounding_seed)


def with_rounding(name: str, model: Any, seed: int = SEED) -> tuple[Any, Any]:
    optimizer = ROUNDING[name](model.parameters())
    install(optimizer, seed=seed, model=model, same_gradients=True)
    return model, optimizer


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    """Steps first..last-1; the random generators of ranks are never alike."""
    for step in range(first, last):
        torch.manual_seed(100 * step + (dist.get_rank() if dist.is_initialized() else 77))
        words = torch.arange(24).view(4, 6).mul(step + 3).remainder(WORDS)
        loss: Any = nn.functional.cross_entropy(
            model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def without_stop(folder: Path, name: str) -> None:
    """Ten steps; the state after four of them is saved on the way."""
    model, optimizer = run(name)
    train(model, optimizer, 0, 4)
    ckptmap.save(folder / f"{name}-four", model, optimizer, step=4).wait()
    train(model, optimizer, 4, 10)
    ckptmap.save(folder / f"{name}-ten", model, optimizer).wait()


def goes_on(folder: Path, name: str) -> None:
    """Six steps more, from what other ranks saved; the seed is that of the checkpoint."""
    model, optimizer = run(name, seed=1, rounding_seed=5)
    report = ckptmap.load(folder / f"{name}-four", model, optimizer, exact=True)
    assert report.inexact == () and report.streams == "left as they are", report
    assert report.rounding == f"by position, seed {SEED}, was 5" and report.rounding in str(report)
    assert report.notes == ()  # four ranks saved it, two go on
    train(model, optimizer, 4, 10)
    ckptmap.save(folder / f"{name}-continued", model, optimizer).wait()


class Odd(nn.Module):
    """On 2, 3 or 4 ranks, shards end inside blocks: after an odd number of elements, in weights of bfloat16 and of
    float32, and where the last of three ranks holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(9, 512, bias=False)
        self.few = nn.Linear(1088, 4)
        self.pair = nn.Linear(2112, 2)
        self.wide = nn.Linear(72, 128)


def odd_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Odd().to(torch.bfloat16)
    model.wide.float()
    return model


def odd(name: str, seed: int = 0, mesh: Any = None) -> tuple[Any, Any]:
    model = odd_model(seed)
    if dist.is_initialized():
        model.wide = fully_shard(model.wide, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    optimizer = ODD[name](model.parameters())
    installed = install(optimizer, seed=SEED, model=model, same_gradients=True)
    assert installed.blocks_of_shards() == ()
    return model, optimizer


ODD = {
    **{name: build for name, build in ROUNDING.items() if name != "ao"},
    "adam8": torchao("Adam8bit", weight_decay=0.1, bf16_stochastic_round=True),
}
"""Adam's moments depend on the weights, too, by their decay."""


def odd_whole(folder: Path, name: str) -> None:
    """Five steps; the state after two of them is saved on the way."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    model, optimizer = odd(name)
    given_gradients(model, optimizer, 2)
    ckptmap.save(folder / f"{name}-two-of-{world}", model, optimizer).wait()
    given_gradients(model, optimizer, 3, first=2)
    ckptmap.save(folder / f"{name}-five-of-{world}", model, optimizer).wait()


def odd_rest(folder: Path, name: str) -> None:
    """Three steps more, from what four ranks saved; and moments that were plain, quantized."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    model, optimizer = odd(name, seed=1)
    report = ckptmap.load(folder / f"{name}-two-of-4", model, optimizer, exact=True)
    assert report.inexact == (), report
    assert ("saved by 4 ranks, 3 now" in " ".join(report.notes)) == (world == 3), report.notes
    given_gradients(model, optimizer, 3, first=2)
    ckptmap.save(folder / f"{name}-rest-of-{world}", model, optimizer).wait()
    ckptmap.load(folder / "plain", model, optimizer)
    ckptmap.save(folder / f"{name}-quantized-of-{world}", model, optimizer).wait()


def odd_replicas(folder: Path, name: str) -> None:
    """Two replicas of two ranks; torch's own ways to save say what is to be done."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = odd(name, mesh=mesh)
    given_gradients(model, optimizer, 5)
    ckptmap.save(folder / f"{name}-replicas", model, optimizer).wait()
    moment = next(
        state["exp_avg"]
        for state in optimizer.state.values()
        if is_around(state["exp_avg"].to_local())
    )
    values = moment.to_local().blocks.dequantize()
    assert values.numel() % optimizer.block_size == 0 and torch.equal(
        copy.deepcopy(moment).to_local().blocks.dequantize(), values
    )
    for call in (lambda: pickle.dumps(moment), moment.full_tensor, lambda: moment + 1):
        try:
            call()
        except RuntimeError as error:
            assert "ckptmap.save" in str(error), error
        else:
            raise AssertionError("wrong values in silence")


def odd_gradients(folder: Path, name: str) -> None:
    """One rank has no gradient: said before anything is stepped."""
    model, optimizer = odd(name)
    given_gradients(model, optimizer, 1)
    if dist.get_rank() == 0:
        model.few.weight.grad = None
    before = model.wide.weight.to_local().clone()
    try:
        optimizer.step()
    except LoadError as error:
        assert error.code == "CKM520" and "few.weight has a gradient on 3 of 4 ranks" in str(
            error
        ), error
    else:
        raise AssertionError("stepped")
    assert torch.equal(model.wide.weight.to_local(), before)


def odd_uninstalled(folder: Path, name: str) -> None:
    """torchao's own step goes on with what shared blocks held, decoded."""
    model, _ = odd(name)
    optimizer = ODD[name](model.parameters())
    installed = install(optimizer, seed=SEED, model=model)
    given_gradients(model, optimizer, 1)
    weight = model.few.weight
    held = optimizer.state[weight]["exp_avg"].to_local()
    assert is_around(held) and held.lead == {0: 0, 1: 64, 2: 128, 3: 192}[dist.get_rank()] % (
        optimizer.block_size
    )
    values = held.blocks.dequantize()[held.lead :][: held.numel()].view(held.shape)
    installed.uninstall()
    assert torch.equal(optimizer.state[weight]["exp_avg"].to_local(), values)
    torchao_lowbit_fix.apply()  # torchao's own step needs it, with weights of bfloat16
    given_gradients(model, optimizer, 1, first=1)


def given_gradients(model: Any, optimizer: Any, steps: int = 3, first: int = 0) -> None:
    """Steps with gradients that depend on step and parameter alone."""
    for step in range(first, first + steps):
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = _cut_as(param, grad)
        optimizer.step()


def _cut_as(param: Any, whole: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return whole
    return distribute_tensor(whole, param.device_mesh, param.placements)


def in_other_meshes(folder: Path, name: str) -> None:
    """Three ranks, which cut all weights unevenly; two replicas of two; rows and columns of two."""
    if dist.get_world_size() == 3:
        _keep(folder / f"{name}-3", *run(name))
        return
    for names in (("replicate", "shard"), ("rows", "columns")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        if names[0] == "replicate":
            _keep(folder / f"{name}-{names[0]}", *run(name, mesh=mesh))
            continue
        _keep(folder / f"{name}-{names[0]}", *with_rounding(name, in_rows_and_columns(mesh)))


def in_rows_and_columns(mesh: Any) -> Any:
    model = built(0, wrapped=False)
    for module in model.modules():
        for key, param in module.named_parameters(recurse=False):
            placements = [Shard(0), Shard(1) if param.dim() > 1 else Replicate()]
            cut = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
            setattr(module, key, model.embed.weight if module is model.head else cut)
    return model


def in_blocks_of_shards(folder: Path, name: str) -> None:
    """As releases before this one quantized moments of weights that are cut by columns; on the same mesh, too, no run goes
    on from it bit for bit."""
    shared = moments.cut_blocks
    moments.cut_blocks = lambda *_: None
    in_other_meshes(folder, name)
    moments.cut_blocks = shared
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    model, optimizer = with_rounding(name, in_rows_and_columns(mesh))
    source = folder / f"{name}-rows"
    try:
        ckptmap.load(source, model, optimizer, exact=True)
    except LoadError as error:
        assert error.code == "CKM507" and "in blocks of each rank's shard" in str(error), error
    else:
        raise AssertionError("goes on")
    ckptmap.load(source, model, optimizer)
    moments_now = [state["exp_avg"].to_local() for state in optimizer.state.values()]
    assert any(one.dtype == torch.float32 and one.any() for one in moments_now)
    assert not any(map(is_around, moments_now))
    given_gradients(model, optimizer, 1)


def other_seeds(folder: Path, name: str) -> None:
    """A save where each rank has another seed, of a model whose ranks hold nothing in common."""
    model, optimizer = run(name, rounding_seed=dist.get_rank())
    try:
        ckptmap.save(folder / "refused", model, optimizer)
    except RunError as error:
        assert error.code == "CKM509" and "rank 1 has seed 1, rank 0 0" in str(error), error
    else:
        raise AssertionError("saved")


def one_weight(folder: Path, name: str) -> None:
    """Of one weight: a compiled optimizer step has one shape to compile."""
    torch.manual_seed(0)
    model: Any = nn.Linear(128, 64, bias=False).to(torch.bfloat16)
    if dist.is_initialized():
        model = fully_shard(model)
    path = folder / f"{name}-of-{dist.get_world_size() if dist.is_initialized() else 1}"
    _keep(path, *with_rounding(name, model))


def dropping(name: str, rate: float) -> tuple[Any, Any]:
    """A model that drops values at this rate, whose gradients are said to be the same on all ranks."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(128, 64), nn.Dropout(rate), nn.Linear(64, 2))
    model = model.to(torch.bfloat16)
    if dist.is_initialized():
        model = fully_shard(model)
    return with_rounding(name, model)


def with_dropout(folder: Path, name: str) -> None:
    for rate in (0.0, 0.1):
        _keep(folder / f"{name}-{rate}", *dropping(name, rate))


def _keep(path: Path, model: Any, optimizer: Any) -> None:
    given_gradients(model, optimizer)
    ckptmap.save(path, model, optimizer).wait()


PARTS = {
    "without_stop": without_stop,
    "goes_on": goes_on,
    "in_other_meshes": in_other_meshes,
    "in_blocks_of_shards": in_blocks_of_shards,
    "one_weight": one_weight,
    "other_seeds": other_seeds,
    "with_dropout": with_dropout,
    "odd_whole": odd_whole,
    "odd_rest": odd_rest,
    "odd_replicas": odd_replicas,
    "odd_gradients": odd_gradients,
    "odd_uninstalled": odd_uninstalled,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "CKPTMAP_TEST_BACKEND" in os.environ:  # torchao's step says none
        backend = os.environ["CKPTMAP_TEST_BACKEND"]
        torch.compile = functools.partial(torch.compile, backend=backend)
    else:
        torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo")
    for part in sys.argv[2].split(","):
        for optimizer_name in sys.argv[3].split(","):
            PARTS[part](Path(sys.argv[1]), optimizer_name)
    dist.barrier()
    dist.destroy_process_group()
