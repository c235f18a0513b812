"""State dicts of DTensors under other names, compared with one process that holds everything.

python -m tests.ranks.translated      one rank of several
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ckptmap.errors import PlanError
from ckptmap.mapping.translate_state_dict import translate_names
from tests.support.mapping_state import State, config_of, hub_state


def cut(state: State, *placements: Placement) -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {key: distribute_tensor(value, mesh, placements) for key, value in state.items()}


def check(model: str, scheme: str, placement: Placement) -> None:
    """The same tensors, cut as they were, local parts and all."""
    state, config = hub_state(model), config_of(model)
    expected = translate_names(state, scheme, config)
    found = translate_names(cut(state, placement), scheme, config)
    assert found.keys() == expected.keys()
    for key, whole in expected.items():
        tensor = found[key]
        assert isinstance(tensor, DTensor) and tensor.placements == (placement,), key
        local = distribute_tensor(whole, tensor.device_mesh, (placement,)).to_local()
        assert torch.equal(tensor.to_local(), local), key


def refused(state: State, scheme: str) -> PlanError:
    try:
        translate_names(state, scheme, config_of("llama"))
    except PlanError as error:
        return error
    raise AssertionError("was translated")


def main() -> None:
    dist.init_process_group("gloo")
    check("llama", "meta", Shard(0))
    check("llama", "gpt-fast", Shard(0))
    check("mixtral", "hf-memory", Shard(0))
    check("llama", "meta", Replicate())
    matrices = {key: value for key, value in hub_state("llama").items()}
    mixed = cut(matrices, Shard(0))
    key = "model.layers.0.self_attn.k_proj.weight"
    mixed[key] = cut({key: matrices[key]}, Replicate())[key]
    assert "is placed as" in refused(mixed, "gpt-fast").message
    mixed[key] = matrices[key]
    error = refused(mixed, "gpt-fast")
    assert error.code == "CKM610" and "is not on the same device mesh" in error.message
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
