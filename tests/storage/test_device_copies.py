"""A tensor is brought to a device through pinned memory, while the next bytes are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.storage import device_copies
from ckptmap.storage.device_copies import DEPTH
from ckptmap.storage.files import Files
from ckptmap.tensors import Box
from tests.support.late_device import one_late_a_thread
from tests.support.stand_in_device import DeviceModule, install, on_device


@pytest.fixture
def path(tmp_path: Path) -> Path:
    maker = torch.Generator().manual_seed(3)
    state = {f"{i}.weight": torch.randn(64, 48, generator=maker).bfloat16() for i in range(3)}
    save_file(state | {"scalar": torch.tensor(2.5)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_load_reads_the_next_while_this_is_copied(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors of a load go through the blocks of the thread; before, each had memory of its own,
    and reads and copies took turns."""
    with ckptmap.open(path) as checkpoint:
        wanted = {fqn: lazy.read() for fqn, lazy in checkpoint.items()}
    used, read = one_late_a_thread(monkeypatch), Files.read_into
    before: list[bool] = []

    def filled(*given: Any) -> None:
        before.extend(gone.waited for _, _, gone in used[0].uploads[-1:])
        read(*given)

    monkeypatch.setattr(Files, "read_into", filled)
    monkeypatch.setattr(device_copies, "BLOCK_NBYTES", 4096)
    with ckptmap.open(path) as checkpoint:
        reader = TensorReader(checkpoint.files, 1 << 20)
        for fqn, lazy in checkpoint.items():
            for dtype in (wanted[fqn].dtype, torch.float64):
                out = torch.zeros(lazy.shape, dtype=dtype)
                reader.dense(lazy, Box.whole(lazy.shape), out)
                assert torch.equal(out, wanted[fqn].to(dtype))
    (way,) = used
    assert before == [False] * (len(way.uploads) - 1), "no read waits for the copy before it"
    assert len({here.data_ptr() // 4096 for _, here, _ in way.uploads}) <= 2 * DEPTH
    assert sum(gone.waited for _, _, gone in way.uploads) >= len(way.uploads) - 2 * DEPTH
    assert reader.meter.peak_host_nbytes >= DEPTH * 4096


def test_a_box_of_a_strided_tensor_is_read_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_late_a_thread(monkeypatch)
    monkeypatch.setattr(device_copies, "BLOCK_NBYTES", 4096)
    with ckptmap.open(path) as checkpoint:
        lazy = checkpoint["1.weight"]
        whole = lazy.read()
        out = torch.zeros(48, 64, dtype=torch.bfloat16)
        TensorReader(checkpoint.files, 1 << 14).dense(lazy, Box.whole(lazy.shape), out.T)
        assert torch.equal(out.T, whole)
        assert torch.equal(lazy.read((3, 5), (7, 11)), whole[3:10, 5:16])
        assert lazy.read((3, 5), (0, 11)).shape == (0, 11)


def test_on_meta_nothing_is_staged(path: Path) -> None:
    with ckptmap.open(path) as checkpoint:
        assert checkpoint["0.weight"].read_part("", Box.whole((64, 48)), "meta").is_meta


def test_a_device_without_streams_is_filled_by_blocks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole tensor was brought to the host first, whatever `max_memory` said."""
    install(monkeypatch, DeviceModule(has_events=False))
    monkeypatch.setattr(device_copies, "BLOCK_NBYTES", 1024)
    filled: list[int] = []
    fill = device_copies.fill

    def spy(files: Any, stored: Any, box: Box, out: memoryview) -> None:
        filled.append(out.nbytes)
        fill(files, stored, box, out)

    monkeypatch.setattr(device_copies, "fill", spy)
    with ckptmap.open(path) as checkpoint:
        reader = TensorReader(checkpoint.files, 1 << 20)
        for fqn, lazy in checkpoint.items():
            wanted = lazy.read()
            filled.clear()
            out = on_device(torch.zeros(lazy.shape, dtype=wanted.dtype), "mps:0")
            reader.dense(lazy, Box.whole(lazy.shape), out)
            assert torch.equal(out.as_subclass(torch.Tensor), wanted), fqn
            assert sum(filled) == wanted.nbytes and max(filled) <= 1024
        empty = on_device(torch.zeros(0, 48, dtype=torch.bfloat16), "mps:0")
        reader.dense(checkpoint["0.weight"], Box((0, 0), (0, 48)), empty)
