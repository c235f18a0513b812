"""Digests of replicas: the checksum that a device computes, and what a save does with it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ckptmap.live.optimizer.local_state import LocalShard, LocalTensor
from ckptmap.live.save import replica_digests
from ckptmap.live.save.assign_writers import offers_of
from ckptmap.live.save.replica_digests import CHUNK_NUMEL, checksum, differ, digests_of, weights
from ckptmap.tensors import Box, TensorInfo
from tests.support.stand_in_device import DeviceModule, OnDevice, install, on_device

CPU = torch.device("cpu")


def h(k: int) -> int:
    """Return h(k) of the docstring, in Python's own integers."""
    y = k * 0x9E3779B97F4A7C15 % 2**64
    signed = y - 2**64 if y >> 63 else y
    return (y ^ (signed >> 32) % 2**64) * 0xBF58476D1CE4E5B9 % 2**64


def by_hand(data: bytes) -> int:
    words = np.frombuffer(data + bytes(-len(data) % 4), np.int32).tolist()
    total = 0
    for chunk, start in enumerate(range(0, len(words), CHUNK_NUMEL)):
        part = enumerate(words[start : start + CHUNK_NUMEL])
        total += (h(CHUNK_NUMEL + chunk + 1) | 1) * sum((h(j + 1) | 1) * x for j, x in part)
    total %= 2**64
    return total - 2**64 if total >> 63 else total


@cache
def first_weights() -> torch.Tensor:
    return weights(0, CHUNK_NUMEL, CPU)


def of(values: torch.Tensor) -> int:
    return int(checksum(values, first_weights()))


@given(st.binary(max_size=40))
def test_the_formula(data: bytes) -> None:
    values = torch.tensor(list(data), dtype=torch.uint8)
    assert of(values) == by_hand(data)


def test_the_formula_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_digests, "CHUNK_NUMEL", 16)
    monkeypatch.setitem(globals(), "CHUNK_NUMEL", 16)
    values = torch.randint(-(2**31), 2**31 - 1, (16 * 5 + 3,), dtype=torch.int32)
    assert int(checksum(values, weights(0, 16, CPU))) == by_hand(values.numpy().tobytes())


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int8", "uint8", "int64", "bool",
     "complex64"],
)  # fmt: skip
def test_bytes_in_row_major_order_count(dtype: str) -> None:
    """Of any dtype, shape, stride and offset; a single flipped bit is seen."""
    kind = getattr(torch, dtype)
    for shape in ((), (0,), (1,), (3, 5)):
        values = torch.randint(0, 2, shape, dtype=torch.uint8).to(kind)
        data = values.contiguous().view(-1).view(torch.uint8).clone()
        assert of(values) == by_hand(data.numpy().tobytes()), shape
        spaced = torch.zeros((*shape, 3), dtype=kind)
        spaced[..., 1].copy_(values)
        assert of(spaced[..., 1]) == of(values), shape
        for at in range(0, data.numel(), 7):
            data[at] ^= 4
            assert of(data) != of(values), (shape, at)
            data[at] ^= 4


def test_words_that_change_places_are_seen() -> None:
    values = torch.arange(1000, dtype=torch.int32)
    swapped = values.clone()
    swapped[3], swapped[900] = values[900], values[3]
    assert of(values) != of(swapped)


def test_a_conjugate_view_has_the_checksum_of_its_values() -> None:
    values = torch.randn(4, dtype=torch.complex64)
    assert of(values.conj()) == of(values.conj().resolve_conj()) != of(values)


class Waits(TorchDispatchMode):
    """Raises where the host would wait for the device, and counts the other calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        assert func is not torch.ops.aten._local_scalar_dense.default
        made = func(*args, **(kwargs or {}))
        assert made.device.type == "meta", func
        return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_the_device_computes_it_and_nobody_waits(dtype: torch.dtype) -> None:
    values = torch.empty(3 * CHUNK_NUMEL + 1, 2, dtype=dtype, device="meta")
    with Waits() as seen:
        total = checksum(values, weights(0, CHUNK_NUMEL, values.device))
    assert total.shape == () and total.dtype == torch.int64
    assert seen.calls < 60


# ------------------------------------------------------------------------------- of what a rank holds


def holding(name: str, values: torch.Tensor) -> LocalTensor:
    info = TensorInfo(tuple(values.shape), "float32")
    piece = LocalShard(Box.whole(info.shape), values)
    return LocalTensor(("model", name), info, [piece], None, checked=True)


def test_tensors_of_a_device_are_compared_after_one_copy_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large ones too: those over 64 KiB had no digest."""
    lists = []
    tolist = torch.Tensor.tolist

    def spy(values: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            lists.append(values.numel())
            return tolist(values)

    monkeypatch.setattr(replica_digests, "weights", lambda a, n, device: weights(a, n, CPU))
    monkeypatch.setattr(torch.Tensor, "tolist", spy)
    large = torch.randn(200, 200)
    drifted = large.clone()
    drifted[7, 9] += 1e-3
    first, same, other = (
        offers_of([holding("w", on_device(one, "cuda:0")), holding("b", on_device(one[0], "cuda:0"))])
        for one in (large, large.clone(), drifted)
    )  # fmt: skip
    assert lists == [2, 2, 2]
    assert not differ(first[0].digest, same[0].digest)
    assert differ(first[0].digest, other[0].digest)
    assert not differ(first[1].digest, other[1].digest)
    assert first[0].digest == (f"sum64 {of(large)}",)


def test_digests_of_the_cpu_and_of_a_device_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_digests, "weights", lambda a, n, device: weights(a, n, CPU))
    box = Box.whole((3,))
    here, there, other = (
        [LocalShard(box, one)]
        for one in (torch.ones(3), on_device(torch.ones(3), "cuda:0"), torch.zeros(3))
    )
    on_cpu, on_gpu, changed = digests_of([here, there, other])
    assert on_cpu[0].startswith("xxh3 ") and on_gpu[0].startswith("sum64 ")
    assert not differ(on_cpu, on_gpu) and differ(on_cpu, changed)
    assert differ(on_cpu, on_cpu * 2) and not differ((), on_cpu)


def test_the_cpu_computes_it_where_the_device_has_no_memory_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same number, so that it is compared with those of ranks that had memory."""
    module: Any = DeviceModule()
    emptied: list[int] = []
    module.empty_cache = lambda: emptied.append(1)
    install(monkeypatch, module)
    values = torch.randn(300, 7)
    held = LocalShard(Box.whole((300, 7)), on_device(values, "cuda:0"))
    monkeypatch.setattr(replica_digests, "weights", lambda a, n, device: weights(a, n, CPU))
    wanted = digests_of([[held]])

    def on_cpu(given: torch.Tensor, of_chunk: torch.Tensor) -> torch.Tensor:
        if given.device.type != "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return checksum(given, of_chunk)

    monkeypatch.setattr(replica_digests, "checksum", on_cpu)
    monkeypatch.setattr(OnDevice, "cpu", lambda self: values.clone())
    assert digests_of([[held]]) == wanted and wanted[0][0].startswith("sum64 ")
    assert emptied == [1]
