"""Codes found by thresholds are those of comparing all of them, and moments those of torchao's `copy_`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptmap.optim import lowbit_codes
from ckptmap.quantization.blockwise import fourbit
from ckptmap.quantization.blockwise.bucketize import Bucketizer, FineBucketizer
from ckptmap.quantization.nf4 import kernels as nf4_codes
from tests.conftest import Device
from tests.support.dispatched import Kernels, NeverWaits

EDGES = {
    "bitsandbytes nf4": lambda: fourbit._bucketizer("nf4", "cpu")._thresholds,
    "bitsandbytes fp4": lambda: fourbit._bucketizer("fp4", "cpu")._thresholds,
    "torchao nf4": lambda: nf4_codes._thresholds(),
}


def around(limits: torch.Tensor) -> torch.Tensor:
    """Every threshold, the 6 floats around it, what lies between two, the ends, 0, and a NaN."""
    near = limits.view(torch.int32).unsqueeze(1) + torch.arange(-3, 4, dtype=torch.int32)
    ends = torch.tensor([-1.0, 1.0, -0.0, 0.0, 1.0 + 2**-23, 2**-16, -(2**-16), 1e-42, torch.nan])
    values = torch.cat([near.view(torch.float32).flatten(), torch.linspace(-1, 1, 4096), ends])
    return values[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(1))]


def counted(counter: Bucketizer | FineBucketizer, values: torch.Tensor) -> torch.Tensor:
    out = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
    counter.bucketize(values.clone(), torch.empty_like(values), out)
    return out


@pytest.mark.parametrize("count", [1, 7, 8, 4097])
@pytest.mark.parametrize("name", EDGES)
def test_a_table_and_few_comparisons_are_all_comparisons(name: str, count: int) -> None:
    limits = EDGES[name]()
    codes = torch.randperm(16, generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    values = around(limits)[:count]
    wanted = codes[(values.nan_to_num(0.0).unsqueeze(1) >= limits).sum(1)]
    assert torch.equal(counted(Bucketizer(limits, codes), values), wanted)


@pytest.mark.parametrize("signed", [True, False])
def test_many_thresholds(signed: bool) -> None:
    limits = lowbit_codes.thresholds(state("OptimState8bit", signed, (256,)).qmap)
    assert limits is not None
    values = around(limits).nan_to_num(0.5)
    wanted = (values.unsqueeze(1) >= limits).sum(1)
    assert torch.equal(counted(FineBucketizer(limits), values), wanted.to(torch.uint8))
    crowded = limits[:1].view(torch.int32) + torch.arange(3, dtype=torch.int32)  # no table can
    limits = crowded.view(torch.float32).sort().values
    wanted = (values.unsqueeze(1) >= limits).sum(1)
    assert torch.equal(counted(FineBucketizer(limits), values), wanted.to(torch.uint8))


# ------------------------------------------------------------------------------- moments


def state(kind: str, signed: bool, shape: tuple[int, ...]) -> Any:
    pytest.importorskip("torchao")
    from torchao.optim import subclass_4bit, subclass_8bit, subclass_fp8

    for module in (subclass_8bit, subclass_4bit, subclass_fp8):
        made: Any = getattr(module, kind, None)
        if made is not None:
            return made.zeros(shape, **({} if kind == "OptimStateFp8" else {"signed": signed}))
    raise AssertionError(kind)


def moments(signed: bool, shape: tuple[int, ...]) -> torch.Tensor:
    """Blocks of zeros, of tiny values and of large ones, over many decades."""
    maker = torch.Generator().manual_seed(3)
    values = torch.randn(shape, generator=maker) * torch.randn(shape, generator=maker).mul(4).exp()
    flat = values.view(-1, 256)
    flat[0], flat[1] = 0, 1e-14
    flat[2] *= 1e30
    flat[3] = flat[3].clamp(-1e-3, 1e-3) + 0.25
    return values if signed else values.square_().clamp_(max=1e38)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("kind", ["OptimState8bit", "OptimState4bit", "OptimStateFp8"])
def test_bit_equal_to_torchao(kind: str, signed: bool) -> None:
    """More than one chunk of them, the last short."""
    shape = (1100, 256)
    values, theirs, mine = moments(signed, shape), *(state(kind, signed, shape) for _ in "12")
    theirs.copy_(values)
    qmap = getattr(mine, "qmap", None)
    assert lowbit_codes.encode(values, mine.block_size, qmap, mine.codes, mine.scale)
    assert torch.equal(mine.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    assert torch.equal(mine.scale, theirs.scale)
    decoded = lowbit_codes.decode(mine.codes, mine.block_size, qmap, mine.scale)
    assert torch.equal(decoded.view(shape), theirs.dequantize())


def test_a_table_without_thresholds_is_left_to_its_library() -> None:
    table = torch.tensor([0.0, torch.inf] * 128)
    codes, scale = torch.zeros(256, dtype=torch.uint8), torch.zeros(1)
    assert not lowbit_codes.encode(torch.ones(256), 256, table, codes, scale)
    assert not codes.any() and not scale.any()


def test_a_device_that_holds_no_values_is_never_asked(device: Device) -> None:
    limits = nf4_codes._thresholds()
    with device.mode():
        there = torch.linspace(-1, 1, 15, device=device.name)
        codes = torch.arange(16, dtype=torch.uint8, device=device.name)
        values = torch.ones(100, device=device.name)
        for counter in (Bucketizer(there, codes), FineBucketizer(there)):
            assert counted(counter, values).device.type == device.name
    if not device.fake:
        found = Bucketizer(limits.to(device.name), codes), around(limits)
        assert torch.equal(counted(found[0], found[1].to(device.name)).cpu(),
                           counted(Bucketizer(limits, codes.cpu()), found[1]))  # fmt: skip


@pytest.mark.parametrize("where", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("kind", ["OptimState8bit", "OptimState4bit", "OptimStateFp8"])
def test_moments_are_coded_where_they_are(
    kind: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes, scales and decoded values stay on the device. The meta device, which holds no values
    either, works where `copy_` to a fake GPU fails in a CPU build of torch; it has no table to
    look at, so the thresholds are given."""
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values, theirs, made = moments(True, (600, 256)), *(state(kind, True, (600, 256)) for _ in "12")
    qmap = getattr(made, "qmap", None)
    theirs.copy_(values)
    if qmap is not None:
        bucketizer = FineBucketizer(lowbit_codes.thresholds(qmap).to(where))  # type: ignore[union-attr]
        monkeypatch.setattr(lowbit_codes, "_bucketizer", lambda qmap: bucketizer)
        qmap = qmap.to(where)
    codes, scale = made.codes.to(where), made.scale.to(where)
    assert lowbit_codes.encode(values.to(where), made.block_size, qmap, codes, scale)
    decoded = lowbit_codes.decode(codes, made.block_size, qmap, scale)
    assert decoded.device.type == where and decoded.shape == (600 * 256,)
    if where != "meta":
        assert torch.equal(codes.cpu().view(torch.uint8), theirs.codes.view(torch.uint8))
        assert torch.equal(decoded.cpu().view(600, 256), theirs.dequantize())


def test_a_table_is_copied_to_the_cpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from a device waits for it, and each moment of a model has its own table."""
    copied = []
    cpu = torch.Tensor.cpu

    def spy(self: torch.Tensor) -> torch.Tensor:
        copied.append(self)
        return cpu(self)

    monkeypatch.setattr(torch.Tensor, "cpu", spy)
    made = state("OptimState8bit", True, (4, 256))
    for _ in range(3):
        assert lowbit_codes.encode(torch.ones(4, 256), 256, made.qmap, made.codes, made.scale)
    assert len(copied) == 1
    decoded = lowbit_codes.decode(made.codes, 256, made.qmap, made.scale)
    made.qmap.mul_(2)
    assert lowbit_codes.encode(torch.ones(4, 256), 256, made.qmap, made.codes, made.scale)
    assert len(copied) == 2, "a table that was changed is looked at again"
    assert torch.equal(decoded, torch.ones(1024)) and made.codes.unique().numel() == 1


@pytest.mark.parametrize("kind", ["OptimState8bit", "OptimState4bit", "OptimStateFp8"])
def test_moments_take_few_kernels_on_a_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = state(kind, True, (16, 256))
    block, qmap = made.block_size, getattr(made, "qmap", None)
    if qmap is not None:
        bucketizer = FineBucketizer(lowbit_codes.thresholds(qmap).to("meta"))  # type: ignore[union-attr]
        monkeypatch.setattr(lowbit_codes, "_bucketizer", lambda qmap: bucketizer)
        qmap = qmap.to("meta")
    codes = made.codes.repeat(1 << 10, 1).to("meta")
    scale = torch.empty((1 << 22) // block, device="meta")
    values = torch.empty(1 << 22, device="meta")
    lowbit_codes.encode(values, block, qmap, codes, scale)
    with Kernels() as kernels, NeverWaits():
        lowbit_codes.encode(values, block, qmap, codes, scale)
    assert kernels.total <= 10, kernels.counts
    with Kernels() as kernels, NeverWaits():
        lowbit_codes.decode(codes, block, qmap, scale)
    assert kernels.total <= 5, kernels.counts
