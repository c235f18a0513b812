"""The sample that a conversion measures its error on: never more values than it may read at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap.checkpoint.compare_tensors import sampled_error
from ckptmap.storage.lazy_tensor import LazyTensor

NUMEL = 64


@pytest.mark.parametrize("shape", [(3, 7, 100), (2, 200), (500,), (1, 1, 65), (300, 5), (4, 4)])
def test_no_read_is_larger_than_the_sample(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole matrix of stacked experts was read for each run, whatever its size."""
    values = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
    save_file({"w": values}, tmp_path / "a.safetensors")
    save_file({"w": values * 1.5}, tmp_path / "b.safetensors")
    boxes = []
    read = LazyTensor.read

    def noted(self: LazyTensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        boxes.append((offsets, sizes))
        return read(self, offsets, sizes)

    monkeypatch.setattr(LazyTensor, "read", noted)
    with (
        ckptmap.open(tmp_path / "a.safetensors") as a,
        ckptmap.open(tmp_path / "b.safetensors") as b,
    ):
        assert sampled_error(a["w"], b["w"], NUMEL) == (0.5, 0)
    sizes = [torch.Size(sizes).numel() for _, sizes in boxes]
    assert len(boxes) >= 2 and max(sizes) <= NUMEL // 4
    reached = {offsets for offsets, _ in boxes}
    assert (0,) * len(shape) in reached and len(reached) > 1, "the sample is spread over the tensor"
