"""The keywords of `ckptmap.load`: stated once, known to type checkers, shown by `help()`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

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
