"""A live FSDP1 run goes on from what ckptmap wrote: `python -m ... FOLDER`, on every rank.

A model is trained and saved as FSDP1's own full state; rank 0 converts that to `fsdp1-local`; a
fresh model of other values loads the rank files, as does its optimizer by `load_state_dict`. Both go
on: what they hold after the same steps must be equal, bit for bit.
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ckptmap
from tests.corpus.models import Attention, Layer, Mlp, Recipe, Tiny, optimizer_for, tiny, train
from tests.corpus.writers_fsdp1 import full_type, wrapped
from tests.corpus.writers_fsdp1_local import local_state
from tests.corpus.writers_fsdp2 import rank_file
from tests.ranks.fsdp1_local import shards

OTHER = Recipe(seed=7)
NESTED = {"auto_wrap_policy": ModuleWrapPolicy({Layer, Attention, Mlp})}
UNITS = ("layers.*",)
NESTED_UNITS = ("layers.*", "layers.*.self_attn", "layers.*.mlp")


def made(recipe: Recipe, orig: bool, nested: bool) -> tuple[FSDP, torch.optim.Optimizer]:
    model = wrapped(tiny(recipe), orig, **(NESTED if nested else {}))
    if orig:
        return model, optimizer_for(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)


def kept(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the rank holds: weights, and the optimizer's own state."""
    weights = {
        f"{n} {i}": p for n, v in local_state(model).items() for i, p in enumerate(shards(v))
    }
    state = optimizer.state_dict()
    found = {f"{k} {name}": v for k, s in state["state"].items() for name, v in s.items()}
    groups = [{k: v for k, v in g.items() if k != "param_names"} for g in state["param_groups"]]
    return {
        "tensors": {k: v.detach().clone() for k, v in {**weights, **found}.items()},
        "groups": groups,
    }


def same(one: dict[str, Any], other: dict[str, Any], when: str) -> None:
    assert one["groups"] == other["groups"], (when, one["groups"], other["groups"])
    assert set(one["tensors"]) == set(other["tensors"]), when
    for name, value in one["tensors"].items():
        found: Tensor = other["tensors"][name]
        assert found.dtype == value.dtype and torch.equal(found, value), (when, name)


def check(folder: Path, orig: bool, nested: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = made(Recipe(), orig, nested)
    train(model, optimizer)
    full_type(model)
    state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    out = folder / f"{orig}-{nested}"
    if rank == 0:
        out.mkdir(parents=True)
        torch.save(state, out / "full.pt")
        torch.save(dict(Tiny(Recipe()).state_dict()), out / "like.pt")
        ckptmap.convert(
            out / "full.pt", out / "local", to="fsdp1-local", world_size=world, use_orig_params=orig,
            fsdp_units=NESTED_UNITS if nested else UNITS, like=str(out / "like.pt"),
        )  # fmt: skip
    dist.barrier()
    torch.save(local_state(model), rank_file(out))
    again, fresh = made(OTHER, orig, nested)
    local_state(again)  # sets the type that the files are of
    name = f"world_size_{world}_rank_{rank}.pt"
    again.load_state_dict(
        torch.load(out / "local" / f"model_{name}", weights_only=False), strict=not orig
    )
    fresh.load_state_dict(torch.load(out / "local" / f"optim_{name}", weights_only=True))
    same(kept(model, optimizer), kept(again, fresh), "loaded")
    for each in ((model, optimizer), (again, fresh)):
        train(*each, steps=2)
    same(kept(model, optimizer), kept(again, fresh), "after the same steps")


def main(folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # FSDP1's own deprecations
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for orig in (False, True):
        for nested in (False, True):
            check(Path(folder), orig, nested)
            print(f"went on: use_orig_params={orig} nested={nested}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
