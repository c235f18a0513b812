"""Calls that a type checker refuses. mypy checks this file, and an ignore that it does not need is an
error: so each line shows that mypy does see the mistake. Nothing here is run.
"""

from __future__ import annotations

from pathlib import Path

import ckptmap


def wrong_names(plan: ckptmap.Plan) -> None:
    ckptmap.plan("a", "hf", wrold_size=3)  # type: ignore[call-arg]
    ckptmap.convert("a", "b", "hf", wrold_size=3)  # type: ignore[call-arg]
    ckptmap.merge("a", "b", "c", wrold_size=3)  # type: ignore[call-arg]
    ckptmap.merge("a", "b", "c", names="hf")  # type: ignore[call-arg]
    ckptmap.push("a", "org/name", to="hf", wrold_size=3)  # type: ignore[call-arg]
    plan.execute("b", world_size=3)  # type: ignore[call-arg]


def wrong_types(plan: ckptmap.Plan) -> None:
    ckptmap.plan("a", "hf", world_size="3")  # type: ignore[arg-type]
    ckptmap.convert("a", "b", "hf", threads="all")  # type: ignore[arg-type]
    ckptmap.merge("a", "b", "c", max_memory=[64])  # type: ignore[arg-type]
    plan.execute("b", sync=None)  # type: ignore[arg-type]


def right(plan: ckptmap.Plan) -> None:
    ckptmap.plan("a", "hf", drop="x.*", include=["a", "b"], like=Path("c"), exact_scales=True)
    ckptmap.convert("a", "b", "hf", wrap="ddp,compile", param_order=[["a"]], digest="none")
    ckptmap.convert("a", "b", "hf", max_memory="64MiB", max_shard_nbytes=1 << 30)
    ckptmap.merge("a", "b", "c", "hf", exclude=("a",), progress=lambda nbytes, key: None)
    plan.execute("b", max_memory=1 << 20)
