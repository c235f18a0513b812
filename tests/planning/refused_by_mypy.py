"""Calls that a type checker refuses. mypy checks this file, and an ignore that it does not need is an
error: so each line shows that mypy does see the mistake. Nothing here is run.
"""

from __future__ import annotations

from pathlib import Path

import torch

import ckptmap


def wrong_names(plan: ckptmap.Plan, model: torch.nn.Module) -> None:
    ckptmap.open("a", wrold_size=3)  # type: ignore[call-arg]
    ckptmap.diff("a", "b", wrold_size=3)  # type: ignore[call-arg]
    ckptmap.verify("a", wrold_size=3)  # type: ignore[call-arg]
    ckptmap.load("a", model, wrold_size=3)  # type: ignore[call-arg]
    ckptmap.save("a", model, wrold_size=3)  # type: ignore[call-arg]
    ckptmap.pull("a", "b", wrold_size=3)  # type: ignore[call-arg]
    ckptmap.translate({}, wrold_size=3)  # type: ignore[call-arg]
    ckptmap.hooks.install(model, wrold_size=3)  # type: ignore[call-arg]
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
    ckptmap.open("a", root=3)  # type: ignore[arg-type]
    ckptmap.verify("a", threads="2")  # type: ignore[arg-type]


def right(plan: ckptmap.Plan, model: torch.nn.Module) -> None:
    ckptmap.plan("a", "hf", drop="x.*", include=["a", "b"], like=Path("c"), exact_scales=True)
    ckptmap.convert("a", "b", "hf", wrap="ddp,compile", param_order=[["a"]], digest="none")
    ckptmap.convert("a", "b", "hf", max_memory="64MiB", max_shard_nbytes=1 << 30)
    ckptmap.merge(
        "a", "b", "c", "hf", exclude=("a",), progress=lambda phase, done, total, name: None
    )
    ckptmap.convert("a", "b", "hf", max_shard_size="2GB", quantize="a.*", keep=["b"])
    ckptmap.load("a", model, max_memory="64MiB")
    ckptmap.translate({}, max_memory="64MiB")
    ckptmap.push("a", "org/name", max_memory="64MiB")
    plan.execute("b", max_memory=1 << 20)
