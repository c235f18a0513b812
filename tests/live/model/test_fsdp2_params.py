"""FSDP2's parameter of one rank that holds all of a tensor subclass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from ckptmap.live.model.fsdp2_params import _inner_tensors, _unsharded_is_sharded


def nf4() -> torch.Tensor:
    return to_nf4(torch.randn(256, 64))


def int8() -> torch.Tensor:
    layer = nn.Linear(64, 64, bias=False)
    quantize_(layer, Int8WeightOnlyConfig())
    return layer.weight.detach()


def of(local: torch.Tensor, device: str, offload: bool, trained: bool = False) -> Any:
    """Return as much of an FSDPParam as the replacement uses."""
    return SimpleNamespace(
        sharded_param=nn.Parameter(local, requires_grad=trained),
        _extensions_data=SimpleNamespace(clear=lambda: None), _sharded_local_tensor=local,
        device=torch.device(device), offload_to_cpu=offload, _unsharded_inner_tensors=[],
    )  # fmt: skip


def reshard(param: Any) -> None:
    """Free what FSDPParam.free_unsharded_param frees."""
    for tensor in param._unsharded_inner_tensors:
        tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("make", [nf4, int8])
def test_offloaded_to_the_cpu_the_unsharded_parameter_is_on_the_device(make: Any) -> None:
    param = of(make(), "meta", offload=True)
    _unsharded_is_sharded(param)
    first = param._unsharded_param
    assert first.device.type == "meta" and type(first.data) is type(param._sharded_local_tensor)
    assert {one.device.type for one in _inner_tensors(first.data)} == {"meta"}
    assert not first.requires_grad and param._sharded_local_tensor.device.type == "cpu"
    reshard(param)
    _unsharded_is_sharded(param)
    assert param._unsharded_param is first
    for tensor in param._unsharded_inner_tensors:
        assert tensor.untyped_storage().size() == tensor.numel() * tensor.itemsize


@pytest.mark.parametrize("make", [nf4, int8])
def test_the_memory_that_a_reshard_freed_is_filled_anew(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device with values: the CPU, which is said not to be the shard's."""
    param = of(make(), "meta", offload=True)
    local, to = param._sharded_local_tensor, torch.Tensor.to
    there = {id(one) for one in _inner_tensors(local)}
    monkeypatch.setattr(type(local), "to", lambda tensor, device: tensor.clone(), raising=False)
    _unsharded_is_sharded(param)
    monkeypatch.setattr(torch.Tensor, "to", to)
    inner = param._unsharded_inner_tensors
    assert inner and not there & {id(one) for one in inner}
    versions = [one._version for one in inner]
    reshard(param)
    assert all(not one.untyped_storage().size() for one in inner)
    _unsharded_is_sharded(param)
    assert [one._version for one in inner] == versions
    for made, values in zip(inner, _inner_tensors(local), strict=True):
        assert torch.equal(made, values)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_on_one_device_it_shares_the_shards_memory(offload: bool, trained: bool) -> None:
    """And is trained where the sharded parameter is."""
    param = of(nf4(), "cpu", offload, trained)
    _unsharded_is_sharded(param)
    assert param._unsharded_param.requires_grad == trained
    pairs = zip(
        _inner_tensors(param._unsharded_param.data), _inner_tensors(param._sharded_local_tensor),
        strict=True,
    )  # fmt: skip
    assert all(one.data_ptr() == other.data_ptr() for one, other in pairs)
    assert param._unsharded_inner_tensors == []
