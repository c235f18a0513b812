"""A FIFO in place of a file of the source is refused; opening one would wait for its writer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import SourceError


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    ["dcp/.metadata", "dcp/__0_0.distcp", "one/model.pt", "hf/model.safetensors", "ranks/model_world_size_2_rank_1.pt"],
)  # fmt: skip
def test_refused_at_once(name: str, tmp_path: Path) -> None:
    folder = (tmp_path / name).parent
    folder.mkdir()
    weights = {"a.weight": torch.ones(8, 4)}
    if folder.name == "dcp":
        dcp.save(weights, checkpoint_id=folder)
    elif folder.name == "hf":
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    else:
        torch.save(weights, folder / "model.pt")
        torch.save(weights, folder / "model_world_size_2_rank_0.pt")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(SourceError):
        ckptmap.convert(
            tmp_path / name if folder.name == "one" else folder, tmp_path / "out", "full"
        )
    assert not (tmp_path / "out").exists()
