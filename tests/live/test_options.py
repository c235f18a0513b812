"""The keywords of `ckptmap.load`: stated once, known to type checkers, shown by `help()`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import ArgumentError
from ckptmap.live.options import LoadKeywords, LoadOptions


def test_keywords_and_options_agree() -> None:
    """A size is given as bytes or text, and stored as bytes; patterns in any sequence, and in a tuple."""
    of_call = get_type_hints(LoadKeywords)
    assert of_call.pop("max_memory") == int | str | None
    assert of_call.pop("rename") == Sequence[str] | Mapping[str, str]
    assert of_call.pop("drop") == Sequence[str]
    stored = {"max_memory": int | None, "rename": tuple[str, ...], "drop": tuple[str, ...]}
    assert of_call | stored == get_type_hints(LoadOptions)


def test_the_signature_has_every_option() -> None:
    parameters = inspect.signature(ckptmap.load).parameters
    assert list(parameters)[:4] == ["path", "model", "optimizer", "scheduler"]
    keywords = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert keywords == {field.name: field.default for field in fields(LoadOptions)}


def test_an_unknown_keyword_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    keywords: dict[str, Any] = {"strictly": True}
    with pytest.raises(
        ArgumentError, match=r"^strictly: is not an argument of load\(\), expected strict;"
    ) as caught:
        ckptmap.load(tmp_path, torch.nn.Linear(2, 2), **keywords)
    assert caught.value.code == "CKM516"


def built() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def test_what_is_no_optimizer_is_told_by_its_argument(tmp_path: Path) -> None:
    """A scheduler was taken for its optimizer, and was itself not saved; of a state dict the error named a class of
    ours."""
    model, optimizer, schedule = built()
    with pytest.raises(ArgumentError, match="optimizer: a StepLR is no torch"):
        ckptmap.save(tmp_path / "out", model, schedule)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"optimizer\['state'\]: a dict is no torch"):
        ckptmap.save(tmp_path / "out", model, optimizer.state_dict())
    assert not [*tmp_path.iterdir()]
    ckptmap.save(tmp_path / "out", model, {"all": optimizer}).wait()
    with pytest.raises(ArgumentError, match="optimizer: a StepLR is no torch"):
        ckptmap.load(tmp_path / "out", model, schedule)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["strict", "strict_encoding", "exact", "fix"])
def test_a_flag_of_load_is_no_text(name: str, tmp_path: Path) -> None:
    """exact="no" was exact."""
    model, _, _ = built()
    ckptmap.save(tmp_path / "out", model).wait()
    with pytest.raises(ArgumentError, match=f"{name}='no', expected True or False"):
        ckptmap.load(tmp_path / "out", model, **{name: "no"})


@pytest.mark.parametrize("name", ["overwrite", "background", "gradients"])
def test_a_flag_of_save_is_no_text(name: str, tmp_path: Path) -> None:
    keywords: Any = {name: "no"}
    with pytest.raises(ArgumentError, match=f"{name}='no', expected True or False"):
        ckptmap.save(tmp_path / "out", built()[0], **keywords)


def test_an_empty_path_is_refused_at_once() -> None:
    """It was the working directory, and refused in the background."""
    with pytest.raises(ArgumentError, match="path='', expected a path, not an empty one"):
        ckptmap.save("", built()[0])


@pytest.mark.parametrize("listed", [True, False])
def test_a_list_of_one_scheduler_is_the_scheduler(listed: bool, tmp_path: Path) -> None:
    """Its state was refused where one side has a list."""
    model, optimizer, schedule = built()
    schedule.step()
    saved: Any = [schedule] if listed else schedule
    ckptmap.save(tmp_path / "out", model, optimizer, saved).wait()
    other, theirs, again = built()
    ckptmap.load(tmp_path / "out", other, theirs, again if listed else [again], exact=True)
    assert again.state_dict() == schedule.state_dict() and again.last_epoch == 1
