"""int8 weights loaded into live models of N ranks, compared with one process that holds torchao's.

run_ranks("tests.ranks.int8", WORLD, [FOLDER]): the checkpoints of `write`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import ckptmap
from ckptmap.live.load.load import load
from ckptmap.live.save.save import save
from ckptmap.quantization.torchao.subclass_reader import TRAINED as TRAINED_INT8
from ckptmap.quantization.torchao.subclass_reader import TRAINED_DENSE
from ckptmap.tensors import Box
from tests.ranks.int8_moves import float8_all_gather
from tests.support.cpu_sharding import fully_shard

SOURCES = ("int8", "int8-tensor", "bnb-int8", "ct-int8")


def net(dtype: torch.dtype = torch.bfloat16) -> Any:
    """Two frozen linear layers, a trainable one between them, one of 3 rows."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(32, 64, bias=False), nn.Linear(64, 48), nn.Linear(48, 32, bias=False),
        nn.Linear(32, 3, bias=False),
    ).to(dtype)  # fmt: skip
    for index in (0, 2, 3):
        model[index].weight.requires_grad_(False)
    return model


def batch() -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(5, 32, dtype=torch.bfloat16)


def write(folder: Path) -> None:
    """One dense model in every int8 form."""
    torch.save(net().state_dict(), folder / "dense.pt")
    for suffix in ("int8", "bnb-int8", "ct-int8"):
        ckptmap.convert(folder / "dense.pt", folder / f"{suffix}.pt", to=f"full-{suffix}",
                        encode=("0.weight", "2.weight", "3.weight"))  # fmt: skip
    from torchao.quantization import Int8WeightOnlyConfig, PerTensor, quantize_

    model = net()
    quantize_(model, Int8WeightOnlyConfig(granularity=PerTensor()),
              lambda module, name: name in ("0", "2", "3"))  # fmt: skip
    torch.save(model.state_dict(), folder / "int8-tensor.pt")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    model = net()
    quantize_(model, Int8DynamicActivationInt8WeightConfig(),
              lambda module, name: name in ("0", "2"))  # fmt: skip
    torch.save(model.state_dict(), folder / "dynamic.pt")


def truth(path: Path) -> Any:
    """One process that holds torchao's tensors of these codes and scales."""
    from torchao.quantization import Int8Tensor

    model = net()
    with ckptmap.open(path) as ckpt:
        dense = {key: ckpt[key].read() for key in ckpt}
        model.load_state_dict(dense)
        for index in (0, 2, 3):
            source = ckpt[f"{index}.weight"]
            codes = torch.empty(source.shape, dtype=torch.int8)
            source.read_codes(Box.whole(source.shape), codes)
            scales = source.read_scales()
            block = [-(-n // g) for n, g in zip(codes.shape, scales.shape, strict=True)]
            weight = Int8Tensor(codes, scales, block, torch.bfloat16)
            model[index].weight = nn.Parameter(weight, requires_grad=False)
    return model


def check(model: Any, path: Path) -> None:
    """Outputs and gradients are those of one process, twice: the second forward reuses memory."""
    reference = truth(path)
    x = batch()
    for _ in range(2):
        wanted, found = reference(x), model(x)
        assert torch.equal(found, wanted), path.name
    wanted.float().square().mean().backward()
    found.float().square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 2, "of the trainable layer's weight and bias"


def fsdp2(path: Path, mesh: DeviceMesh | None = None) -> None:
    """Over all ranks, or over the last dim of the mesh and copied over the first."""
    world = dist.get_world_size() if mesh is None else mesh.size(1)
    model = net()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    report = load(path, model)
    odd = world > 1
    expected = {"0.weight", "2.weight"} if odd else {"0.weight", "2.weight", "3.weight"}
    assert {e.fqn for e in report.encoded} == expected
    if odd:
        assert [d.fqn for d in report.decoded] == ["3.weight"]
        assert "not cut by" in report.decoded[0].reason
    for index in (0, 2):
        local = model[index].weight.to_local()
        assert (
            type(local).__name__ == "ShardedInt8"
            and local.qdata.shape[0] * world == model[index].weight.shape[0]
        )
        assert not model[index].weight.requires_grad
    x, reference = batch(), truth(path)
    if odd:
        with ckptmap.open(path) as ckpt:
            reference[3].weight = nn.Parameter(ckpt["3.weight"].read(), requires_grad=False)
    for _ in range(2):
        assert torch.equal(model(x), reference(x)), path.name
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        output = model(x)
    assert not [t for t in kept if t.is_floating_point() and tuple(t.shape) in ((32, 48), (48, 32))]
    output.float().square().mean().backward()
    reference(x).float().square().mean().backward()
    assert model[1].weight.grad is not None and model[0].weight.grad is None
    for name in ("weight", "bias"):  # over the codes of the layer behind, as torchao's autograd
        got, wanted = (getattr(one[1], name).grad for one in (model, reference))
        assert torch.equal(got.full_tensor(), wanted), name
    load(path.parent / "dense.pt", model)  # quantized on its way
    assert type(model[0].weight.to_local()).__name__ == "ShardedInt8"
    load(path, model)
    assert torch.equal(model(x), reference(x)), "again"
    by_torch = path.parent / f"dcp-{path.stem}-{dist.get_world_size()}"
    dcp.save(model.state_dict(), checkpoint_id=by_torch)
    with ckptmap.open(by_torch) as theirs, ckptmap.open(path) as original:
        assert theirs["0.weight"].encoding == "int8"
        assert torch.equal(theirs["0.weight"].read(), original["0.weight"].read())
    saved = path.parent / f"saved-{path.stem}-{dist.get_world_size()}"
    save(saved, model).wait()
    with ckptmap.open(saved) as ours, ckptmap.open(path) as original:
        assert ours["0.weight"].encoding == "int8" and not ours.refused
        for key in ("0.weight", "2.weight"):
            codes = [torch.empty(original[key].shape, dtype=torch.int8) for _ in range(2)]
            box = Box.whole(original[key].shape)
            for tensor, out in zip((ours[key], original[key]), codes, strict=True):
                tensor.read_codes(box, out)
            assert torch.equal(*codes), key
            assert torch.equal(ours[key].read_scales(), original[key].read_scales()), key


def dynamic(folder: Path) -> None:
    """Activations in int8, as the checkpoint of torchao's states them: under FSDP2 as in one process."""
    reference, model = net(), net()
    state = torch.load(folder / "dynamic.pt", weights_only=True)
    reference.load_state_dict(state, assign=True)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    report = load(folder / "dynamic.pt", model)
    assert {str(e) for e in report.encoded} == {
        f"{name}.weight: int8, activations in int8" for name in ("0", "2")
    }
    x = batch()
    for _ in range(2):
        assert torch.equal(model(x), reference(x))
    saved = folder / f"dynamic-{dist.get_world_size()}"
    save(saved, model).wait()
    dist.barrier()
    again = net()
    load(saved, again)
    assert again[0].weight.act_quant_kwargs == reference[0].weight.act_quant_kwargs is not None
    assert torch.equal(again(x), reference(x))


def ddp(path: Path) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net())
    report = load(path, model)
    assert {e.fqn for e in report.encoded} == {"0.weight", "2.weight", "3.weight"}
    check(model, path)


TRAINED = (
    "int8_weight_only_quantized_training", "int8_mixed_precision_training", "bitnet_training",
    "convert_to_float8_training",
)  # fmt: skip


def trained(config: str, seed: int) -> Any:
    """torchao's training weights, of other values than the checkpoint's."""
    from torchao.prototype import quantized_training
    from torchao.quantization import quantize_

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 48)).bfloat16()
    if config == TRAINED[3]:
        float8_all_gather(model)
    else:
        quantize_(model, getattr(quantized_training, config)())
    return model


def value(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "to_local"):
        local = tensor.to_local()
        return DTensor.from_local(value(local), tensor.device_mesh, tensor.placements).full_tensor()
    for kept in ("_data", "_tensor"):
        if hasattr(tensor, kept):
            return getattr(tensor, kept).detach()
    return tensor.dequantize().detach() if hasattr(tensor, "int_data") else tensor.detach()


def training(folder: Path, sharded: bool) -> None:
    """Saved from one model, loaded into another, of the same class and of a dense one."""
    for config in TRAINED:
        first, other = trained(config, 1), trained(config, 2)
        for model in (first, other) if sharded else ():
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        path = folder / f"trained-{config}-{dist.get_world_size() if sharded else 0}"
        save(path, first).wait()
        if sharded:
            dist.barrier()
        wanted = {key: value(tensor) for key, tensor in first.state_dict().items()}
        with ckptmap.open(path) as ckpt:
            is_int8 = config == TRAINED[0]
            assert ckpt["0.weight"].encoding == ("int8" if is_int8 else "dense")
            assert all(torch.equal(ckpt[key].read(), tensor) for key, tensor in wanted.items())
        report = load(path, other)
        assert {e.fqn for e in report.encoded} == ({"0.weight", "1.weight"} if is_int8 else set())
        assert type(other[0].weight).__name__ in ("DTensor", *TRAINED_DENSE, TRAINED_INT8)
        assert other[0].weight.requires_grad
        found = {key: value(tensor) for key, tensor in other.state_dict().items()}
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
        if sharded and config == TRAINED[3]:
            continue  # gloo gathers no float8
        plain = trained(config, 3)
        load(path, plain)
        output = other(batch())
        assert torch.equal(output, plain(batch())), config
        output.float().square().mean().backward()
        assert other[0].weight.grad is not None, "it still trains"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        if dist.get_world_size() == 4:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            for name in ("int8", "bnb-int8"):
                fsdp2(folder / f"{name}.pt", mesh)
            return
        for name in SOURCES:
            fsdp2(folder / f"{name}.pt")
            ddp(folder / f"{name}.pt")
        training(folder, sharded=True)
        dynamic(folder)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
