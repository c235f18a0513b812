"""Plain load_state_dict with our hooks, from FSDP2 on one mesh to another, moments in 8 bits.

python -m tests.ranks.hooks_mesh
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit

import ckptmap
from tests.ranks.translate_mesh import hsdp
from tests.support.resume_model import compiled_layers, fsdp2, net, train


def local_of(tensor: Any) -> Any:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.dequantize() if hasattr(local, "codes") else local.detach().float()


def whole(tensor: Any) -> Any:
    """All ranks' rows of a tensor that FSDP2 cuts over one dim."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, local_of(tensor))
    return torch.cat(found)


def rows(tensor: Any, live: Any) -> Any:
    """Those of this rank, of a mesh whose last dim cuts rows."""
    mesh = live.device_mesh
    n, rank = mesh.size(mesh.ndim - 1), mesh.get_coordinate()[-1]
    each = -(-tensor.shape[0] // n)
    return tensor[rank * each : (rank + 1) * each]


def main() -> None:
    model = compiled_layers(net(0), fsdp2)
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    train(model, optimizer, 0, 2, dist.get_rank())

    other = hsdp(net(1))
    theirs = AdamW8bit(other.parameters(), lr=9.0)
    with ckptmap.hooks.install(other, theirs, max_memory=20_000) as handle:
        assert not other.load_state_dict(model.state_dict()).missing_keys
        theirs.load_state_dict(optimizer.state_dict())
    state = handle.reports["optimizer"].state
    assert state is not None and not state.initialised and not state.left
    assert theirs.param_groups[0]["lr"] == 1e-3
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    for one, two in pairs:
        truth = whole(one)
        assert torch.equal(local_of(two), rows(truth, two))
        for name in ("exp_avg", "exp_avg_sq"):
            want = rows(whole(optimizer.state[one][name]), two)
            assert torch.equal(local_of(theirs.state[two][name]), want), name
        assert int(theirs.state[two]["step"]) == 2
    train(other, theirs, 2, 4, dist.get_rank())

    # what torch can load it loads itself, and without the hooks nothing else is taken
    other.load_state_dict(other.state_dict())
    try:
        other.load_state_dict(model.state_dict())
    except RuntimeError as error:
        assert "_orig_mod" in str(error), error
    else:
        raise AssertionError("the hooks are still there")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.compiler.set_stance("force_eager")
    main()
    dist.barrier()
    dist.destroy_process_group()
