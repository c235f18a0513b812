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


def test_where_nothing_is_left_some_names_and_the_nearest_are_shown(source: Path) -> None:
    with pytest.raises(PlanError, match="no tensor is left to convert of 9") as raised:
        planned(source, include="layers.{0..1}.*")
    assert raised.value.code == "CKM206"
    assert "did you mean '*layers.{0..1}.*', which matches 4?" in raised.value.hint
    assert "names here are such as model.layers.0.q.weight" in raised.value.hint


def test_a_pattern_that_matches_nothing_is_answered_with_the_nearest(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = ckptmap.plan(source, "full", exclude="lm_haed.weight").notes
    assert (
        "--exclude 'lm_haed.weight': nothing is named so; did you mean 'lm_head.weight'?" in notes
    )
    assert main(["inspect", str(source), "--keys", "layers.1.*"]) == 0
    assert "no tensor has such a name; did you mean '*layers.1.*'" in capsys.readouterr().out
