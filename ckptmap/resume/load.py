"""load(): any checkpoint into a live model, whatever wraps it, each rank reading only its part.

    model -> targets by plain FQN -> matched with the checkpoint -> one step a tensor -> run

Everything that can be refused is refused before the first parameter is touched, on all ranks or on
none: the ranks that hold a model together agree on errors after planning and at the end. Nothing
else is communicated.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckptmap.checkpoint import Checkpoint
from ckptmap.checkpoint import open as open_checkpoint
from ckptmap.errors import LoadError
from ckptmap.resume.agree import agreed, peer_groups
from ckptmap.resume.match import Matcher
from ckptmap.resume.reader import Reader
from ckptmap.resume.report import LoadReport
from ckptmap.resume.target import find_targets

if TYPE_CHECKING:
    import torch

MAX_MEMORY = 64 << 20
"""Bytes of host buffers by default."""


def load(
    path: str | os.PathLike[str] | Checkpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    strict_encoding: bool = False,
    max_memory: int = MAX_MEMORY,
) -> LoadReport:
    """Load a checkpoint of any setup into a plain, DDP, compiled or `fully_shard`ed model.

    Every rank of the model calls it; each reads the bytes of its own shards only. Dense weights are
    filled in place (created, where they are on meta) in the model's dtype. An NF4 weight of the
    checkpoint becomes torchao's NF4Tensor where the live one is frozen and belongs to a linear
    layer; where it cannot be cut for the mesh it is decoded into the dense shard and listed, or
    refused with `strict_encoding`. A dense weight is quantized where the live one is NF4. Under DDP
    all replicas read the same bytes, so NF4 weights are equal although DDP does not broadcast them.

    `strict=False` reports missing, unexpected and mismatched tensors in place of raising; they keep
    their values. `max_memory` bounds host buffers in bytes, beside the tensors themselves.

    Raises LoadError before anything is touched: CKM501 names or meta tensors do not match, CKM502
    shapes differ, CKM503 an NF4 weight is trainable here, CKM504 cannot be cut, CKM505 a kind of
    model that it cannot load into, CKM208 tied here but different in the checkpoint; SourceError
    where the checkpoint cannot be read.
    """
    if optimizer is not None:
        raise LoadError("CKM505", "load: optimizer state is not loaded yet", "pass the model alone")
    import torch

    targets, homeless = find_targets(model)
    peers = peer_groups(model, targets)
    with ExitStack() as closing:
        with agreed(peers):
            checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
            if checkpoint is not path:
                closing.callback(checkpoint.close)
            reader = Reader(checkpoint.files, max_memory)
            plan = Matcher(checkpoint, reader, targets).plan()
            plan.refuse(checkpoint.path, strict, strict_encoding, homeless)
        with agreed(peers), torch.no_grad():
            for step in plan.steps:
                step(reader)
    return plan.report(reader, homeless)
