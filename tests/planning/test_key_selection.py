"""Which names the options choose: patterns as `inspect` prints them, and what is said where none fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckptmap_cli.main import main

import ckptmap
from ckptmap.errors import PlanError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selection") / "m.pt"
    names = [f"model.layers.{n}.{w}.weight" for n in range(4) for w in ("q", "up")]
    torch.save({name: torch.ones(2, 3) for name in [*names, "lm_head.weight"]}, path)
    return path


def planned(source: Path, **options: str) -> list[str]:
    return list(ckptmap.plan(source, "full", **options).steps.fqns)  # type: ignore[arg-type]


def test_a_line_of_inspect_is_a_pattern(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(source)]) == 0
    line = next(word for word in capsys.readouterr().out.split() if word.endswith("up.weight"))
    assert line == "model.layers.{0..3}.up.weight"
    assert planned(source, include=line) == [f"model.layers.{n}.up.weight" for n in range(4)]
    few = "model.layers.{0..2}.*"
    assert len(planned(source, include=few)) == 6 and len(planned(source, exclude=few)) == 3
    assert len(planned(source, drop=few)) == 3
    assert main(["inspect", str(source), "--keys", few]) == 0
    assert "model.layers.{0..2}.q.weight" in capsys.readouterr().out


class Unknown:
    """A class that ckptmap does not know."""


def pickled(path: Path, **entries: object) -> Path:
    torch.save(entries, path)
    return path


def test_an_object_that_is_not_written_is_left_out_with_a_note(tmp_path: Path) -> None:
    weights = {"a.weight": torch.ones(2)}
    hyper = {"net": torch.nn.Linear(2, 2), "lr": 0.1, "args": Unknown()}
    path = pickled(tmp_path / "x.pt", state_dict=weights, hyper_parameters=hyper, optimizer={
        "state": {0: {"exp_avg": torch.ones(2)}},
        "param_groups": [{"params": [0], "lr": 0.1, "schedule": Unknown()}],
    })  # fmt: skip
    plan = ckptmap.plan(path, "hf")
    assert not plan.unresolved
    (note,) = [note for note in plan.notes if note.startswith("left out, and not read: ")]
    for key in ("hyper_parameters.net", "hyper_parameters.args"):
        assert plan.dropped[key] == "hf has no place for what is not a weight"
        assert f"{key} (an object of unknown class " in note
    assert plan.dropped["optimizer"] == "hf has no place for optimizer state"
    kept = [item.key for item in ckptmap.plan(path, "full").unresolved]
    assert {"optimizer.param_groups.0.schedule", "hyper_parameters.net"} <= {*kept}
    without = [item.key for item in ckptmap.plan(path, "full", optimizer="drop").unresolved]
    assert [key for key in without if key.startswith("optimizer")] == []


@pytest.mark.parametrize("name", ["model", "state_dict", "generator"])
def test_a_module_that_is_an_entry_of_its_own_is_refused(name: str, tmp_path: Path) -> None:
    """It may be the model itself, pickled whole beside its average: what is left is none of it."""
    path = pickled(tmp_path / "x.pt", **{name: torch.nn.Linear(2, 2)}, ema={"w": torch.ones(2)})
    (item,) = ckptmap.plan(path, "hf").unresolved
    assert item.key == name and f"--drop {name}" in item.hint


@pytest.mark.parametrize("odd", [Unknown(), torch.nn.Linear(2, 2), torch.ones(2, device="meta")])
@pytest.mark.parametrize("root", ["", "model"])
def test_an_object_beside_weights_may_be_one(odd: object, root: str, tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "head": odd}
    path = pickled(tmp_path / "y.pt", **({root: state} if root else state))
    (item,) = ckptmap.plan(path, "hf").unresolved
    assert item.key == ".".join(filter(None, [root, "head"]))


def test_where_nothing_is_left_some_names_and_the_nearest_are_shown(source: Path) -> None:
    with pytest.raises(PlanError, match="no tensor is left to convert of 9") as raised:
        planned(source, include="layers.{0..1}.*")
    assert raised.value.code == "CKM206"
    assert "did you mean '*layers.{0..1}.*', which matches 4?" in raised.value.hint
    assert "names here are such as model.layers.0.q.weight" in raised.value.hint


def test_a_pattern_that_matches_nothing_is_answered_with_the_nearest(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        PlanError, match=r"--exclude 'lm_haed\.weight': nothing in .* is named so"
    ) as at:
        ckptmap.plan(source, "full", exclude="lm_haed.weight")
    assert at.value.code == "CKM206" and "did you mean 'lm_head.weight'?" in at.value.hint
    many = [f"x{number}.*" for number in range(5)]
    with pytest.raises(PlanError, match=r"--drop 'x0.\*', .*'x2.\*' and 2 more: nothing") as at:
        ckptmap.plan(source, "full", drop=many)
    assert "names here are such as model.layers.0.q.weight" in at.value.hint
    assert main(["inspect", str(source), "--keys", "layers.1.*"]) == 0
    assert "no tensor has such a name; did you mean '*layers.1.*'" in capsys.readouterr().out


def test_a_pattern_of_what_is_left_out_by_another_option_has_done_its_work(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    path = pickled(tmp_path / "x.pt", **state, run=Unknown())
    for drop in (["optimizer"], ["optimizer.state.*"], ["epoch"], ["run"], ["bias", "b*"]):
        ckptmap.plan(path, "hf", drop=drop)
    for drop in (["optimizer.bias"], ["optimizer"], ["epoch"], ["run"]):
        ckptmap.plan(path, "full", drop=drop, keep_layout=False)
    with pytest.raises(PlanError, match="nothing in") as at:  # state goes by its weight, whole
        ckptmap.plan(path, "full", drop="optimizer.bias.exp_avg")
    assert "did you mean 'optimizer.bias'" in at.value.hint
    with pytest.raises(PlanError, match="--drop 'rnu'") as at:
        ckptmap.plan(path, "full", drop="rnu")
    assert "did you mean 'run'?" in at.value.hint
