"""DTensors on meshes of two dims: TP alone, TP inside FSDP2 (strided shards), TP inside HSDP."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from tests.corpus.case import Gathered, case
from tests.corpus.models import Recipe, Tiny, optimizer_for, tiny, truth
from tests.corpus.writers_fsdp2 import gathered, rank_file, sharded

TP_PLAN: dict[str, ParallelStyle] = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
"""As Llama is cut: q, k, v, gate and up by rows, o and down by columns."""

EVEN = Recipe(ffn=104, heads=4, layers=2)


def tensor_parallel(model: Tiny, mesh: DeviceMesh, head: bool = False) -> Tiny:
    """Cut the layers over `mesh`; `head`: the uneven vocabulary and the 3 scores as well."""
    for layer in model.layers:
        parallelize_module(layer, mesh, dict(TP_PLAN))
    if head:
        plan: dict[str, ParallelStyle] = {"lm_head": ColwiseParallel(), "score": ColwiseParallel()}
        parallelize_module(model, mesh, plan)
    return model


def fsdp_tp(model: Tiny, dp: int, tp: int, head: bool = False) -> Tiny:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    return sharded(tensor_parallel(model, mesh["tp"], head), mesh["dp"])


@case("tp_ranks_w2", 2, "ranks", truth=truth, notes="TP alone, an ffn of 103 over 2 ranks")
def tp_ranks(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.save(tensor_parallel(tiny(), mesh, head=True).state_dict(), rank_file(path))


def save_2d(recipe: Recipe, path: Path) -> None:
    torch.save(fsdp_tp(tiny(recipe), 2, 2, head=True).state_dict(), rank_file(path))


case(
    "fsdp_tp_ranks_w4", 4, "ranks", truth=truth,
    notes="2 x 2, _StridedShard on rows that do not divide, Shard(1), sub-meshes of one save",
)(partial(save_2d, Recipe()))  # fmt: skip


@case("fsdp_tp_dcp_w4", 4, "dcp", truth=truth, notes="2 x 2: chunks of both cuts")
def fsdp_tp_dcp(path: Path) -> None:
    save_dcp(get_model_state_dict(fsdp_tp(tiny(), 2, 2, head=True)), checkpoint_id=path)


@case(
    "fsdp_tp_optimizer_dcp_w4", 4, "dcp", truth=None, root=("model",), optimizer="fqn",
    extra={"step": 3},
)  # fmt: skip
def fsdp_tp_optimizer(path: Path) -> Gathered:
    """2 x 2 with Adam's moments, cut as their parameters are. torch makes the state, all zero; it is
    filled from the parameters, so that a moment in a wrong place is seen."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = fsdp_tp(tiny(EVEN), 2, 2)
    optimizer = optimizer_for(model)
    get_optimizer_state_dict(model, optimizer)
    with torch.no_grad():
        for parameter, moments in optimizer.state.items():
            moments["exp_avg"].copy_(parameter * 0.5)
            moments["exp_avg_sq"].copy_(parameter * parameter)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 3,
    }
    save_dcp(state, checkpoint_id=path)
    return gathered(model, optimizer)
