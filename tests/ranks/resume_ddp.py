"""NF4 under DDP on two ranks: left alone by DDP, equal on both, and loaded bit for bit; and under
FSDP2 on three, which most shapes do not allow.

python -m tests.ranks.resume_ddp FOLDER      the checkpoints of tests.support.live_model.write
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.live.quantized.ddp_replicas import compare_nf4, prepare_ddp
from tests.support.cpu_sharding import fully_shard
from tests.support.live_model import QUANTIZED, inner, net, quantize, same, tokens


def quantized(seed: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = net(seed, dtype)
    quantize(model)
    return model


def parts(model: Any) -> dict[str, Tensor]:
    return {
        f"{name}.{part}": values.clone()
        for name in QUANTIZED
        for part, values in inner(model.get_parameter(name).detach()).items()
    }


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)


def without() -> None:
    """The control: DDP alone changes the scales that it was to broadcast, or refuses. In float32,
    where quantizing what was decoded has no fixed point."""
    model = quantized(0, torch.float32)
    before = parts(model)
    try:
        DistributedDataParallel(model)
    except NotImplementedError as error:
        assert "broadcast_" in str(error)
    else:
        assert not equal(parts(model), before), "DDP does not quantize again: drop the hook"


def prepared(folder: Path) -> None:
    model = quantized(dist.get_rank())  # other values on each rank
    mine = parts(model)
    try:
        compare_nf4(model)
    except LoadError as error:
        assert "differ from other ranks'" in str(error)
    else:
        raise AssertionError("differing replicas were not noticed")
    names = prepare_ddp(model)
    assert set(names) == set(QUANTIZED)
    truth = parts(quantized(0))
    assert equal(parts(model), truth)
    assert equal(mine, truth) == (dist.get_rank() == 0)
    wrapped = DistributedDataParallel(model)
    assert equal(parts(model), truth), "DDP touched them"
    wrapped(tokens()).float().sum().backward()
    grad = model.norm.weight.grad
    assert grad is not None
    gathered = [torch.empty_like(grad) for _ in range(2)]
    dist.all_gather(gathered, grad)
    assert torch.equal(*gathered)
    assert compare_nf4(model)
    report = ckptmap.load(folder / "nf4.pt", wrapped)
    assert {entry.fqn for entry in report.encoded} == set(QUANTIZED)
    assert equal(parts(model), truth) and compare_nf4(model)


def loaded_before(folder: Path) -> None:
    """QLoRA: the base loaded, then wrapped; and saved once for both replicas."""
    model = net()
    model.requires_grad_(False)
    model.norm.requires_grad_(True)
    ckptmap.load(folder / "nf4.pt", model)
    truth = parts(model)
    prepare_ddp(model)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([model.norm.weight], lr=1e-2)
    wrapped(tokens()).float().sum().backward()
    optimizer.step()
    ckptmap.save(folder / "ddp-nf4", wrapped, optimizer).wait()
    again = net(7)
    again.requires_grad_(False)
    again.norm.requires_grad_(True)
    ckptmap.load(folder / "ddp-nf4", again, torch.optim.AdamW([again.norm.weight]))
    assert equal(parts(again), truth)
    assert torch.equal(again.norm.weight, model.norm.weight)


def three_ranks(folder: Path) -> None:
    """66 rows are cut by three, the others are not: those are decoded into their dense shards, said
    and counted, and every rank's values are torchao's."""
    model: Any = net()
    for name in QUANTIZED:
        fully_shard(model.get_submodule(name.removesuffix(".weight")))
    fully_shard(model)
    report = ckptmap.load(folder / "nf4.pt", model)
    assert {entry.fqn for entry in report.encoded} == {"odd.weight"}
    assert {entry.fqn for entry in report.decoded} == QUANTIZED.keys() - {"odd.weight"}
    assert all("3 ranks" in entry.reason for entry in report.decoded)
    truth = quantized(0)
    rank = dist.get_rank()
    for name in QUANTIZED:
        want = truth.get_parameter(name).get_original_weight()
        local = model.get_parameter(name).to_local()
        step = -(-want.shape[0] // 3)
        found = local.get_original_weight() if name == "odd.weight" else local
        assert same(found.detach(), want[rank * step : (rank + 1) * step].detach()), name
    model(tokens()).float().sum().backward()


def no_nf4() -> None:
    model = nn.Linear(2, 2)
    assert prepare_ddp(model) == () and compare_nf4(model) == ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = Path(sys.argv[1])
    if dist.get_world_size() == 3:
        three_ranks(place)
    else:
        without()
        dist.barrier()
        for scenario in (prepared, loaded_before):
            scenario(place)
            dist.barrier()
        no_nf4()
    dist.barrier()
    dist.destroy_process_group()
