"""What modules save by `get_extra_state` stays in the model's state dict, where torch expects it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ckptmap


class Kept(nn.Module):
    """A linear layer that keeps a value beside it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.lin, self.value = nn.Linear(4, 4), value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


VALUES: tuple[Any, ...] = (
    {"a": 1, "b": [1, 2.5], "c": None}, {"n": 2, "deep": {"t": torch.arange(3.0)}},
    torch.arange(5), torch.empty(0, dtype=torch.uint8), b"bytes", 3.5,
)  # fmt: skip


def model(values: tuple[Any, ...] = VALUES) -> nn.Sequential:
    return nn.Sequential(*map(Kept, values))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and {*a} == {*b} and all(same(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def plain(path: Path) -> None:
    torch.save(model().state_dict(), path)


def rooted(path: Path) -> None:
    torch.save({"model": model().state_dict(), "step": 3}, path)


def compiled(path: Path) -> None:
    torch.save(nn.ModuleDict({"module": model()}).state_dict(), path)


def sharded(path: Path) -> None:
    save({"model": model().state_dict()}, checkpoint_id=path)


@pytest.mark.parametrize("writer", [plain, rooted, compiled, sharded])
@pytest.mark.parametrize("to", ["full", "ddp", "fsdp2"])
def test_torch_loads_it_back_strictly(
    writer: Callable[[Path], None], to: str, tmp_path: Path
) -> None:
    writer(tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to=to)
    fresh: nn.Module = model(tuple(map(_blank, VALUES)))
    if to == "fsdp2":
        state = fresh.state_dict()
        load({"model": state} if writer is rooted else state, checkpoint_id=tmp_path / "out")
        fresh.load_state_dict(state)
    else:
        found = torch.load(tmp_path / "out", weights_only=True)
        around = nn.ModuleDict({"module": fresh}) if to == "ddp" else fresh
        around.load_state_dict(found["model"] if writer is rooted else found)
    values = [module.value for module in fresh.children()]
    assert all(map(same, VALUES, values)), values
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "in").ok
    assert ckptmap.diff(tmp_path / "in", tmp_path / "out", values=True).equal


def test_it_is_compared_by_plain_key(tmp_path: Path) -> None:
    """However the model was wrapped, and whatever dict it lies in."""
    plain(tmp_path / "in")
    others = ({"a": 1, "b": [1, 2.5, 3], "c": 0}, {"n": 2, "deep": {"t": torch.ones(3)}})
    wrapped = nn.ModuleDict({"module": model((*others, *VALUES[2:]))}).state_dict()
    torch.save({"model": wrapped}, tmp_path / "other")
    report = ckptmap.diff(tmp_path / "in", tmp_path / "other", values=True)
    assert {*report.settings} == {"0._extra_state.b.2", "0._extra_state.c"}
    assert any("1._extra_state.deep.t" in name for name in report.changed)
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="ddp")
    problems = ckptmap.verify(tmp_path / "out", against=tmp_path / "other").problems
    assert "0._extra_state.c: None, the source has 0" in problems


def _blank(value: Any) -> Any:
    """Of the same form, as the state dict to load into must be."""
    if isinstance(value, dict):
        return {key: _blank(inner) for key, inner in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def test_it_is_loaded_into_a_live_model_and_another_models_stays_where_it_is(
    tmp_path: Path,
) -> None:
    ours = {"model": model().state_dict(), "ema": {"0._extra_state": {"n": 9}}}
    torch.save(ours, tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="full")
    found = torch.load(tmp_path / "out", weights_only=True)
    assert found["ema"] == {"0._extra_state": {"n": 9}}
    assert found["model"]["0._extra_state"] == VALUES[0]
    fresh = model((None,) * len(VALUES))
    ckptmap.load(tmp_path / "in", fresh)
    assert all(map(same, VALUES, [module.value for module in fresh.children()]))


def test_extra_state_that_safetensors_cannot_hold_is_listed_as_dropped(tmp_path: Path) -> None:
    plain(tmp_path / "in")
    dropped = ckptmap.plan(tmp_path / "in", "hf").dropped
    assert {"0._extra_state.a", "1._extra_state.deep.t", "5._extra_state"} <= {*dropped}


@pytest.mark.parametrize("to", ["full", "fsdp2"])
def test_bytes_of_a_buffer_go_along(to: str, tmp_path: Path) -> None:
    """As Transformer Engine keeps the scales of FP8; torch's loader takes such values unsafely."""
    kept = io.BytesIO(b"scales")
    kept.seek(2)
    torch.save(model((kept,)).state_dict(), tmp_path / "in")
    plan = ckptmap.plan(tmp_path / "in", to)
    assert "0._extra_state is io.BytesIO: torch.load takes that with weights_only=False" in str(
        plan
    )
    plan.execute(tmp_path / "out")
    fresh = model((None,))
    if to == "fsdp2":
        state = {**fresh.state_dict(), "0._extra_state": io.BytesIO()}
        load(state, checkpoint_id=tmp_path / "out")
    else:
        state = torch.load(tmp_path / "out", weights_only=False)
    fresh.load_state_dict(state)
    assert (fresh[0].value.getvalue(), fresh[0].value.tell()) == (b"scales", 2)
    fresh[0].value = None
    ckptmap.load(tmp_path / "out", fresh)
    assert (fresh[0].value.getvalue(), fresh[0].value.tell()) == (b"scales", 2)
