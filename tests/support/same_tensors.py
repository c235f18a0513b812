"""Tensors compared bit for bit, and the keys that a checkpoint of the corpus must hold."""

from __future__ import annotations

from typing import Any

import torch


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaN equals itself, fp8 can be compared. A dim of one element may have
    any stride, which `view` does not like, so they are copied."""
    whole = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return whole.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def assert_same(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert found.shape == expected.shape, name
    assert found.dtype == expected.dtype, name
    assert torch.equal(bits(found), bits(expected)), name


def expected_keys(case: Any) -> tuple[set[str], set[str]]:
    """(keys that must be there, keys that may be): of a tied group one name suffices."""
    may = {name for group in case.spec.tied for name in group}
    return set(case.truth) - may, set(case.truth)
