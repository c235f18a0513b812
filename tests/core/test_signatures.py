"""Public calls that take options as `**keywords` show each of them with its default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import ckptmap
from ckptmap.errors import PlanError
from ckptmap.live.options import LoadOptions
from ckptmap.planning.options import ALIASES, MergeKeywords, Options, RunOptions

RUN = {field.name for field in fields(RunOptions)}
WRITTEN = {field.name for field in fields(Options)}
CALLS: dict[str, tuple[Callable[..., object], set[str]]] = {
    "plan": (ckptmap.plan, WRITTEN | {"source", "options"}),
    "convert": (ckptmap.convert, WRITTEN | RUN | {"src", "dst", "ranks"}),
    "push": (
        ckptmap.push,
        WRITTEN - {"to"}
        | {"src", "repo", "to", "private", "revision", "pr", "base_model", "work"}
        | {"device", "max_memory", "low_disk", "progress"},
    ),
    "merge": (
        ckptmap.merge,
        {*MergeKeywords.__annotations__} - {*ALIASES}
        | {"base", "adapter", "dst", "to", "force"}
        | {"adapter_config", "leave"},
    ),
    "execute": (ckptmap.Plan.execute, RUN | {"self", "dst"}),
    "load": (
        ckptmap.load,
        {field.name for field in fields(LoadOptions)} | {"path", "model", "optimizer", "scheduler"},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_signature_has_every_keyword(name: str) -> None:
    call, names = CALLS[name]
    parameters = inspect.signature(call).parameters
    assert set(parameters) == names
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())


def test_a_signature_has_the_defaults() -> None:
    parameters = inspect.signature(ckptmap.convert).parameters
    shown = {name: parameters[name].default for name in ("device", "digest", "sync", "max_memory")}
    assert shown == {"device": "cpu", "digest": "xxh3", "sync": True, "max_memory": None}
    assert parameters["dst"].default is inspect.Parameter.empty
    assert parameters["to"].default == ""  # as_= is given in its place


def test_neither_to_nor_as_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    for call in (
        lambda: ckptmap.plan(tmp_path / "model.pt"),
        lambda: ckptmap.convert(tmp_path / "model.pt", tmp_path / "out"),
    ):
        with pytest.raises(PlanError, match="--to '' and no --as: expected one of them"):
            call()
    assert not (tmp_path / "out").exists()
