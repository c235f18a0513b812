"""Styles of a `--tp-plan` against transformers' own sharding on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import ckptmap
from ckptmap.errors import PlanError
from ckptmap.sharding.device_mesh import COMPUTING, PACKED, STYLES
from tests.corpus.ranks import run_ranks
from tests.ranks.transformers_tp_styles import parameters

TORCHS = ("shard(0)", "shard(1)")
"""Placements, which transformers has no style for."""


def converted(folder: Path, plan: dict[str, str]) -> list[dict[str, Any]]:
    """Return what each of two ranks loads."""
    torch.save({f"mlp.x.{name}": p.detach() for name, p in parameters().items()}, folder / "m.pt")
    (folder / "plan.json").write_text(json.dumps(plan))
    out = folder / "-".join(plan.values())
    ckptmap.convert(
        folder / "m.pt", out, to="fsdp2-ranks", mesh="tp=2", tp_plan=str(folder / "plan.json")
    )
    return [
        torch.load(out / f"model_world_size_2_rank_{rank}.pt", weights_only=True)
        for rank in range(2)
    ]


@pytest.mark.ranks
def test_each_rank_holds_what_transformers_gives_it(tmp_path: Path) -> None:
    """A stack of experts is cut as its matrices are."""
    styles = sorted({*STYLES, *COMPUTING} - {*TORCHS, "sequence_parallel"})
    run_ranks("tests.ranks.transformers_tp_styles", 2, [str(tmp_path), ",".join(styles)])
    theirs = [torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(2)]
    for style in styles:
        for rank, state in enumerate(converted(tmp_path, {"mlp.x": style})):
            weights = state.get("model", state)
            for name, truth in theirs[rank][style].items():
                value = weights[f"mlp.x.{name}"]
                local = value.to_local() if isinstance(value, DTensor) else value
                assert torch.equal(local, truth), (style, rank, name)


def test_a_style_that_cuts_nothing_leaves_room_for_that_of_a_parameter(tmp_path: Path) -> None:
    """transformers' plans name the module of experts, and its parameters by themselves."""
    plan = {"mlp.x": "moe_tp_experts", "mlp.x.experts": "rowwise"}
    state = converted(tmp_path, plan)[1]
    weights = state.get("model", state)
    assert torch.equal(
        weights["mlp.x.experts"].to_local(), parameters()["experts"].detach()[..., 5:]
    )


@pytest.mark.parametrize("style", sorted(PACKED))
def test_packed_tensors_are_refused_with_a_line_that_works(style: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="a rank holds two runs of such a tensor") as caught:
        converted(tmp_path, {"mlp.x": style})
    line = str(caught.value.hint).partition("object like ")[2]
    converted(tmp_path, json.loads(line))


def test_the_styles_are_those_of_transformers() -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    known = {*STYLES, *COMPUTING, *PACKED} - {*TORCHS}
    others = set(ALL_PARALLEL_STYLES.keys()) - known
    assert not others & {"colwise", "rowwise"}
    assert known <= set(ALL_PARALLEL_STYLES.keys())
