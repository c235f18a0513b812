"""NF4 weights under DDP, which by itself quantizes them again or refuses them.

DDP broadcasts the model when it is built. It decodes an NF4 weight that shares a bucket with other
tensors and quantizes it again on every rank, rank 0 included, with other scales; it refuses one that
is alone in its bucket. `prepare_ddp` makes DDP ignore NF4 weights, and broadcasts them itself.

    prepare_ddp(model); model = DistributedDataParallel(model)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.errors import LoadError
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.quantized.nf4 import LIVE_CLASS
from ckptmap.live.quantized.nf4_torchao import from_torchao

if TYPE_CHECKING:
    import torch


def prepare_ddp(model: torch.nn.Module, source: int = 0) -> tuple[str, ...]:
    """Broadcast the NF4 weights of rank `source`, make DDP ignore them, and return their names.

    Every rank calls it before `DistributedDataParallel(model)`. Raises LoadError CKM509 where the
    ranks have NF4 weights of different names, or the replicas differ afterwards.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    names = [name for name, param in model.named_parameters() if _is_nf4(param)]
    known = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, [*known, *names])  # type: ignore[no-untyped-call]
    peers = RankGroup.join("replicas")
    if len(set(map(tuple, peers.all(names)))) > 1:
        raise LoadError(
            "CKM509",
            f"model: rank {peers.rank} has {len(names)} NF4 weights, other ranks have different ones",
            "quantize the same weights on every rank",
        )
    if peers.world > 1:
        with torch.no_grad():
            for name in names:
                for part in _parts(model.get_parameter(name)):
                    torch.distributed.broadcast(part, source)
    compare_nf4(model, peers)
    return tuple(names)


def compare_nf4(model: torch.nn.Module, peers: RankGroup | None = None) -> str:
    """Return the digest of all NF4 weights; empty where there are none.

    Raises LoadError CKM509 where the ranks' digests differ."""
    import xxhash

    from ckptmap.live.model.tensor_reader import as_bytes

    peers = RankGroup.join("replicas") if peers is None else peers
    digest, found = xxhash.xxh3_64(), False
    for name, param in model.named_parameters():
        if _is_nf4(param):
            found = True
            digest.update(name.encode())
            for part in _parts(param):
                digest.update(as_bytes(part))
    mine = digest.hexdigest() if found else ""
    digests = peers.all(mine)
    if len(set(digests)) > 1:
        raise LoadError(
            "CKM509",
            f"model: the NF4 weights of rank {peers.rank} differ from other ranks': {digests}",
            "call prepare_ddp(model) before DistributedDataParallel(model), or load again",
        )
    return mine


def _is_nf4(param: torch.Tensor) -> bool:
    return type(param).__name__ == LIVE_CLASS


def _parts(param: torch.Tensor) -> list[torch.Tensor]:
    _, _, parts = from_torchao(param.detach())
    return list(parts.values())
