"""State of several optimizers that a checkpoint has as a list, as Lightning's .ckpt files do: the optimizers that are
given take it in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.errors import LoadError
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.optimizer.live_order import live_order
from ckptmap.live.optimizer.several_optimizers import SeveralOptimizers
from ckptmap.live.optimizer.unwrap import each_of, unwrapped
from ckptmap.optim.state import NAMES

if TYPE_CHECKING:
    import torch


def of_all(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: object, targets: Sequence[LiveTensor]
) -> Checkpoint:
    """Return the checkpoint with a list of states as one state by FQN, where several optimizers are given; else the
    checkpoint itself. Groups that name their parameters are believed, others follow the live optimizers.

    Raises LoadError CKM506 where they are not as many, SourceError CKM207 where sizes or shapes refute the order."""
    count = checkpoint.optimizer_reader.count
    several = unwrapped(optimizer) if optimizer is not None and count > 1 else None
    if not isinstance(several, SeveralOptimizers):
        return checkpoint
    ones = each_of(several)
    if len(ones) != count:
        raise LoadError(
            "CKM506",
            f"{checkpoint.path}: has the states of {count} optimizers, and {len(ones)} are given",
            "give all optimizers in the order in which they were saved",
        )
    named = replace(checkpoint, optimizer_reader=checkpoint.optimizer_reader.as_one())
    if all(NAMES in group for group in named.optimizer_reader.raw.groups):
        return named
    order = [group for one in ones for group in live_order(one, targets, model, checkpoint)]
    return named.with_optimizer_order(order)
