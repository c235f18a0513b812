"""FSDP2 models of N ranks, loaded by ckptmap and compared with one process that holds everything.

python -m tests.ranks.fsdp2 FOLDER      the checkpoints of tests.support.live_model.write
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate

from ckptmap.errors import LoadError
from ckptmap.live.load.load import load
from ckptmap.live.model.load_report import LoadReport
from tests.support.cpu_sharding import fully_shard
from tests.support.live_model import (
    QUANTIZED,
    meta_net,
    net,
    quantize,
    quantized,
    same,
    tokens,
)

UNITS = ("up", "down", "odd", "narrow", "back")


def shard(model: Any, **options: Any) -> Any:
    for name in UNITS:
        fully_shard(model.get_submodule(name), **options)
    fully_shard(model, **options)
    return model


def scaler_blocks(world: int) -> dict[str, tuple[int, int]]:
    """Of the weights that `world` ranks can hold quantized: stored and live."""
    expected = {
        "up.weight": {1: 256, 2: 128, 4: 64},
        "down.weight": {1: 256, 2: 128, 4: 64},
        "odd.weight": {1: 2, 2: 1},
        "narrow.weight": {1: 4, 2: 2, 4: 1},
        "back.weight": {1: 128, 2: 64, 4: 32},
    }
    return {name: (by[1], by[world]) for name, by in expected.items() if world in by}


# ------------------------------------------------------------------------------- comparing


def check_values(model: Any, truth: Any) -> None:
    """Every tensor of the sharded model, gathered, has the bits of the truth's."""
    wanted = truth.state_dict()
    for name, tensor in model.state_dict().items():
        want = wanted[name]
        if name in QUANTIZED and hasattr(want, "get_original_weight"):
            want = want.get_original_weight()
        assert same(whole(tensor).detach(), want.detach()), name


def whole(tensor: Any) -> Any:
    """Gathered, and decoded before it is: `full_tensor` of NF4 is three asynchronous collectives,
    and torch 2.13 with torchao 0.18 crashes in them under gloo, without ckptmap too."""
    if not isinstance(tensor, DTensor):
        return tensor.get_original_weight() if hasattr(tensor, "nf4") else tensor
    local: Any = tensor.to_local()
    if hasattr(local, "nf4"):
        mesh, placements = tensor.device_mesh, tensor.placements
        tensor = DTensor.from_local(local.get_original_weight(), mesh, placements)
    return tensor.full_tensor()


def check_logits(model: Any, truth: Any) -> None:
    want = truth(tokens())
    for _ in range(2):  # the second forward reuses what the first allocated
        assert same(model(tokens()), want)


def check_nf4(model: Any, report: LoadReport, world: int) -> None:
    expected = scaler_blocks(world)
    assert {e.fqn: (e.stored, e.live) for e in report.encoded} == expected
    assert {d.fqn for d in report.decoded} == QUANTIZED.keys() - expected.keys()
    for d in report.decoded:
        assert "66, 64" in d.reason and d.dense_nbytes > d.encoded_nbytes > 0
    for name in expected:
        local = model.get_parameter(name).to_local()
        assert type(local).__name__ == "NF4Tensor", name
        assert local.n_blocks == local.numel() * world // 64


def nf4_truth(world: int | None = None) -> Any:
    """Of torchao's making; what this world cannot cut is dense, with torchao's own values."""
    truth: Any = net(0)
    quantize(truth)
    for name in QUANTIZED.keys() - scaler_blocks(world or dist.get_world_size()).keys():
        module = truth.get_submodule(name.removesuffix(".weight"))
        module.weight = nn.Parameter(module.weight.get_original_weight(), requires_grad=False)
    return truth


# ------------------------------------------------------------------------------- scenarios


def wrapped_on_meta() -> Any:
    return shard(meta_net())


def wrapped_dense() -> Any:
    return shard(net())


def after_a_step() -> Any:
    model = wrapped_dense()
    model(tokens()).sum().backward()
    return model


def after_a_forward() -> Any:
    """One unit, the root, which keeps its whole parameters after a forward."""
    model: Any = fully_shard(net())
    model(tokens())
    assert not isinstance(model.up.weight, DTensor)
    return model


def wrapped_nf4() -> Any:
    """torchao's NF4Tensors, with scaler blocks that this world can cut; what it cannot stays."""
    model = net()
    for name, (_, live) in scaler_blocks(dist.get_world_size()).items():
        module = model.get_submodule(name.removesuffix(".weight"))
        weight: Any = quantized(model.get_parameter(name))
        if weight.scaler_block_size != live:
            from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

            weight = to_nf4(model.get_parameter(name).detach(), 64, live)
        module.weight = nn.Parameter(weight, requires_grad=False)
    return shard(model)


def offloaded() -> Any:
    return shard(meta_net(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def nf4_checkpoint(folder: Path) -> None:
    builders: tuple[Callable[[], Any], ...] = (
        wrapped_on_meta,
        wrapped_dense,
        after_a_step,
        after_a_forward,
        wrapped_nf4,
        offloaded,
    )
    for build in builders:
        model = build()
        report = load(folder / "nf4.pt", model)
        check_nf4(model, report, dist.get_world_size())
        assert not (report.missing or report.unexpected or report.mismatched or report.cast)
        check_values(model, nf4_truth())
        check_logits(model, nf4_truth())
        model(tokens()).sum().backward()
        assert model.get_parameter("norm.weight").grad is not None
        check_values(model, nf4_truth())


def saved_again(folder: Path) -> None:
    """What was loaded can be saved by DCP and read by it into another such model."""
    first, second = wrapped_on_meta(), wrapped_on_meta()
    load(folder / "nf4.pt", first)
    load(folder / "nf4.pt", second)
    target = folder / f"dcp-{dist.get_world_size()}"
    dcp.save(first.state_dict(), checkpoint_id=target)  # type: ignore[attr-defined]
    state = second.state_dict()
    dcp.load(state, checkpoint_id=target)  # type: ignore[attr-defined]
    check_values(second, nf4_truth())
    files = folder / f"ranks-{dist.get_world_size()}"
    files.mkdir(exist_ok=True)
    torch.save(first.state_dict(), files / f"model_rank_{dist.get_rank()}.pt")
    whole = get_model_state_dict(first, options=StateDictOptions(full_state_dict=True))
    arrived(whole)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "gathered.pt")
    dist.barrier()
    for source in (target, files, folder / "gathered.pt"):
        for build in (wrapped_on_meta, wrapped_nf4):
            third = build()
            load(source, third)
            check_values(third, nf4_truth())


def arrived(state: dict[str, Any]) -> None:
    """The parts of a gathered NF4Tensor are AsyncCollectiveTensors that torch 2.13 does not wait
    for: saved at once, the last of them is torn now and then, and a later gather may crash."""
    for tensor in state.values():
        for name in tensor.__tensor_flatten__()[0] if hasattr(tensor, "nf4") else ():
            part = getattr(tensor, name)
            if isinstance(part, AsyncCollectiveTensor):
                part.trigger_wait()


def converted(folder: Path) -> None:
    """What ckptmap itself wrote for two ranks, on this many."""
    model = wrapped_on_meta()
    report = load(folder / "fsdp2-nf4", model, strict_encoding=dist.get_world_size() < 4)
    check_nf4(model, report, dist.get_world_size())
    check_values(model, nf4_truth())
    check_logits(model, nf4_truth())


def dense_checkpoint(folder: Path) -> None:
    for build in (wrapped_on_meta, wrapped_dense, after_a_forward):
        for name, dtype in (("dense.pt", torch.bfloat16), ("fp32.pt", torch.float32)):
            model = build()
            report = load(folder / name, model, max_memory=4096)
            truth = net(0, dtype).to(torch.bfloat16)
            truth.scale = net(0).scale
            assert len(report.cast) == (0 if dtype == torch.bfloat16 else 8), report.cast
            made = largest_local(model) if build is wrapped_on_meta else 0
            assert report.peak_host_nbytes <= 4096 + made
            check_values(model, truth)
            check_logits(model, truth)


def largest_local(model: Any) -> int:
    return max(int(p.to_local().nbytes) for p in model.parameters())


def dense_into_nf4(folder: Path) -> None:
    """Quantized on the way: as torchao does on the whole tensor, each rank keeping its rows."""
    model = wrapped_nf4()
    report = load(folder / "dense.pt", model)
    expected = scaler_blocks(dist.get_world_size())
    assert set(report.quantized) == expected.keys()
    truth = net(0)
    for name in expected:
        module = truth.get_submodule(name.removesuffix(".weight"))
        module.weight = nn.Parameter(quantized(truth.get_parameter(name)), requires_grad=False)
    check_values(model, truth)
    check_logits(model, truth)


def refusals(folder: Path) -> None:
    model = wrapped_dense()
    before = {name: t.to_local().clone() for name, t in model.named_parameters()}
    if dist.get_world_size() == 4:
        expect("CKM504", r"odd.weight.*4 ranks", folder / "nf4.pt", model, strict_encoding=True)
    else:
        assert load(folder / "nf4.pt", wrapped_dense(), strict_encoding=True).decoded == ()
    model.get_parameter("down.weight").requires_grad_(True)
    expect("CKM503", "down.weight", folder / "nf4.pt", model)
    model.get_parameter("down.weight").requires_grad_(False)
    # One rank cannot read: every rank raises, and says which.
    last = dist.get_world_size() - 1
    path = folder / ("none.pt" if dist.get_rank() == last else "nf4.pt")
    expect(
        "CKM101",
        "none.pt" if dist.get_rank() == last else rf"\[rank {last}\].*none.pt",
        path,
        model,
    )
    for name, tensor in model.named_parameters():
        assert same(tensor.to_local(), before[name]), name


def expect(code: str, text: str, path: Path, model: nn.Module, **options: Any) -> None:
    import re

    try:
        load(path, model, **options)
    except (LoadError, ValueError) as error:
        assert getattr(error, "code", None) == code, error
        assert re.search(text, str(error)), error
    else:
        raise AssertionError(f"{code} was not raised")


def flat_parameters(folder: Path) -> None:
    """FSDP1 keeps dense tensors only: what is NF4 in the checkpoint is decoded into them."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for use_orig_params in (True, False):
        inner = net().requires_grad_(False)
        inner.norm.weight.requires_grad_(use_orig_params)  # in one flat parameter with frozen ones
        model = FullyShardedDataParallel(
            inner, use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        before = model(tokens())  # torch keeps what the root gathered for the next forward
        report = load(folder / "nf4.pt", model)
        assert not same(model(tokens()).detach(), before.detach()), "gathered anew"
        assert {d.fqn for d in report.decoded} == QUANTIZED.keys()
        truth: Any = net(0)
        quantize(truth)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            for name, tensor in truth.named_parameters():
                want = tensor.get_original_weight() if name in QUANTIZED else tensor
                assert same(inner.get_parameter(name).detach(), want.detach()), name


def compiled(folder: Path) -> None:
    model: Any = torch.compile(wrapped_dense(), backend="eager")
    load(folder / "nf4.pt", model)
    check_logits(model, nf4_truth())
    plain: Any = torch.compile(net(), backend="eager")
    plain(tokens())
    load(folder / "nf4.pt", plain)
    truth = net(0)
    quantize(truth)
    check_logits(plain, truth)


def replicated(folder: Path) -> None:
    """DDP: `module.` names, NF4 weights put after wrapping, gradients of the rest synchronised."""
    model = nn.parallel.DistributedDataParallel(net())
    report = load(folder / "nf4.pt", model)
    assert len(report.encoded) == len(QUANTIZED)
    for name, tensor in model.module.state_dict().items():
        assert same(tensor, nf4_truth().state_dict()[name]), name
    assert same(model(tokens()), nf4_truth()(tokens()))
    model(tokens() + dist.get_rank()).sum().backward()
    grads = [torch.empty(64, dtype=torch.bfloat16) for _ in range(dist.get_world_size())]
    dist.all_gather(grads, model.module.norm.weight.grad)
    assert all(same(grad, grads[0]) for grad in grads)


def hybrid(folder: Path) -> None:
    """HSDP 2 x 2: cut over 2, replicated over 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(meta_net(), mesh=mesh)
    report = load(folder / "nf4.pt", model)
    check_nf4(model, report, 2)
    check_logits(model, nf4_truth(world=2))
    dense = shard(net(), mesh=mesh)
    load(folder / "dense.pt", dense)
    check_values(dense, net(0))


def tensor_parallel(folder: Path) -> None:
    """FSDP2 over TP: strided shards, each rank its own rows of rows; NF4 is decoded there."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build() -> Any:
        model = net()
        whole = ColwiseParallel(output_layouts=Replicate())
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "narrow": whole}
        parallelize_module(model, mesh["tp"], plan)
        return shard(model, mesh=mesh["dp"])

    dense = build()
    load(folder / "dense.pt", dense)
    check_parts(dense, net(0))
    model = build()
    report = load(folder / "nf4.pt", model)
    assert {d.fqn for d in report.decoded} == {"up.weight", "down.weight", "narrow.weight"}
    assert all("tensor-parallel" in d.reason for d in report.decoded)
    model(tokens())


def check_parts(model: Any, truth: Any) -> None:
    """By distributing the truth alike: gathering strided shards is torch's weak spot."""
    from torch.distributed.tensor import distribute_tensor

    for name, tensor in model.named_parameters():
        whole = truth.get_parameter(name).detach()
        mine: Tensor = tensor.detach().to_local()
        if "_StridedShard" in str(tensor.placements) or "_S(" in str(tensor.placements):
            tp, dp = tensor.device_mesh["tp"], tensor.device_mesh["dp"]
            rows = whole.chunk(tp.size())[tp.get_local_rank()]
            assert same(mine, rows.chunk(dp.size())[dp.get_local_rank()]), name
            continue
        want = distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local()
        assert same(mine, want), name


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    everywhere = (nf4_checkpoint, converted, dense_checkpoint, dense_into_nf4, refusals)
    more = {
        1: (compiled,),
        2: (saved_again, replicated, flat_parameters),
        4: (hybrid, tensor_parallel),
    }
    for scenario in everywhere + more[dist.get_world_size()]:
        begin = time.monotonic()
        scenario(folder)
        print(f"{scenario.__name__} {time.monotonic() - begin:.2f} s", flush=True)
    dist.barrier()
    # gloo's threads outlive the groups that models still refer to, and abort a normal exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
