"""Rounding to E2M1 by bits, by limits and by a table of 16-bit values: the same code each way."""

from __future__ import annotations

import pytest
import torch

from ckptmap.quantization.blockwise.exponents import inverses
from ckptmap.quantization.microscaling import e2m1
from ckptmap.quantization.microscaling.fp4_encoder import _scaled


def test_each_value_has_the_code_of_the_nearest_and_a_tie_the_even_one() -> None:
    middles = [(a + b) / 2 for a, b in zip(e2m1.MAGNITUDES, e2m1.MAGNITUDES[1:], strict=False)]
    wanted = [0, 2, 2, 4, 4, 6, 6]
    for sign, high in ((1.0, 0), (-1.0, 8)):
        for kind in (torch.float32, torch.bfloat16, torch.float16):
            ties = torch.tensor(middles, dtype=kind) * sign
            codes = torch.tensor(e2m1.MAGNITUDES, dtype=kind) * sign
            assert e2m1.rounded(ties).tolist() == [code + high for code in wanted]
            assert e2m1.rounded(codes).tolist() == [code + high for code in range(8)]
            far = torch.tensor([60.0, torch.inf, 1e-7], dtype=kind) * sign
            assert e2m1.rounded(far).tolist() == [7 + high, 7 + high, high]


def test_limits_give_the_codes_of_bits() -> None:
    """Around each limit, and of a million bit patterns: infinities, subnormals and both zeros, too."""
    maker = torch.Generator().manual_seed(1)
    edges = torch.tensor([0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).view(torch.int32)
    near = (edges.unsqueeze(1) + torch.arange(-300, 301, dtype=torch.int32)).flatten()
    every = torch.randint(-(1 << 31), (1 << 31) - 1, (1_000_000,), generator=maker)
    bits = torch.cat([near, near | -(1 << 31), every.to(torch.int32)])
    values = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, 1e-45, -torch.inf])])
    values = values[~values.isnan()]
    assert torch.equal(e2m1._by_limits(values), e2m1._by_bits(values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_in_16_bits_has_the_code_of_the_one_in_32(dtype: torch.dtype) -> None:
    """Every value with every scale of a block that it may lie in."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    every = every[every.isfinite()]
    for exponent in range(0, 255, 3):
        power = inverses(torch.tensor([exponent], dtype=torch.int32))
        exact = every.to(torch.float32) * power
        within = exact.abs() < 16
        found = e2m1.rounded(_scaled(every[within], power))
        assert torch.equal(found, e2m1._by_bits(exact[within])), exponent
