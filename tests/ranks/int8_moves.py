"""What each of 2 ranks does in `tests.quantization.test_int8_recode`, by `run_ranks("tests.ranks.int8_moves", 2, [DIR])`.

Saves torchao's training weights under FSDP2 as users do, and loads int8 that ckptmap wrote with
torch alone.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Shard

from tests.support.cpu_sharding import fully_shard


def trained(kind: str) -> Any:
    """A model with torchao's training weights, the same on every rank."""
    from torchao.prototype import quantized_training
    from torchao.quantization import quantize_

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16, bias=False)).bfloat16()
    if kind == "convert_to_float8_training":
        float8_all_gather(model)
    elif kind in EXPERTS:
        for layer in model:
            layer.weight = nn.Parameter(expert_weight(kind, layer.weight.detach()))
    else:
        quantize_(model, getattr(quantized_training, kind)())
    return model


def float8_all_gather(model: nn.Module) -> None:
    """As torchtitan's recipes do; without a GPU the products are emulated."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)


EXPERTS = {
    "Float8TrainingWeightWrapperTensor": "Float8TrainingOpConfig",
    "MXFP8TrainingWeightWrapperTensor": "MXFP8TrainingOpConfig",
}


def expert_weight(kind: str, weight: torch.Tensor) -> Any:
    from torchao.prototype.moe_training import config, tensor

    return getattr(tensor, kind)(weight, getattr(config, EXPERTS[kind])())


KINDS = {
    "int8qt": "int8_weight_only_quantized_training",
    "int8mp": "int8_mixed_precision_training",
    "bitnet": "bitnet_training",
    "float8": "convert_to_float8_training",
    "float8-experts": "Float8TrainingWeightWrapperTensor",
    "mxfp8-experts": "MXFP8TrainingWeightWrapperTensor",
}


def values(kind: str) -> dict[str, torch.Tensor]:
    """What the whole model's weights are."""
    state = trained(KINDS[kind]).state_dict()
    return {key: _value(value) for key, value in state.items()}


def _value(tensor: Any) -> torch.Tensor:
    for kept in ("_data", "_tensor"):
        if hasattr(tensor, kept):
            return getattr(tensor, kept)
    return tensor.dequantize() if hasattr(tensor, "int_data") else tensor


def save(work: Path) -> None:
    """torch.save a rank for each; DCP for those that it can save (not Int8QT: aten.is_pinned)."""
    for kind, config in KINDS.items():
        model = trained(config)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        folder = work / f"ranks-{kind}"
        folder.mkdir(exist_ok=True)
        world, rank = dist.get_world_size(), dist.get_rank()
        torch.save(model.state_dict(), folder / f"model_world_size_{world}_rank_{rank}.pt")
        if kind != "int8qt":
            dcp.save(model.state_dict(), checkpoint_id=work / f"dcp-{kind}")


def bnb_int8() -> Any:
    """Two layers of LLM.int8, with their scales."""
    import bitsandbytes as bnb

    torch.manual_seed(6)
    layers = []
    for inner, outer in ((32, 48), (48, 16)):
        layer: Any = bnb.nn.Linear8bitLt(inner, outer, bias=False, has_fp16_weights=False)
        weight = (torch.randn(outer, inner) * 0.02).half()
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to(
            "cpu"
        )
        layers.append(layer)
    return nn.Sequential(*layers)


def save_bnb(work: Path) -> None:
    """FSDP2 cuts the codes and loses SCB; rank 0 saves the base that has it."""
    model = bnb_int8()
    if dist.get_rank() == 0:
        torch.save(dict(model.state_dict()), work / "bnb-base.pt")
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    dcp.save(model.state_dict(), checkpoint_id=work / "bnb-naked")


def fsdp1(work: Path) -> None:
    """What FSDP1 says of 8-bit weights, for the table of `ckptmap.planning.live_encodings`."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    def raw(layer: Any, codes: torch.Tensor) -> None:
        layer.weight = nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = nn.Parameter(torch.ones(1, 1), requires_grad=False)

    makers = {
        "int8": lambda layer: raw(layer, torch.zeros(16, 16, dtype=torch.int8)),
        "float8": lambda layer: raw(layer, torch.zeros(16, 16).to(torch.float8_e4m3fn)),
        "Int8Tensor": lambda layer: quantize_(layer, Int8WeightOnlyConfig()),
        "Float8Tensor": lambda layer: quantize_(layer, Float8WeightOnlyConfig()),
    }
    said = {}
    for name, make in makers.items():
        model = nn.Sequential(nn.Linear(16, 16, bias=False)).bfloat16().requires_grad_(False)
        make(model[0])
        try:
            FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
            said[name] = ""
        except Exception as error:
            said[name] = str(error)
    if dist.get_rank() == 0:
        (work / "fsdp1.json").write_text(json.dumps(said))


def load(work: Path) -> None:
    """codes and scales as plain sharded tensors: stock DCP reads them, gathered they are whole."""
    for ours in sorted(work.glob("ours-*")):
        truth = torch.load(work / "truth.pt")
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        state: dict[str, Any] = {
            key: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)])
            for key, value in truth.items()
        }
        dcp.load(state, checkpoint_id=ours)
        for key, wanted in truth.items():
            loaded = state[key]
            assert isinstance(loaded, DTensor)
            assert torch.equal(loaded.full_tensor(), wanted), (ours.name, key)


def main(work: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        save(work)
        save_bnb(work)
        load(work)
        fsdp1(work)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
