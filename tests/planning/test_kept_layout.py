"""--keep-layout: a torch.save file keeps its dicts, and only names change; else the plan says what moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.errors import PlanError

KEPT = ["epoch", "arch", "state_dict", "best_acc1", "optimizer", "rng", "history"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What an example script of PyTorch saves of a model under DataParallel (imagenet/main.py)."""
    model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"epoch": 3, "arch": "net", "state_dict": model.state_dict(), "best_acc1": 0.5}
    extra = {"rng": torch.get_rng_state(), "history": [1, {"loss": 2.0}]}
    torch.save({**state, "optimizer": optimizer.state_dict(), **extra}, tmp_path / "run.pt")
    return tmp_path / "run.pt"


def test_only_names_change(run: Path, tmp_path: Path) -> None:
    """It is the default."""
    out = tmp_path / "out.pt"
    ckptmap.convert(run, out, to="full")
    before, after = (torch.load(path, weights_only=False) for path in (run, out))
    assert before.keys() == after.keys()
    assert list(after["state_dict"]) == ["0.weight", "0.bias"]
    for key in ("epoch", "arch", "best_acc1", "history"):
        assert after[key] == before[key]
    assert torch.equal(after["rng"], before["rng"])
    assert list(after["optimizer"]["state"]) == [0, 1]
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    model.load_state_dict(after["state_dict"])
    torch.optim.AdamW(model.parameters()).load_state_dict(after["optimizer"])
    assert ckptmap.verify(out, against=run).ok
    ckptmap.convert(out, tmp_path / "back.pt", to="ddp", keep_layout=True)
    back = torch.load(tmp_path / "back.pt", weights_only=False)
    assert back["state_dict"].keys() == before["state_dict"].keys()
    assert back["state_dict"]["module.0.weight"].equal(before["state_dict"]["module.0.weight"])


def test_an_entry_called_extra_stays(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "extra": {"a": 1}, "b": 2}, tmp_path / "a.pt")
    ckptmap.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="full")
    after = torch.load(tmp_path / "b.pt", weights_only=False)
    assert (after["extra"], after["b"], list(after["model"])) == ({"a": 1}, 2, ["w"])


def test_an_extra_inside_extra_stays(tmp_path: Path) -> None:
    """Readers leave out the outer one."""
    tree = {"model": {"w": torch.ones(2)}, "extra": {"step": 2, "extra": {"step": 1}}}
    torch.save(tree, tmp_path / "a.pt")
    ckptmap.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="full")
    assert torch.load(tmp_path / "b.pt", weights_only=True)["extra"] == tree["extra"]


@pytest.mark.parametrize(
    "weights",
    [
        {"shadow_params": [torch.ones(2), torch.zeros(3)]},
        {"model": {0: torch.ones(2), 1: torch.zeros(3)}},
        {"model": {"head": torch.ones(2), "body": {"w": torch.zeros(3)}}},
    ],
    ids=["list", "integers", "dicts"],
)
def test_weights_in_lists_and_dicts_stay_there(weights: dict[str, Any], tmp_path: Path) -> None:
    """torch-ema and diffusers' EMAModel save a list, and refuse a dict of the same tensors."""
    torch.save({**weights, "decay": 0.9}, tmp_path / "a.pt")
    ckptmap.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="full")
    after = torch.load(tmp_path / "b.pt", weights_only=True)
    assert repr(after) == repr({**weights, "decay": 0.9})
    assert ckptmap.verify(tmp_path / "b.pt", against=tmp_path / "a.pt").ok
    assert ckptmap.diff(tmp_path / "a.pt", tmp_path / "b.pt", values=True).equal


def test_otherwise_the_plan_says_what_moves(run: Path) -> None:
    plan = ckptmap.plan(run, "full", keep_layout=False)
    assert plan.moved.startswith(
        "state_dict -> model, epoch -> extra.epoch, arch -> extra.arch and"
    )
    assert "moved: state_dict -> model" in str(plan) and "--keep-layout" in plan.moved
    assert "--keep-layout" not in ckptmap.plan(run, "fsdp2").moved
    assert not ckptmap.plan(run, "full", keep_layout=True).moved
    kept = ckptmap.plan(run, "full")
    assert kept.digest != plan.digest and not kept.moved
    assert "with --no-keep-layout: state_dict -> model, epoch -> extra.epoch" in str(kept)


@pytest.mark.parametrize(
    ("to", "options", "keys"),
    [
        ("full", {"root": "net"}, ["net", "optimizer", "extra"]),
        ("full", {"optimizer_keys": "fqn"}, ["model", "optimizer", "extra"]),
        ("full", {"keep_layout": False}, ["model", "optimizer", "extra"]),
        ("full-bf16", {}, ["model", "optimizer", "extra"]),
        ("full-bf16", {"keep_layout": True}, KEPT),
        ("full", {"add_prefix": "net"}, KEPT),
        ("compiled", {"drop": "rng"}, [key for key in KEPT if key != "rng"]),
    ],
)
def test_what_keeps_the_layout(
    to: str, options: dict[str, Any], keys: list[str], run: Path, tmp_path: Path
) -> None:
    ckptmap.convert(run, tmp_path / "out.pt", to=to, **options)
    assert {*torch.load(tmp_path / "out.pt", weights_only=False)} == {*keys}


def test_of_several_models_the_named_one_is_a_model_of_its_own(tmp_path: Path) -> None:
    """The dicts of the source would say again that there are several."""
    gan = {"G": torch.nn.Linear(2, 2).state_dict(), "D": torch.nn.Linear(3, 3).state_dict()}
    torch.save(gan, tmp_path / "gan.pt")
    ckptmap.convert(tmp_path / "gan.pt", tmp_path / "out.pt", to="full", source_root="G")
    assert {*torch.load(tmp_path / "out.pt", weights_only=True)} == {"model", "extra"}
    assert list(ckptmap.open(tmp_path / "out.pt")) == ["weight", "bias"]


def test_without_a_root_nothing_extra_stands_among_weights(run: Path, tmp_path: Path) -> None:
    """But for what a reader would take for a weight: a tensor."""
    out = tmp_path / "out.pt"
    ckptmap.convert(run, out, to="full", root="")
    after = torch.load(out, weights_only=False)
    assert (after["epoch"], after["history"]) == (3, [1, {"loss": 2.0}])
    assert list(after["extra"]) == ["rng"] and "0.weight" in after
    assert ckptmap.verify(out, against=run).ok
    opened = ckptmap.open(out)
    assert list(opened) == ["0.weight", "0.bias"] and opened.extra["epoch"] == 3
    dropped = tmp_path / "dropped.pt"
    ckptmap.convert(run, dropped, to="full", root="", drop="rng")
    assert "extra" not in torch.load(dropped, weights_only=False)


@pytest.mark.parametrize(
    ("to", "options", "problem"),
    [
        ("hf", {}, "the source is torch-zip, the output hf"),
        ("fsdp2", {}, "the output fsdp2"),
        ("full", {"root": "net"}, "--root 'net' names another dict"),
    ],
)
def test_where_a_layout_cannot_be_kept(
    to: str, options: dict[str, Any], problem: str, run: Path
) -> None:
    with pytest.raises(PlanError, match=problem) as raised:
        ckptmap.plan(run, to, keep_layout=True, **options)
    assert raised.value.code == "CKM205"
