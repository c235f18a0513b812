"""Write for each rank the torch.save files that FSDP1 saves with LOCAL_STATE_DICT.

FSDP1 joins the parameters of a unit (a group of modules that it wraps) into one flat parameter:

    parameters of a unit [n0, ...], [n1, ...], ...
        ->  N x ShardedTensor{`<unit>._flat_param` [ceil(numel / N)]}

With `use_orig_params=True` each file also holds every parameter by name, as a view of the elements
that the rank holds. A tensor of no unit (a buffer) is whole in each file. The optimizer state of
each rank is written beside, as `optimizer.state_dict()` returns it. Source:
torch/distributed/fsdp/_flat_param.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.state_tree import nest
from ckptmap.errors import PlanError
from ckptmap.formats.pickle.writer import StorageTensor, dump
from ckptmap.formats.rank_files.fsdp1_local_flat import (
    Flat,
    Storage,
    flats_of,
    laid_out,
    pieces_of,
    whole,
)
from ckptmap.formats.rank_files.fsdp1_local_optim import OptimizerFiles
from ckptmap.formats.rank_files.sharded_tensor_pickle import flat_sharded
from ckptmap.protocols import OutFile, OutState, OutTensor, Setup
from ckptmap.tensors import ITEMSIZE, Path

FSDP1_LOCAL = Setup(
    "fsdp1-local",
    layout="flat",
    writer="fsdp1-local",
    sharded=True,
    places=(),
    dense=True,
    optimizer_keys="fqn",
    live="FSDP1",
    summary="torch.save files a rank, flat parameters as FSDP1's LOCAL_STATE_DICT has them",
)
MODEL, OPTIMIZER = "model", "optimizer"


class Fsdp1LocalWriter:
    """Writes one `model_world_size_W_rank_R.pt` per rank, and an `optim_world_size_W_rank_R.pt` if
    there is optimizer state."""

    name = "fsdp1-local"
    one_file = False
    shares_storage = True

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """Return the files of all ranks. Raise PlanError CKM204 for a single rank, CKM205 for weights
        below another key than `model`, CKM504 if FSDP1 cannot flatten the tensors in these units."""
        if state.world_size < 2:
            raise PlanError(
                "CKM204",
                "fsdp1-local: expected 2 ranks or more, found 1, for which FSDP1 saves whole tensors",
                "give --world-size 2 or more, or choose --to full",
            )
        with paused_gc():
            weights = [tensor for tensor in state.tensors if tensor.path[0] != OPTIMIZER]
            flats = flats_of(weights, state.world_size)
            parts = len(weights) < len(state.tensors) or any(p[0] == OPTIMIZER for p in state.extra)
            depth = _depth(weights) if parts else 0
            ranks = range(state.world_size)
            files = [_file(weights, flats, depth, state.world_size, rank) for rank in ranks]
            return files + (OptimizerFiles(state, weights, flats).files() if parts else [])


def _depth(weights: Sequence[OutTensor]) -> int:
    """Return the depth of the weights in a state that also has an optimizer: 1, below `model`.

    The file of the weights holds the weights alone, without that key. Raise PlanError CKM205 for
    weights below another key.
    """
    other = next((tensor.path[0] for tensor in weights if tensor.path[:-1] != (MODEL,)), None)
    if other is not None:
        raise PlanError(
            "CKM205",
            f"--root {other}: fsdp1-local writes weights and optimizer into separate files, without a root",
            "leave out --root",
        )
    return 1


def _file(
    weights: Sequence[OutTensor], flats: dict[str, Flat], depth: int, world_size: int, rank: int
) -> OutFile:
    storages: list[Storage] = []
    leaves: list[tuple[Path, object]] = []
    views: dict[str, StorageTensor] = {}
    shared: dict[Path, StorageTensor] = {}
    for prefix, flat in flats.items():
        low, high = flat.bounds(rank)
        key, nbytes = str(len(storages)), flat.shard_numel * ITEMSIZE[flat.dtype]
        storages.append(Storage(key, nbytes, pieces_of(flat, rank)))
        views[prefix] = StorageTensor(
            key, flat.dtype, flat.shard_numel, 0, (high - low,), (1,), requires_grad=True
        )
    for tensor in weights:
        path = tensor.path[depth:]
        if tensor.unit is None:
            owner = tensor.alias_of or tensor.path
            if owner not in shared:
                shared[owner] = whole(tensor, storages)
            leaves.append((path, shared[owner]))
        elif tensor.unit.named:
            leaves.append((path, _slice(tensor, flats[tensor.unit.prefix], views, rank)))
    leaves += [
        (
            flat.path[depth:],
            flat_sharded(flat.dtype, flat.numel, flat.shards, views[p], rank, flat.world),
        )
        for p, flat in flats.items()
    ]
    name = f"model_world_size_{world_size}_rank_{rank}.pt"
    return laid_out(name, dump(nest(leaves)), storages)


def _slice(
    tensor: OutTensor, flat: Flat, views: dict[str, StorageTensor], rank: int
) -> StorageTensor:
    """Return the view of the rank's shard that holds its elements of one parameter; a view of shape [0]
    if it holds none."""
    assert tensor.unit is not None
    _, start = flat.members[tensor.alias_of or tensor.path]
    low, high = flat.bounds(rank)
    first, last = max(low, start), min(high, start + tensor.info.numel)
    numel = max(0, last - first)
    view = views[tensor.unit.prefix]
    offset = first - low if numel else 0
    return StorageTensor(view.key, view.dtype, view.numel, offset, (numel,), (1,))
