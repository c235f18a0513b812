"""Live DTensors onto other meshes and placements, on the ranks that hold them.

python -m tests.ranks.translate_mesh layouts|names|rank0|nf4|errors
python -m tests.ranks.translate_mesh int8 FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ckptmap
from tests.support.cpu_sharding import fully_shard
from tests.support.resume_model import compiled_layers, fsdp2, net, plain

SMALL, LARGER = 6_000, 20_000
"""Bytes of messages: less than a rank's part of most matrices here, and less than any matrix."""


def world() -> int:
    return dist.get_world_size()


def hsdp(model: Any) -> Any:
    sizes = (2, world() // 2) if world() % 2 == 0 else (world(), 1)
    return fsdp2(model, init_device_mesh("cpu", sizes, mesh_dim_names=("r", "s")))


def tp(model: Any, mesh: Any = None) -> Any:
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("tp",)) if mesh is None else mesh
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tp_fsdp(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp(model, mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def placed(*placements: Any) -> Callable[[Any], Any]:
    """Every parameter on one mesh; a dim that it does not have is dim 0."""

    def wrap(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (world(),))
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                fitting = [
                    Shard(min(p.dim, param.dim() - 1)) if p.is_shard() else p for p in placements
                ]
                module.register_parameter(
                    name, nn.Parameter(distribute_tensor(param.data, mesh, fitting))
                )
        return model

    return wrap


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "plain": plain,
    "fsdp": fsdp2,
    "hsdp": hsdp,
    "tp": tp,
    "columns": placed(Shard(1)),
    "replicated": placed(Replicate()),
}


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layouts() -> None:
    """Every layout into every other, bit for bit, in messages that are smaller than a tensor; each layout
    is once the source, and once the target, of messages that are smaller than a rank's part. On two ranks, whose
    shards are cut as those of four are, these and each layout into itself.

    Each rank compares its own part with that of a model which torch has cut in the same way."""
    truth = net(0).state_dict()
    known = LAYOUTS | ({"tp+fsdp": tp_fsdp} if world() == 4 else {})
    sources = {name: wrap(net(0)).state_dict() for name, wrap in known.items()}
    for number, (kind, wrap) in enumerate(known.items()):
        model = wrap(net(1))
        before = {name: local(value).clone() for name, value in model.state_dict().items()}
        for other, state in enumerate(sources.values()):
            is_next = other == (number + 1) % len(known)
            if world() == 2 and not (is_next or other == number):
                continue
            size = SMALL if is_next else LARGER
            made = ckptmap.translate(state, like=model, max_memory=size)
            for name, live in model.state_dict().items():
                assert torch.equal(local(made[name]), local(sources[kind][name])), (kind, name)
                assert torch.equal(local(live), before[name]), "the model was changed"
                if isinstance(live, DTensor):
                    assert made[name].placements == live.placements
                    assert made[name].device_mesh == live.device_mesh
        model.load_state_dict(made)
        for name, live in model.state_dict().items():
            assert torch.equal(whole(live), truth[name]), (kind, name)


def names() -> None:
    """Other wrapper segments on both sides, another dtype here."""
    source = compiled_layers(net(0), fsdp2).state_dict()
    assert any("_orig_mod" in name for name in source)
    model = hsdp(net(1, torch.bfloat16))
    made = ckptmap.translate(source, like=model)
    truth = net(0).state_dict()
    assert list(made.report.cast) if made.report is not None else False
    for name, live in model.state_dict().items():
        assert torch.equal(whole(made[name]), truth[name].to(live.dtype)), name


def rank0() -> None:
    """Only one rank has the state dict; nobody else gets more than its shards."""
    truth = net(0).state_dict()
    model = fsdp2(net(1))
    made = ckptmap.translate(truth if dist.get_rank() == world() - 1 else {}, like=model)
    for name in truth:
        assert torch.equal(whole(made[name]), truth[name]), name


# ------------------------------------------------------------------------------- quantized


class Base(nn.Module):
    """A frozen NF4 base of 16 factors a weight, and a trainable rest."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.fc = nn.Linear(256, 512, bias=False)
        self.out = nn.Linear(512, 128, bias=False)
        self.norm = nn.LayerNorm(512)


def quantized(seed: int, linear: Callable[[Any], Any]) -> Any:
    model = Base(seed)
    for module in (model.fc, model.out):
        weight: Any = module.weight
        module.weight = nn.Parameter(linear(weight.detach()), requires_grad=False)
    return model


def parts(tensor: Any) -> dict[str, Any]:
    """Decoded values, and codes where this rank's are whole rows."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return {
        name: getattr(local, name) for name in ("quantized_data", "qdata") if hasattr(local, name)
    }


def nf4() -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    reference = quantized(0, to_nf4)
    truth = {name: value for name, value in reference.state_dict().items()}
    values = {
        name: value.get_original_weight() if hasattr(value, "quantized_data") else value
        for name, value in truth.items()
    }
    codes = {n: v.quantized_data for n, v in truth.items() if hasattr(v, "quantized_data")}
    fits = world() in (2, 4)
    source = fully_shard(quantized(0, to_nf4)) if fits else reference
    # quantized onto another mesh: the codes move as they are
    for wrap in (lambda m: m, *((_hsdp_all,) if fits else ())):
        model = wrap(quantized(1, to_nf4))
        made = ckptmap.translate(source.state_dict(), like=model, max_memory=LARGER)
        assert not made.report.quantized and not made.report.decoded, made.report
        for name, code in codes.items():
            rows = made[name]
            rank, n = (0, 1)
            if isinstance(rows, DTensor):
                coordinate = rows.device_mesh.get_coordinate()
                rank, n = coordinate[-1], rows.device_mesh.size(rows.device_mesh.ndim - 1)
            each = code.numel() // n
            assert torch.equal(parts(rows)["quantized_data"], code[rank * each : (rank + 1) * each])
        model.load_state_dict(made)
    # decoded into dense shards, of 3 ranks too
    dense = Base(1)
    fully_shard(dense)
    made = ckptmap.translate(source.state_dict(), like=dense, max_memory=LARGER)
    assert len(made.report.decoded) == 2
    for name, value in values.items():
        assert torch.equal(whole(made[name]), value), name
    # decoded without a model, each rank its own shards
    made = ckptmap.translate(source.state_dict(), encoding="dense")
    for name, value in values.items():
        assert torch.equal(whole(made[name]), value), name
    # and quantized here, from dense shards, as the whole tensor would be
    if fits:
        sharded = fully_shard(Base(0))
        model = _hsdp_all(quantized(1, to_nf4))
        made = ckptmap.translate(sharded.state_dict(), like=model, max_memory=LARGER)
        assert len(made.report.quantized) == 2
        for name, code in codes.items():
            mine = parts(made[name])["quantized_data"]
            at = made[name].device_mesh.get_coordinate()[-1] * mine.numel()
            assert torch.equal(mine, code[at : at + mine.numel()]), name


def _hsdp_all(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (world() // 2, 2), mesh_dim_names=("r", "s"))
    return fully_shard(model, mesh=mesh)


def int8(folder: str) -> None:
    """int8 rows of one mesh onto another, and decoded into dense shards of columns."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    reference: Any = frozen(0)
    quantize_(reference, Int8WeightOnlyConfig())
    file = Path(folder) / f"int8-{world()}.pt"
    if dist.get_rank() == 0:
        torch.save(reference.state_dict(), file)
    dist.barrier()
    source = fully_shard(frozen(1))
    report = ckptmap.load(file, source)
    assert len(report.encoded) == 2, report
    model = _hsdp_all(frozen(2))
    ckptmap.load(file, model)
    for local in (model.fc.weight.to_local(), model.out.weight.to_local()):
        local.qdata.zero_()
    made = ckptmap.translate(source.state_dict(), like=model, max_memory=LARGER)
    assert not made.report.decoded and len(made.report.encoded) == 2, made.report
    for name in ("fc.weight", "out.weight"):
        found: Any = made[name]
        rank, n = found.device_mesh.get_coordinate()[-1], found.device_mesh.size(1)
        want = getattr(reference, name.split(".")[0]).weight
        each = want.shape[0] // n
        assert torch.equal(found.to_local().qdata, want.qdata[rank * each : (rank + 1) * each])
        assert torch.equal(found.to_local().scale, want.scale[rank * each : (rank + 1) * each])
    dense = placed(Shard(1))(Base(3))
    made = ckptmap.translate(source.state_dict(), like=dense, max_memory=LARGER)
    for name in ("fc.weight", "out.weight"):
        want = getattr(reference, name.split(".")[0]).weight
        assert torch.equal(whole(made[name]), want.dequantize()), name


def frozen(seed: int) -> Any:
    model = Base(seed)
    for module in (model.fc, model.out):
        module.weight.requires_grad_(False)
    return model


def errors() -> None:
    """Told on every rank, before anything moves."""
    model = fsdp2(net(1))
    state = dict(net(0).state_dict())
    if dist.get_rank() == 0:
        state["layers.0.up.weight"] = torch.zeros(3, 3)
    try:
        ckptmap.translate(state, like=model)
    except ckptmap.CkptmapError as error:
        assert error.code == "CKM510", error
    else:
        raise AssertionError("ranks that hold different tensors were not noticed")
    try:
        ckptmap.translate({"embed.weight": net(0).embed.weight}, like=model)
    except ckptmap.CkptmapError as error:
        assert error.code == "CKM501", error
    else:
        raise AssertionError("missing names were not noticed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    actions = {"layouts": layouts, "names": names, "rank0": rank0, "nf4": nf4, "errors": errors}
    for chosen in sys.argv[1].split(","):
        actions[chosen]() if chosen in actions else int8(sys.argv[2])
    dist.barrier()
    dist.destroy_process_group()
