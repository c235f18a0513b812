"""Quark's int8 in groups, as quark 0.13 exported Int8PerGroupSpec: codes and scales lie the other way than its rows'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import PlanError
from tests.support.bnb_cases import same

FILE = "model.safetensors"
WIDE, SQUARE = "layers.0.wide.weight", "layers.0.square.weight"


def written(folder: Path) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    state, values = {}, {}
    for fqn, (rows, width) in ((WIDE, (48, 96)), (SQUARE, (64, 64))):
        codes = torch.randint(-128, 128, (width, rows), generator=draw).to(torch.int8)
        scale = torch.rand(width // 32, rows, generator=draw).bfloat16()
        zero = torch.randint(-9, 9, (width // 32, rows), generator=draw).to(torch.int8)
        state |= {fqn: codes, f"{fqn}_scale": scale, f"{fqn}_zero_point": zero}
        wide, shift = (t.repeat_interleave(32, 0).float() for t in (scale, zero))
        values[fqn] = ((codes.float() - shift) * wide).bfloat16().t().contiguous()
    values["norm.weight"] = state["norm.weight"] = torch.ones(64).bfloat16()
    folder.mkdir()
    save_file(state, folder / FILE, {"format": "pt"})
    weight = {"dtype": "int8", "qscheme": "per_group", "group_size": 32, "symmetric": False}
    stated = {
        "quant_method": "quark", "export": {"pack_method": "reorder"},
        "global_quant_config": {"weight": weight}, "exclude": ["lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"quantization_config": stated}))
    return values


def test_decoded_wherever_they_go_and_given_back(tmp_path: Path) -> None:
    """Once a square weight came transposed, and another in a wrong shape."""
    values = written(tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "dcp", to="fsdp2", world_size=2)
    for path in ("in", "dcp"):
        with ckptmap.open(tmp_path / path) as ckpt:
            assert ckpt[WIDE].encoding == ckpt[SQUARE].encoding == "quark-int8"
            for fqn, wanted in values.items():
                same(ckpt[fqn].read(), wanted)
            same(ckpt[WIDE][5:41, 3:50], values[WIDE][5:41, 3:50])
    ckptmap.convert(tmp_path / "dcp", tmp_path / "dense", to="full-bf16")
    back = tmp_path / "back"
    ckptmap.convert(tmp_path / "dense", back, as_=str(tmp_path / "in"))
    before, after = (load_file(path / FILE) for path in (tmp_path / "in", back))
    for key, value in before.items():
        same(after[key], value)


def test_changed_values_are_refused(tmp_path: Path) -> None:
    values = written(tmp_path / "in")
    torch.save(values | {WIDE: values[WIDE] * 2}, tmp_path / "new.pt")
    with pytest.raises(PlanError, match="groups of int8 are read, and not made anew"):
        ckptmap.convert(tmp_path / "new.pt", tmp_path / "never", as_=str(tmp_path / "in"))
