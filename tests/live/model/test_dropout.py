"""Rates of dropout belong to the settings of a run, and at another world size its random numbers are others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.live.model import dropout


def model(rate: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate), nn.MultiheadAttention(4, 1, rate))


def test_modules_that_drop() -> None:
    assert dropout.names(model(0.5)) == ["1", "2"] and dropout.names(model(0.0)) == []
    assert dropout.described(model(0.5)) == "0.5 in 2" and dropout.described(model(0.0)) == "none"


def test_another_rate_is_refused(tmp_path: Path) -> None:
    """It is in no state dict, and `exact` said nothing."""
    saved = model(0.5)
    ckptmap.save(tmp_path / "c", saved, torch.optim.SGD(saved.parameters(), lr=0.1)).wait()
    for rate in (0.5, 0.25):
        again = model(rate)
        optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
        if rate == 0.5:
            assert not ckptmap.load(tmp_path / "c", again, optimizer, exact=True).inexact
            continue
        with pytest.raises(LoadError, match=r"dropout: was 0\.5 in 2, is 0\.25 in 2"):
            ckptmap.load(tmp_path / "c", again, optimizer, exact=True)
