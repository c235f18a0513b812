"""What a notebook shows of a checkpoint, a plan and reports: small, bounded, and names are text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptmap
from tests.operations.report.test_page import HOSTILE, Elements

BOUND = 40_000


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A checkpoint of 3,000 tensors under hostile names."""
    names = [*HOSTILE, *(f"{HOSTILE[0]}{'y' * (i % 7)}.{i}.w{i % 50}" for i in range(3000))]
    torch.save({f"{name}.{i}": torch.ones(2) for i, name in enumerate(names)}, tmp_path / "m.pt")
    return tmp_path / "m.pt"


def shown(value: object) -> str:
    """The text of a value's card, which is sound."""
    html: str = value._repr_html_()  # type: ignore[attr-defined]
    page = Elements(html)
    assert not {"script", "img", "b"} & {tag for tag, _ in page.elements}
    assert not any(
        key.startswith("on") or key == "style" for _, given in page.elements for key in given
    )
    assert len(html) < BOUND
    return page.text


def test_a_checkpoint_and_a_plan(hostile: Path) -> None:
    with ckptmap.open(hostile) as ckpt:
        text = shown(ckpt)
        assert "3,014 tensors" in text and str(hostile) in text and "</script>" in text
        plan = ckptmap.plan(ckpt, "full-bf16", drop=["new*"])
    text = shown(plan)
    assert "full-bf16" in text and "cast · 3,013" in text and "1: new\\x0aline.5" in text


def test_reports(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    torch.save(model.state_dict(), tmp_path / "m.pt")
    report = ckptmap.convert(tmp_path / "m.pt", tmp_path / "out.pt", to="full-nf4")
    text = shown(report)
    worst = max(report.errors, key=lambda name: report.errors[name])
    assert f"2: {report.errors[worst]:.3e} {worst}" in text and "quantize 2" in text
    loaded = ckptmap.load(tmp_path / "m.pt", model)
    assert "loaded 4 tensors" in shown(loaded)
    many = tuple(f"{name}{i}" for name in HOSTILE for i in range(900))
    text = shown(replace(loaded, missing=many))
    assert f"missing{len(many)}: {HOSTILE[0]}0" in text.replace("\n", "")
