"""What the README promises of keys that a setup has no place for: each is listed as dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckptmap_cli.main import main


@pytest.mark.slow
def test_a_key_without_a_place_is_listed_as_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "best_acc": 0.9,
    }
    source = tmp_path / "train.pt"
    torch.save(saved, source)

    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "hf"]) == 0

    printed = capsys.readouterr().out
    for key in ("optimizer", "epoch", "best_acc"):
        assert f"dropped: {key}: hf has no place for " in printed
