"""Low-bit moments in files that torchao, bitsandbytes and torch write, and in damaged ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.errors import PlanError, SourceError
from ckptmap.optim.lowbit import KINDS, LowBit, LowBitCell, join_cells, read_record
from ckptmap.protocols import Refusal
from ckptmap.tensors import Box, TensorInfo
from tests.corpus.ranks import run_ranks
from tests.support.resume_model import net, train
from tests.support.resume_optimizers import ALL


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def decoded(state: dict[str, Any], key: str) -> Any:
    """By the library's own arithmetic."""
    if key in state:
        return state[key].dequantize() if hasattr(state[key], "codes") else state[key].float()
    from bitsandbytes.functional import dequantize_blockwise

    number = {"exp_avg": "1", "exp_avg_sq": "2"}[key]
    codes = state[f"state{number}"]
    if codes.dtype == torch.float32:
        return codes
    return dequantize_blockwise(
        codes, absmax=state[f"absmax{number}"], code=state[f"qmap{number}"], blocksize=256
    )


@pytest.mark.parametrize("name", ["ao8", "ao4", "aofp8", "bnb8"])
def test_read_from_torch_save(name: str, tmp_path: Path) -> None:
    """Bit for bit the library's own values, whole and in part."""
    model = net(0, torch.bfloat16)
    optimizer = ALL[name](model.parameters())
    train(model, optimizer, 0, 2)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt"
    )
    seen = set()
    with ckptmap.open(tmp_path / "a.pt") as ckpt:
        for fqn, param in model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                lazy = ckpt.optimizer[fqn][key]
                seen.add(lazy.encoding)
                want = decoded(optimizer.state[param], key)
                assert torch.equal(lazy.read().float(), want), (fqn, key)
                if param.dim() == 2:
                    part = lazy.read((5, 3), (17, 60)).float()
                    assert torch.equal(part, want[5:22, 3:63]), (fqn, key)
    assert len(seen - {"dense"}) == 1


def test_as_torch_saves_it_from_ranks(tmp_path: Path) -> None:
    run_ranks("tests.ranks.resume_foreign", 2, [str(tmp_path)], timeout=400)
    with ckptmap.open(tmp_path / "ao8") as ckpt:
        mixed = ckpt.optimizer["layers.1.up.weight"]["exp_avg"].encoding_
    assert isinstance(mixed, LowBit)
    assert [cell.quantized for cell in mixed.cells] == [True, False]


# ------------------------------------------------------------------------------- the encoding


def test_cells_that_are_one_run_are_none() -> None:
    rows = [LowBitCell(Box((row, 0), (2, 128)), True) for row in (2, 0, 4)]
    assert join_cells(rows, (6, 128), 256) == ()
    assert join_cells(rows, (6, 128), 512) != ()  # blocks begin inside a rank's rows
    columns = [LowBitCell(Box((0, column), (4, 64)), True) for column in (64, 0)]
    assert [cell.box.offsets for cell in join_cells(columns, (4, 128), 256)] == [(0, 0), (0, 64)]
    plain = [rows[1], LowBitCell(rows[0].box, False), rows[2]]
    assert [cell.quantized for cell in join_cells(plain, (6, 128), 256)] == [True, False, True]


@pytest.mark.parametrize("name", KINDS)
def test_sizes_of_parts(name: str) -> None:
    info = TensorInfo((6, 128), "float32")
    parts = LowBit(name, 256, True).parts(info)
    assert not isinstance(parts, Refusal)
    assert parts["codes"].numel == 768 // KINDS[name].packed and parts["scale"].numel == 3
    assert ("qmap" in parts) == (name != "adamfp8")
    cells = (LowBitCell(Box((0, 0), (4, 128)), True), LowBitCell(Box((4, 0), (2, 128)), False))
    mixed = LowBit(name, 256, True, cells, "bfloat16").parts(info)
    assert not isinstance(mixed, Refusal)
    assert mixed["plain"] == TensorInfo((256,), "bfloat16") and mixed["scale"].numel == 2
    assert isinstance(LowBit(name, 256, True).parts(TensorInfo((4,), "bfloat16")), Refusal)
    record = LowBit(name, 256, True, cells, "bfloat16").record(info)
    assert read_record("w", record) == (LowBit(name, 256, True, cells, "bfloat16"), info)
    with pytest.raises(PlanError, match="can be written by a live optimizer only, not into a file"):
        LowBit(name, 256, True).encoder(info, "cpu")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 3}, r"version 3, expected 1 or 2"),
        ({"block_size": 0}, "malformed record"),
        ({"shape": "4"}, "malformed record"),
        ({"signed": 1}, "malformed record"),
        ({"plain": "int64"}, "malformed record"),
        ({"cells": [[[0, 0], [9, 128], True]]}, "malformed cell"),
        ({"cells": [3]}, "malformed cell"),
    ],
)
def test_malformed_records(change: dict[str, Any], text: str) -> None:
    record = LowBit("adam8bit", 256, True).record(TensorInfo((4, 128), "float32"))
    with pytest.raises(SourceError, match=text) as refused:
        read_record("w", {**record, **change})
    assert refused.value.code == "CKM115"


def test_parts_that_do_not_add_up(tmp_path: Path) -> None:
    model = net(0, torch.bfloat16)
    optimizer = ALL["ao8"](model.parameters())
    train(model, optimizer, 0, 1)
    state = optimizer.state_dict()
    index = next(i for i, s in state["state"].items() if hasattr(s["exp_avg"], "codes"))
    moment = state["state"][index]["exp_avg"]
    moment.scale = moment.scale[:-1].clone()
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    with pytest.raises(SourceError, match=r"exp_avg: \d+ scales for \d+ elements") as refused:
        ckptmap.open(tmp_path / "a.pt")
    assert refused.value.code == "CKM115"
