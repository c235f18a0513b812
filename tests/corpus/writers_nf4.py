"""torchao's NF4Tensor as users store it: pickled in torch.save, DCP blobs and rank files.

The shards are cut from the NF4Tensor of the whole weight, as FSDP2 with NF4 requires: its gather
uses one rank's `scaler_mean` for all.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from tests.corpus.case import case
from tests.corpus.models import SQUARE, Recipe, State, quantize, tiny, tiny_llama
from tests.corpus.writers_fsdp2 import rank_file, sharded

SQUARE_BF16 = Recipe(256, 64, 128, 2, dtype=torch.bfloat16)
SQUARE_FP16 = Recipe(256, 64, 128, 2, dtype=torch.float16)
DEFAULT_BLOCKS = Recipe(64, 256, 512, 1, dtype=torch.bfloat16)
"""Large enough for torchao's default scaler block of 256 on 2 ranks: 4 factors or more a weight."""

RECIPES: dict[str, Recipe] = {}
"""The recipe of each case but the Llama's, for who needs the dense original."""


def quantized(recipe: Recipe, world_size: int) -> nn.Module:
    return quantize(tiny(recipe), world_size)


def nf4_truth(recipe: Recipe, world_size: int) -> State:
    return dict(quantized(recipe, world_size).state_dict())


def llama() -> nn.Module:
    return quantize(tiny_llama(dtype=torch.bfloat16))


def llama_nf4_truth() -> State:
    return dict(llama().state_dict())


def save(recipe: Recipe, path: Path) -> None:
    torch.save(quantized(recipe, dist.get_world_size()).state_dict(), path)


for label, recipe in (
    ("fp32", SQUARE),
    ("bf16", SQUARE_BF16),
    ("fp16", SQUARE_FP16),
    ("default_blocks", DEFAULT_BLOCKS),
):
    RECIPES[f"nf4_torch_{label}"] = recipe
    case(
        f"nf4_torch_{label}", 1, "torch", file="model.pt", encoding="nf4",
        truth=partial(nf4_truth, recipe, 1),
    )(partial(save, recipe))  # fmt: skip


@case("nf4_torch_llama", 1, "torch", file="model.pt", encoding="nf4", truth=llama_nf4_truth)
def nf4_torch_llama(path: Path) -> None:
    torch.save(llama().state_dict(), path)


RECIPES["nf4_dcp_single"] = SQUARE_BF16


@case("nf4_dcp_single", 1, "dcp", encoding="nf4", truth=partial(nf4_truth, SQUARE_BF16, 1))
def nf4_dcp_single(path: Path) -> None:
    save_dcp(quantized(SQUARE_BF16, 1).state_dict(), checkpoint_id=path, no_dist=True)


def save_shards(recipe: Recipe, path: Path) -> None:
    model = sharded(quantized(recipe, dist.get_world_size()))  # type: ignore[arg-type]
    save_dcp(get_model_state_dict(model), checkpoint_id=path)


def save_ranks(recipe: Recipe, path: Path) -> None:
    model = sharded(quantized(recipe, dist.get_world_size()))  # type: ignore[arg-type]
    torch.save(model.state_dict(), rank_file(path))


for label, recipe in (("bf16", SQUARE_BF16), ("default_blocks", DEFAULT_BLOCKS)):
    RECIPES[f"nf4_fsdp2_dcp_{label}_w2"] = RECIPES[f"nf4_fsdp2_ranks_{label}_w2"] = recipe
    case(
        f"nf4_fsdp2_dcp_{label}_w2", 2, "dcp", encoding="nf4", truth=partial(nf4_truth, recipe, 2),
        notes="blobs of NF4Tensor chunks; .metadata calls them dense",
    )(partial(save_shards, recipe))  # fmt: skip
    case(
        f"nf4_fsdp2_ranks_{label}_w2", 2, "ranks", encoding="nf4",
        truth=partial(nf4_truth, recipe, 2), notes="DTensor of NF4Tensor chunks",
    )(partial(save_ranks, recipe))  # fmt: skip
