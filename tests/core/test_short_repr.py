"""`repr` of what the public calls return: useful, and never more than a screen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptmap
from ckptmap.core.short_repr import short
from ckptmap.live.model.load_report import LoadReport, StateReport
from ckptmap.operations.diff import DiffReport
from ckptmap.operations.hub.pull import PullReport
from ckptmap.operations.hub.push import PushReport
from ckptmap.operations.merge import MergeReport, Survival
from ckptmap.operations.verify import VerifyReport

NAMES = tuple(f"model.layers.{i}.mlp.up_proj.weight\x1b[2J" for i in range(10_000))
BY_NAME = dict.fromkeys(NAMES, "because\nof that " * 100)
SCREEN = 24 * 80
MANY: list[object] = [
    LoadReport(NAMES, NAMES, NAMES, state=StateReport(NAMES, settings=NAMES), extra={"a": NAMES}),
    StateReport(NAMES, settings=NAMES),
    VerifyReport("out", 3, 4, ("structure",), NAMES, dict.fromkeys(NAMES, 0.1), NAMES),
    DiffReport("a", "b", 3, NAMES, NAMES, BY_NAME, True, BY_NAME),
    MergeReport("out", 3, 4, 5, 0.1, {"bytes": 3}, 0, BY_NAME, BY_NAME, NAMES,
                survival=dict.fromkeys(NAMES, Survival(0.1, 0.2))),
    PushReport("o/r", "main", "c", "url", 1, 2, 3, 0.1, True, None, NAMES, NAMES),
    PullReport("hf://a/b", "x", 3, 4, 0.1, NAMES),
]  # fmt: skip


@pytest.mark.parametrize("report", MANY, ids=lambda report: type(report).__name__)
def test_a_report_of_many_names_fits_a_screen(report: object) -> None:
    text = repr(report)
    assert text.startswith(f"{type(report).__name__}(")
    assert "+9,997" in text and NAMES[0].encode("unicode_escape").decode() in text
    assert len(text) < SCREEN
    assert text.isprintable()


def test_fields_that_are_empty_are_left_out() -> None:
    assert repr(LoadReport(("a", "b"), step=3)) == "LoadReport(loaded=('a', 'b'), step=3)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (("a",), "('a')"),
        ([1, 2, 3, 4], "[1, 2, 3, +1]"),
        ({"a": 1}, "{'a': 1}"),
        ((), "()"),
        ("x" * 200, "'" + "x" * 76 + "..."),
        (b"x" * 200, "b'" + "x" * 75 + "..."),
        (torch.zeros(2, 2), "tensor([[0., 0.], [0., 0.]])"),
    ],
)
def test_short(value: object, text: str) -> None:
    assert short(value) == text


def test_of_a_checkpoint_a_plan_and_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would be cut
    path = Path("m.pt")
    torch.save({f"layers.{i}.weight": torch.zeros(8, 8) for i in range(500)}, path)
    with ckptmap.open(path) as ckpt:
        assert repr(ckpt) == f"Checkpoint({str(path)!r}, 500 tensors, full)"
        assert (
            repr(ckpt["layers.3.weight"]) == "LazyTensor('layers.3.weight', float32[8, 8], dense)"
        )
        plan = ckptmap.plan(ckpt, "full-bf16")
    assert repr(plan).startswith(f"Plan({str(path)!r} -> full-bf16, 500 tensors, 125.0 KiB -> ")
    assert repr(plan).endswith(", cast 500)")
