"""Training runs saved with their optimizer: what tells which index is which, and what does not.

Every case is `trained`: two steps of AdamW, decay and no-decay groups.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.corpus.case import Gathered, case
from tests.corpus.models import compiled, moments, optimizer_for, tiny, train, trained
from tests.corpus.writers_ddp import save_on_rank_0


@case(
    "torch_compiled_optimizer", 1, "torch", file="checkpoint.pt", root=("model",),
    prefix="_orig_mod.", wrappers=("_orig_mod",), optimizer="index",
    order="the order of the saved model dict",
    notes="decay groups by name; within a group in the model's order",
)  # fmt: skip
def torch_compiled_optimizer(path: Path) -> Gathered:
    model, optimizer = trained()
    state = {"model": compiled(model).state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path)
    return Gathered(model.state_dict(), moments(model, optimizer))


@case(
    "ddp_optimizer_w2", 2, "torch", file="checkpoint.pt", root=("model",), prefix="module.",
    wrappers=("module",), optimizer="index", order="the order of the saved model dict",
    extra={"step": 2},
)  # fmt: skip
def ddp_optimizer(path: Path) -> Gathered:
    inner = tiny()
    model = DDP(inner)
    optimizer = optimizer_for(model)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    save_on_rank_0(state, path)
    return Gathered(inner.state_dict(), moments(inner, optimizer))
