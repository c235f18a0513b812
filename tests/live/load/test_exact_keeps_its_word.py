"""`exact=True` accepts nothing that is left out or changed: each list of a report that tells of such a thing
makes it refuse, and each field of a report is either such a list or known to be none."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import CkptmapError, LoadError
from ckptmap.live.load.continuation import refuse_changes
from ckptmap.live.model import rng_state
from ckptmap.live.model.load_report import NO_CHANGES, RESTORED, LoadReport, StateReport
from ckptmap.live.optimizer.state_loader import StateLoader
from ckptmap.live.save import collect, exchange
from tests.support.forked import CODE, run_forked
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
    "a buffer that the checkpoint lacks": (lambda: of(Larger()), "1 weight missing"),
    "a buffer of another shape": (lambda: of(OtherTable()), "1 weight not loaded"),
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


# ------------------------------------------------------------------------------- what a file cannot show


def test_a_manifest_that_was_deleted(saved: Path, tmp_path: Path) -> None:
    """Nothing proves the rest then: the report says so, and `exact` refuses."""
    path = tmp_path / "copy"
    shutil.copytree(saved, path)
    (path / "ckptmap.manifest.json").unlink()
    report = ckptmap.load(path, *made())
    assert [text for text in report.inexact if "ckptmap.manifest.json is missing" in text]
    with pytest.raises(LoadError, match=r"ckptmap\.manifest\.json is missing") as refused:
        ckptmap.load(path, *made(), exact=True)
    assert refused.value.code == "CKM507"
    assert "manifest" not in str(ckptmap.load(saved, *made(), exact=True))


FLAGS: dict[str, tuple[Callable[[Any], object], Any, Any, str]] = {
    "deterministic": (
        torch.use_deterministic_algorithms, True, False, "deterministic algorithms=True",
    ),
    "attention": (torch.backends.cuda.enable_flash_sdp, False, True, "flash_sdp=False"),
    "matmul": (torch.set_float32_matmul_precision, "high", "highest", "was highest, is high"),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_settings_of_torch_are_compared(name: str, saved: Path) -> None:
    """Those of the process by which a step has other bits."""
    change, other, default, text = FLAGS[name]
    model, optimizer = made()
    change(other)
    try:
        with pytest.raises(LoadError, match=text):
            ckptmap.load(saved, model, optimizer, exact=True)
    finally:
        change(default)
    ckptmap.load(saved, model, optimizer, exact=True)


def test_precision_that_is_set_by_backend(saved: Path, tmp_path: Path) -> None:
    """torch has no one word for it then, and raises where it is asked: a save and a load go on."""
    script = f"""
import torch, ckptmap
from tests.live.load.test_exact_keeps_its_word import made
torch.backends.cuda.matmul.fp32_precision = "tf32"
ckptmap.save({str(tmp_path / "out")!r}, *made(), step=1).wait()
ckptmap.load({str(tmp_path / "out")!r}, *made(), exact=True)
print(ckptmap.load({str(saved)!r}, *made()).inexact)
"""
    done = run_forked(CODE, script)
    assert done.returncode == 0, done.stderr
    assert "float32 matmul precision: was highest, is cuda tf32, mkldnn none" in done.stdout


def test_modules_in_evaluation_are_told_of(saved: Path) -> None:
    """The loop sets the mode, so that this is no reason to refuse."""
    model, optimizer = made()
    assert ckptmap.load(saved, model, optimizer, exact=True).notes == ()
    model.eval()
    report = ckptmap.load(saved, model, optimizer, exact=True)
    assert "0 of 2 modules were in evaluation mode when it was saved, 2 are now" in str(report)


ODD: dict[str, Any] = {
    "a text": "x", "a number": -1, "a list": [1, [2]], "a dict": {"a": {"b": []}}, "bytes": b"z", "nothing": None,
}  # fmt: skip
SETTINGS = [
    ("compile",), ("gradients",), ("gradients", "mixed precision"), ("optimizer",), ("optimizer", "flags"),
    ("optimizer", "several"), ("optimizer", "rounding"), ("layout",), ("placements",), ("plain_forms",),
    ("buffers",), ("modules_in_evaluation",), ("base",), ("models",), ("world_size",),
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_settings_that_a_file_has_in_another_form(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what a file says: a load goes on or refuses, and never fails otherwise."""
    put = exchange.put
    for key in SETTINGS:

        def damaged(held: Any, path: Any, value: Any, *, key: Any = key) -> None:
            if path == ("extra", "ckptmap"):
                inner = value = dict(value)
                for part in key[:-1]:
                    inner[part] = inner = dict(inner[part])
                inner[key[-1]] = ODD[odd]
            put(held, path, value)

        monkeypatch.setattr(exchange, "put", damaged)
        try:
            ckptmap.save(tmp_path / "out", *made(), overwrite=True, background=False).wait()
        except CkptmapError:
            continue
        for exact in (False, True):
            with contextlib.suppress(CkptmapError):
                ckptmap.load(tmp_path / "out", *made(), exact=exact)


@pytest.mark.parametrize("odd", [odd for odd in ODD if odd != "a dict"])
def test_values_that_a_file_has_in_another_form(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random streams, and keys of an optimizer that are no parameters: `exact` never takes them."""
    put = collect.put

    def with_key() -> tuple[nn.Module, Any]:
        model, optimizer = made()
        optimizer.state["rounds"] = {"done": 7}
        return model, optimizer

    for name in ("rng", "optimizer_keys"):

        def damaged(
            held: Any, path: Any, value: Any, private: Any = False, *, at: Any = name
        ) -> None:
            put(held, path, ODD[odd] if path == ("extra", at, "rank0") else value, private)

        monkeypatch.setattr(collect, "put", damaged)
        ckptmap.save(tmp_path / "out", *with_key(), overwrite=True, background=False).wait()
        if odd == "nothing" and name == "optimizer_keys":
            continue  # as of a run that had none
        with pytest.raises(LoadError):
            ckptmap.load(tmp_path / "out", *with_key(), exact=True)


def test_a_device_whose_random_stream_is_not_recorded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of before, or a device of which torch gives out no stream."""
    ckptmap.save(tmp_path / "a", nn.Linear(2, 2)).wait()
    assert ckptmap.load(tmp_path / "a", nn.Linear(2, 2), exact=True).inexact == ()
    seen: list[tuple[list[str], list[str]]] = []

    def not_recorded(state: dict[str, object], kinds: list[str]) -> list[str]:
        seen.append((sorted(state), [*kinds]))
        return ["xpu"]

    monkeypatch.setattr(rng_state, "not_recorded", not_recorded)
    with pytest.raises(LoadError, match="no random stream of xpu is recorded") as refused:
        ckptmap.load(tmp_path / "a", nn.Linear(2, 2), exact=True)
    assert refused.value.code == "CKM507"
    assert seen == [(["cpu", "numpy", "python"], ["cpu"])]
