"""Optimizer state as the library's own load_state_dict takes it: the next steps are those of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.errors import PlanError
from ckptmap.optim.lowbit_bnb import HIDDEN
from tests.corpus.ranks import run_alone
from tests.support.live_model import bits
from tests.support.resume_model import net, train
from tests.support.resume_optimizers import ALL, BNB, BNB_OTHERS, ROUNDING, same_state

KEYED = [("full", {"optimizer_keys": "index"}), ("trainer", {})]
"""Both outputs that a loader takes by index."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
    torch.set_num_threads(threads)


def stepped(name: str, folder: Path) -> tuple[Any, Any]:
    """After two steps, saved by torch (`run.pt`) and by ckptmap (`live`)."""
    dtype = torch.bfloat16 if name in ROUNDING else torch.float32
    model = net(0, dtype)
    optimizer = ALL[name](model.parameters())
    train(model, optimizer, 0, 2)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "run.pt"
    )
    ckptmap.save(folder / "live", model, optimizer).wait()
    return model, optimizer


@pytest.mark.parametrize("name", [*BNB, *BNB_OTHERS])
def test_bitsandbytes_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """From torch.save, from ckptmap.save, and by way of a sharded directory that has no class's name."""
    model, optimizer = stepped(name, tmp_path)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, optimizer, 2, 4)
    ckptmap.convert(tmp_path / "run.pt", tmp_path / "dcp", to="fsdp2", world_size=2)
    for source, (to, options) in zip(("run.pt", "live", "dcp"), [*KEYED, KEYED[0]], strict=True):
        plan = ckptmap.plan(tmp_path / source, to=to, **options)
        assert any("bitsandbytes' own load_state_dict" in note for note in plan.notes)
        out = tmp_path / f"{source}-{to}"
        plan.execute(out)
        assert ckptmap.verify(out, against=tmp_path / source).ok
        state = torch.load(out / "optimizer.pt" if to == "trainer" else out, weights_only=True)
        again = net(1)
        again.load_state_dict(start)
        theirs = ALL[name](again.parameters())
        theirs.load_state_dict(state.get("optimizer", state))
        train(again, theirs, 2, 4)
        assert not same_state(optimizer, theirs), (source, to)
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(bits(one.detach()), bits(two.detach())), (source, to)


@pytest.mark.parametrize("name", ["bnb8", "bnb32", "ao8", "ao4", "aofp8"])
def test_what_no_loader_could_take_is_refused(name: str, tmp_path: Path) -> None:
    """With a way on that works."""
    stepped(name, tmp_path)
    outputs = ["accelerate", "accelerate-full", *(["trainer", "full"] if name in ROUNDING else [])]
    for to in outputs:
        options = {"optimizer_keys": "index"} if to == "full" else {}
        with pytest.raises(PlanError, match=r"bitsandbytes cannot load it|pickled objects") as no:
            ckptmap.plan(tmp_path / "run.pt", to=to, **options)
        assert no.value.code == "CKM203"
        assert "ckptmap.load(path, model, optimizer)" in no.value.hint
    assert ckptmap.plan(tmp_path / "run.pt", to="trainer", optimizer="drop")
    again = net(1, torch.bfloat16 if name in ROUNDING else torch.float32)
    report = ckptmap.load(tmp_path / "run.pt", again, ALL[name](again.parameters()))
    assert report.state is not None and not report.state.initialised


def _in_bf16(state: dict[str, Any]) -> None:
    for name in ("state1", "state2"):
        state[HIDDEN][name] = state[HIDDEN][name].bfloat16()


def _with_amsgrad(state: dict[str, Any]) -> None:
    state["max_exp_avg_sq"] = state[HIDDEN]["state2"].clone()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_in_bf16, r"is dense bfloat16, expected float32 or 8-bit codes"),
        (_with_amsgrad, r"bitsandbytes has no optimizer with exp_avg, exp_avg_sq, max_exp_avg_sq"),
    ],
)
def test_state_that_bitsandbytes_could_not_go_on_with_is_refused(
    change: Any, problem: str, tmp_path: Path
) -> None:
    """As a script has changed it to save space, or by another algorithm; a live optimizer takes it."""
    stepped("bnb32", tmp_path)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    for state in saved["optimizer"]["state"].values():
        change(state)
    torch.save(saved, tmp_path / "changed.pt")
    with pytest.raises(PlanError, match=problem) as no:
        ckptmap.plan(tmp_path / "changed.pt", to="full", optimizer_keys="index")
    assert no.value.code == "CKM203" and "ckptmap.load(path, model, optimizer)" in no.value.hint
    again = net(1)
    optimizer = ALL["bnb32"](again.parameters())
    report = ckptmap.load(tmp_path / "changed.pt", again, optimizer)
    assert report.state is not None and not report.state.initialised


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_32bit"])
def test_trainer_goes_on_with_bitsandbytes(optim: str, tmp_path: Path) -> None:
    """Its own optimizer, made and loaded by Trainer, by way of an FSDP2 directory of three ranks."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    run_alone("tests.ranks.directories", ["run", str(whole), "", optim])
    step = str(whole / "checkpoint-2")
    ckptmap.convert(step, tmp_path / "dcp", to="fsdp2", world_size=3)
    ckptmap.convert(tmp_path / "dcp", tmp_path / "trainer", to="trainer", config_from=step)
    run_alone("tests.ranks.directories", ["resume", str(again), str(tmp_path / "trainer"), optim])
    found, expected = (json.loads((p / "losses.json").read_text()) for p in (again, whole))
    assert [entry["step"] for entry in expected] == [1, 2, 3, 4]
    assert found == expected
