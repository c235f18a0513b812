"""Live tensors are read where they are."""

from __future__ import annotations

import pytest
import torch

from ckptmap.errors import RunError
from ckptmap.live.state_dict.memory_blocks import LiveReader, LiveStored, Memory
from ckptmap.protocols import Group, Refusal
from ckptmap.quantization.nf4.encoding import NF4
from ckptmap.storage.files import Files
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, TensorInfo
from tests.support.dispatched import NeverWaits

INFO = TensorInfo((64, 128), "bfloat16")


def live(device: str) -> tuple[LazyTensor, Memory, Files]:
    """An NF4 tensor whose parts are live, each in two blocks of rows where it has rows."""
    memory, files = Memory(), Files()
    parts = NF4(64, 32).parts(INFO)
    assert not isinstance(parts, Refusal)
    stored = {}
    for name, info in parts.items():
        values = torch.ones(info.shape, dtype=getattr(torch, info.dtype), device=device)
        half = info.shape[0] // 2 if info.numel > 16 else 0
        cuts = [(0, half), (half, info.shape[0])] if half else [(0, -1)]
        for start, stop in cuts:
            whole = Box.whole(info.shape)
            box = Box((start,), (stop - start,)) if half else whole
            memory.add_own((name,), box, values[start:stop] if half else values)
        stored[name] = LiveStored(info, (name,), memory, None)
    return LazyTensor("w", Group("w", INFO, NF4(64, 32), stored), files), memory, files


def test_a_quantized_tensor_is_decoded_on_its_device_without_a_way_through_the_host() -> None:
    lazy, memory, files = live("meta")
    out = torch.empty(40, 128, dtype=torch.bfloat16, device="meta")
    with NeverWaits():
        lazy.read_into(Box((8, 0), (40, 128)), out)
        LiveReader(files, 1 << 20, memory).decoded(lazy, Box((8, 0), (40, 128)), out)
    assert lazy.read_part("quantized_data", Box((7,), (0,)), "meta").shape == (0,)


def test_its_values_are_those_of_its_blocks() -> None:
    lazy, memory, _ = live("cpu")
    cut = Box((2000,), (90,))
    assert lazy.read_part("quantized_data", cut).tolist() == [1] * 90
    memory.add_received(("quantized_data",), cut, torch.full((90,), 5, dtype=torch.uint8))
    assert lazy.read_part("quantized_data", cut).tolist() == [5] * 90
    assert lazy.read((3, 5), (7, 11)).shape == (7, 11)
    lazy.parts["quantized_data"] = LiveStored(TensorInfo((4096,), "uint8"), ("q",), Memory(), None)  # type: ignore[index]
    with pytest.raises(RunError, match="q: this rank has 0 of the 4096 elements"):
        lazy.read()
