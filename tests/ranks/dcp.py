"""What each rank does in `tests.formats.dcp.test_dcp`, by `run_ranks("tests.ranks.dcp", WORLD, [DIR])`.

Saves FSDP2 models as users do (rank 2 runs), and loads what ckptmap wrote.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any


def main(work: Path) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        if dist.get_world_size() == 2:
            save_fsdp2(work)
            save_nf4(work)
        for ours in sorted(work.glob("ours*")):
            load_ours(ours, work / "truth.pt")
    finally:
        dist.destroy_process_group()


def build() -> Any:
    """Uneven over 2 and 4 ranks; one weight has fewer rows than ranks."""
    import torch

    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3, bias=False)
    )
    model.register_buffer("steps", torch.tensor(11))
    return model


def trained(model: Any) -> Any:
    """One step of AdamW, so that there is optimizer state."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    return optimizer


def save_fsdp2(work: Path) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    from tests.support.cpu_sharding import fully_shard

    model = build()
    for child in model:
        fully_shard(child)
    fully_shard(model)
    optimizer = trained(model)
    weights, state = get_state_dict(model, optimizer)
    tree = {"model": weights, "optimizer": state, "step": 3, "args": {"lr": [1.0, None]}}
    dcp.save(tree, checkpoint_id=work / "fsdp2")
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_state_dict(model, optimizer, options=full)
    if dist.get_rank() == 0:
        torch.save(whole, work / "fsdp2.pt")


def save_nf4(work: Path) -> None:
    """Frozen NF4 weights as FSDP2 shards them: nothing in `.metadata` says NF4."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torchao.quantization import to_nf4

    from tests.support.cpu_sharding import fully_shard

    torch.manual_seed(3)
    model = torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    whole = to_nf4(model.weight.detach(), 64, 256)
    model.weight = torch.nn.Parameter(whole, requires_grad=False)
    tiny = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    tiny.weight = torch.nn.Parameter(to_nf4(tiny.weight.detach(), 64, 2), requires_grad=False)
    alone = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    alone.weight = torch.nn.Parameter(tiny.weight.detach(), requires_grad=False)
    fully_shard(alone)
    dcp.save(alone.state_dict(), checkpoint_id=work / "nf4tiny")
    both = torch.nn.Sequential(model, tiny)
    fully_shard(both)
    dcp.save(both.state_dict(), checkpoint_id=work / "nf4")
    if dist.get_rank() == 0:
        torch.save(whole.quantized_data, work / "nf4.pt")


def load_ours(ours: Path, truth_file: Path) -> None:
    """Into zeroed DTensors of this world size, and whole: every value must come back."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    truth = torch.load(truth_file, weights_only=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: dict[str, Any] = {}
    for key, value in truth["model"].items():
        empty = torch.zeros_like(value)
        sharded = value.dim() > 0 and value.numel() > 0
        model[key] = distribute_tensor(empty, mesh, [Shard(0)]) if sharded else empty
    tree = {"model": model, "step": 0, "args": {"lr": None}}
    dcp.load(tree, checkpoint_id=ours)
    assert tree["step"] == truth["step"], tree["step"]
    assert tree["args"] == truth["args"], tree["args"]
    for key, value in truth["model"].items():
        found = tree["model"][key]
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        assert torch.equal(whole, value), f"{ours.name}: {key}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
