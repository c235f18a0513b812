"""A caller who has set a default device gets the same: every tensor of ckptmap's own says where it is.

The default is meta, whose tensors have no values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.optim import lowbit_codes
from ckptmap.quantization.blockwise import chunks, fourbit
from ckptmap.quantization.nf4 import kernels

FORMS = ("nf4", "bnb-nf4-dq", "int8", "float8", "bnb-int8")
KEY = "model.layers.0.mlp.up_proj"


@pytest.fixture(autouse=True)
def no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that an earlier test has made would hide where they are made."""
    for module, name in ((chunks, "_constants"), (fourbit, "_bucketizers"), (kernels, "_lookups"),
                         (lowbit_codes, "_bucketizers")):  # fmt: skip
        monkeypatch.setattr(module, name, {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save({f"{KEY}.weight": torch.randn(64, 256).bfloat16()}, tmp_path / "dense")
    (tmp_path / "adapter").mkdir()
    halves = {"A": torch.randn(4, 256), "B": torch.randn(64, 4)}
    adapter = {f"base_model.model.{KEY}.lora_{half}.weight": w for half, w in halves.items()}
    torch.save(adapter, tmp_path / "adapter" / "adapter_model.bin")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


def conversions(folder: Path) -> Iterator[Callable[[], Any]]:
    dense = folder / "dense"
    for form in FORMS:
        there = folder / form
        yield lambda there=there, form=form: ckptmap.convert(dense, there, to=f"full-{form}")
        yield lambda there=there: ckptmap.verify(there, against=dense)
        yield lambda there=there, form=form: ckptmap.convert(
            there, folder / f"{form} back", to="full-fp16"
        )
        yield lambda there=there, form=form: ckptmap.convert(
            there, folder / f"{form} nf4", to="full-nf4"
        )
        yield lambda there=there: ckptmap.diff(there, dense)
    yield lambda: ckptmap.merge(
        dense, folder / "adapter", folder / "merged", "full-nf4", force=True
    )
    yield lambda: ckptmap.verify(folder / "merged", against=dense, adapter=folder / "adapter")


def test_conversions_do_not_depend_on_it(folder: Path) -> None:
    for job in conversions(folder):
        with torch.device("meta"):
            done = job()
        assert getattr(done, "ok", True), str(done)
    for form in FORMS:
        ckptmap.convert(folder / "dense", folder / "again", to=f"full-{form}", overwrite=True)
        assert (folder / "again").read_bytes() == (folder / form).read_bytes()
        with torch.device("meta"), ckptmap.open(folder / form) as opened:
            assert opened[f"{KEY}.weight"].read().device.type == "cpu"


def test_live_models_do_not_depend_on_it(folder: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.device("meta"):
        ckptmap.save(folder / "saved", model, optimizer, step=1).wait()
        for param in model.parameters():
            param.data.zero_()
        report = ckptmap.load(folder / "saved", model, optimizer, exact=True)
        weight = {f"{KEY}.weight": wanted["weight"].repeat(8, 32).bfloat16()}
        made = ckptmap.translate(weight, encoding="nf4")
        same = ckptmap.translate(made, encoding="dense")
    assert report.step == 1
    assert all(torch.equal(wanted[name], value) for name, value in model.state_dict().items())
    assert {value.device.type for value in (*made.values(), *same.values())} == {"cpu"}


def test_the_default_is_as_it_was() -> None:
    with torch.device("meta"):
        with tensors_on_cpu():
            assert torch.empty(1).device.type == "cpu"
        assert torch.empty(1).device.type == "meta"
