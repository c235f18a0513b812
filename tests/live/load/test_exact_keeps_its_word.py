"""`exact=True` accepts nothing that is left out or changed: each list of a report that tells of such a thing
makes it refuse, and each field of a report is either such a list or known to be none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.live.load.continuation import refuse_changes
from ckptmap.live.model.load_report import NO_CHANGES, RESTORED, LoadReport, StateReport
from ckptmap.live.optimizer.state_loader import StateLoader
from tests.support.resume_optimizers import step_at_random

WHOLE = LoadReport(loaded=("weight",), state=StateReport(loaded=("weight.exp_avg",)))
CHANGES = [field.name for field in fields(LoadReport) if field.name not in NO_CHANGES]
OF_STATE = [field.name for field in fields(StateReport) if field.name not in RESTORED]


def test_the_lists_are_known() -> None:
    """A new field of a report is refused until somebody says that it tells of no change."""
    names = {field.name for field in fields(LoadReport)}
    assert names >= {*NO_CHANGES} and {f.name for f in fields(StateReport)} >= {*RESTORED}
    assert {*CHANGES} == {
        "missing", "unexpected", "mismatched", "cast", "decoded", "quantized", "left_on_meta", "left",
    }  # fmt: skip
    assert {*OF_STATE} == {"cast", "recoded", "derived", "initialised", "left"}
    refuse_changes(WHOLE, "somewhere")


@pytest.mark.parametrize("name", CHANGES)
def test_each_list_of_weights_is_refused(name: str) -> None:
    report = replace(WHOLE, **{name: ("weight",)})
    assert report.changes == (f"{name}: weight",)
    with pytest.raises(LoadError, match=f"somewhere: .*{name}: weight") as refused:
        refuse_changes(report, "somewhere")
    assert refused.value.code == "CKM507"


@pytest.mark.parametrize("name", OF_STATE)
def test_each_list_of_the_optimizer_is_refused(name: str) -> None:
    report = replace(WHOLE, state=replace(WHOLE.state, **{name: ("weight.exp_avg",)}))  # type: ignore[type-var]
    with pytest.raises(LoadError, match=rf"optimizer, {name}: weight\.exp_avg"):
        refuse_changes(report, "somewhere")


class Counted(nn.Linear):
    """A module with extra state."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("table", torch.ones(2))

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"calls": 3}


def made(
    model: nn.Module | None = None, build: Any = torch.optim.AdamW, **options: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Counted(), nn.Linear(4, 4)) if model is None else model
    optimizer = build(model.parameters(), **options)
    step_at_random(model, optimizer)
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact") / "out"
    model, optimizer = made()
    ckptmap.save(path, model, optimizer, step=1).wait()
    return path


class Reading(nn.Linear):
    """As Counted without extra state."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("table", torch.ones(2))


class Larger(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("more", torch.ones(2))


class OtherTable(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(3)


def of(first: nn.Module, last: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any]:
    return made(nn.Sequential(first, last or nn.Linear(4, 4)), **options)


SCENES: dict[str, tuple[Callable[[], Any], str]] = {
    "extra state that nobody takes": (lambda: of(Reading()), "nobody takes"),
    "a buffer that the checkpoint lacks": (lambda: of(Larger()), "1 weights missing"),
    "a buffer of another shape": (lambda: of(OtherTable()), "1 weights not loaded"),
    "weights that the model lacks": (
        lambda: of(Counted(), nn.Linear(4, 4, bias=False)),
        "how tensors are cut",
    ),
    "weights of another dtype": (lambda: of(Counted(), nn.Linear(4, 4).double()), "weights cast"),
    "a variant of the optimizer": (lambda: made(amsgrad=True), "max_exp_avg_sq: derived|amsgrad"),
    "an optimizer of less": (
        lambda: made(build=torch.optim.SGD),
        "class: was AdamW, is SGD",
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_is_refused_before_anything_changes(name: str, saved: Path) -> None:
    """Also with strict=False, which lets names and shapes differ."""
    build, reason = SCENES[name]
    model, optimizer = build()
    before = [value.clone() for value in model.state_dict().values() if torch.is_tensor(value)]
    with pytest.raises(LoadError, match=reason) as refused:
        ckptmap.load(saved, model, optimizer, exact=True, strict=False)
    assert refused.value.code == "CKM507"
    after = [value for value in model.state_dict().values() if torch.is_tensor(value)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    ckptmap.load(saved, *build(), strict=False)


def test_what_only_the_load_shows_is_refused_after_it(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last check does not rely on the first: an entry that a loader leaves out is told of."""
    ckptmap.load(saved, *made(), exact=True)

    read = StateLoader.read

    def leaves_one(self: StateLoader, reader: Any) -> Callable[[], None]:
        install = read(self, reader)
        self.notes.left.append(f"{self.owner.fqn}.extra")
        return install

    monkeypatch.setattr(StateLoader, "read", leaves_one)
    with pytest.raises(
        LoadError, match=r"was not exact.*optimizer, left: 0\.weight\.extra"
    ) as late:
        ckptmap.load(saved, *made(), exact=True)
    assert late.value.code == "CKM507" and "are loaded all the same" in str(late.value)
    assert ckptmap.load(saved, *made()).changes
