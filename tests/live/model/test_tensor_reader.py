"""A load whose device runs out of memory goes on with smaller buffers, or says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import RunError
from ckptmap.execution.smaller_feeds import MOST_HALVINGS
from ckptmap.live.model import tensor_reader
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.storage import device_copies

MEMORY = 1 << 18
"""Bytes of buffers: 65,536 float32 values at a time."""


def model(seed: int, dtype: torch.dtype) -> tuple[nn.Sequential, torch.optim.AdamW]:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(256, 320), nn.Linear(320, 8)).to(dtype)
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.ones(2, 256, dtype=dtype)).sum().backward()
    optimizer.step()
    return made, optimizer


def state(made: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [value for one in optimizer.state.values() for value in one.values()]
    return [*made.state_dict().values(), *kept]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load") / "saved"
    ckptmap.save(path, *model(0, torch.float32), background=False)
    ckptmap.convert(path, path.with_name("int8"), to="full-int8", optimizer="drop")
    return path


def running_out(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int, int], bool]) -> list[int]:
    """Let a read run out of memory where `fails(number of the read, its elements)`; return the elements.

    Random streams, of bytes, are not counted: they are read to host memory, whole, before any tensor.
    """
    asked: list[int] = []
    fill = device_copies.fill_tensor

    def filled(files: Any, stored: Any, box: Any, out: torch.Tensor) -> None:
        if out.dtype == torch.uint8:
            fill(files, stored, box, out)
            return
        asked.append(out.numel())
        if fails(len(asked), out.numel()):
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 8.00 MiB.\nand more"
            )
        fill(files, stored, box, out)

    monkeypatch.setattr(device_copies, "fill_tensor", filled)
    return asked


def test_casts_go_on_with_smaller_buffers(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, found = model(1, torch.bfloat16), model(2, torch.bfloat16)
    expected = ckptmap.load(saved, *wanted, max_memory=MEMORY)
    asked = running_out(monkeypatch, lambda number, numel: numel > 3000)
    report = ckptmap.load(saved, *found, max_memory=MEMORY)
    assert all(torch.equal(a, b) for a, b in zip(state(*wanted), state(*found), strict=True))
    assert max(asked) == MEMORY // 4 and asked.count(MEMORY // 4) == 1, (
        "the rest begins with what fits"
    )
    assert (report.loaded, report.state) == (expected.loaded, expected.state)


def test_decoding_goes_on_with_smaller_chunks(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, found = model(1, torch.float32)[0], model(2, torch.float32)[0]
    source, decode = saved.with_name("int8"), TensorReader.decoded
    ckptmap.load(source, wanted)
    sizes: list[int] = []

    def decoded(self: TensorReader, *given: Any) -> None:
        sizes.append(tensor_reader.smaller(1 << 20))
        if sizes[-1] > 1 << 17:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        decode(self, *given)

    monkeypatch.setattr(TensorReader, "decoded", decoded)
    ckptmap.load(source, found)
    assert all(
        torch.equal(a, b) for a, b in zip(wanted.parameters(), found.parameters(), strict=True)
    )
    assert sizes[:4] == [1 << 20, 1 << 19, 1 << 18, 1 << 17]


@pytest.mark.parametrize("at", range(5, 15, 3))
def test_state_that_is_read_again_is_reported_once(
    at: int, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, found = model(1, torch.float32), model(2, torch.float32)
    expected = ckptmap.load(saved, *wanted)
    running_out(monkeypatch, lambda number, numel: number == at)
    report = ckptmap.load(saved, *found)
    assert all(torch.equal(a, b) for a, b in zip(state(*wanted), state(*found), strict=True))
    assert (report.loaded, report.state) == (expected.loaded, expected.state)


def test_too_little_memory_is_an_error_that_names_the_option(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = running_out(monkeypatch, lambda number, numel: True)
    with pytest.raises(
        RunError, match=r"^0\.weight: cpu ran out of memory, with 4096 elements"
    ) as caught:
        ckptmap.load(saved, model(1, torch.float32)[0])
    assert caught.value.code == "CKM313" and "max_memory" in caught.value.hint
    assert "Tried to allocate 8.00 MiB.; the model is half loaded, 0 of 4" in caught.value.message
    assert len(asked) == MOST_HALVINGS + 1
