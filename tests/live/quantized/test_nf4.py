"""NF4 under DDP, NF4 in bitsandbytes' classes, and float32 weights that are rounded stochastically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError
from tests.corpus.ranks import run_ranks
from tests.support.live_model import QUANTIZED, inner, net, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    write(path)
    return path


def test_nf4_under_ddp(folder: Path) -> None:
    run_ranks("tests.ranks.resume_ddp", 2, [str(folder)], timeout=400)


def test_nf4_on_three_ranks(folder: Path) -> None:
    run_ranks("tests.ranks.resume_ddp", 3, [str(folder)], timeout=400)


# ------------------------------------------------------------------------------- bitsandbytes


def fourbit() -> Any:
    """The model with bitsandbytes' layers in place of those that are quantized."""
    import bitsandbytes

    model = net(3)
    for name in QUANTIZED:
        path = name.removesuffix(".weight")
        old = model.get_submodule(path)
        assert isinstance(old, nn.Linear)
        new = bitsandbytes.nn.Linear4bit(
            old.in_features, old.out_features, bias=old.bias is not None,
            compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=False,
        )  # fmt: skip
        if old.bias is not None:
            new.bias = old.bias
        new.weight.requires_grad_(False)
        setattr(model, path, new)
    return model


@pytest.mark.parametrize("option", ["torchao", "bnb"])
def test_nf4_in_bitsandbytes(option: str, folder: Path) -> None:
    """Codes are the same bytes; values are torchao's up to one rounding to bfloat16. A Linear4bit
    gets its own class whatever is asked."""
    import bitsandbytes
    from bitsandbytes.functional import dequantize_4bit

    model = fourbit()
    report = ckptmap.load(folder / "nf4.pt", model, nf4=option)
    truth = net(0)
    ckptmap.load(folder / "nf4.pt", truth)
    assert {e.fqn for e in report.encoded if e.encoding == "bnb-nf4"} == set(QUANTIZED)
    for name in QUANTIZED:
        weight, want = model.get_parameter(name), truth.get_parameter(name)
        assert isinstance(weight, bitsandbytes.nn.Params4bit) and not weight.requires_grad
        assert torch.equal(weight.data.view(-1), inner(want.detach())["quantized_data"])
        values = dequantize_4bit(weight.data, weight.quant_state)
        dense = want.get_original_weight()  # type: ignore[attr-defined]
        assert values.shape == dense.shape and values.dtype == dense.dtype
        assert (values - dense).abs().max() <= 2.0**-7 * dense.abs().max()
    for layer in ("up", "down"):
        module = model.get_submodule(layer)
        assert module.quant_state is module.weight.quant_state
    x = torch.randn(2, model.up.in_features, dtype=torch.bfloat16)
    assert torch.allclose(model.up(x).float(), truth.up(x).float(), atol=0.05, rtol=0.05)


def test_bitsandbytes_needs_its_layers(folder: Path) -> None:
    model = net(3)
    before = model.up.weight.clone()
    with pytest.raises(LoadError, match=r"up\.weight.*Linear is no bitsandbytes Linear4bit"):
        ckptmap.load(folder / "nf4.pt", model, nf4="bnb")
    assert torch.equal(model.up.weight, before)
    with pytest.raises(ValueError, match="nf4='gguf'"):
        ckptmap.load(folder / "nf4.pt", model, nf4="gguf")


# ------------------------------------------------------------------------------- rounding


class One(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(300, 200, dtype=dtype))


def rounded(path: Path, **options: Any) -> torch.Tensor:
    model = One(torch.bfloat16)
    report = ckptmap.load(path, model, max_memory=64 << 10, **options)
    assert [str(cast) for cast in report.cast] == ["weight: float32 -> bfloat16"]
    return model.weight.detach()


def test_master_weights_rounded_by_chance(tmp_path: Path) -> None:
    """To one of the two neighbours, as often as near: no bias, where nearest has one."""
    path, generator = tmp_path / "master.pt", torch.Generator().manual_seed(0)
    master = 1.0 + 0.001 * torch.rand(300, 200, generator=generator)  # all nearer to 1 than above
    master[0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0])
    torch.save({"weight": master}, path)
    nearest = rounded(path)
    assert torch.equal(nearest.view(torch.int16), master.bfloat16().view(torch.int16))
    found = rounded(path, rounding="stochastic", seed=1)
    step = 2.0**-7
    finite = master[1:]
    assert set(found[1:].flatten().tolist()) == {1.0, 1.0 + step}
    mean = float((found[1:].double() - finite.double()).mean())
    deviation = step / 2 / finite.numel() ** 0.5
    assert abs(mean) < 5 * deviation < float((nearest[1:].double() - finite.double()).mean().abs())
    assert found[0, :2].tolist() == [float("inf"), float("-inf")] and found[0, 2].isnan()
    assert torch.equal(rounded(path, rounding="stochastic", seed=1)[1:], found[1:])
    assert not torch.equal(rounded(path, rounding="stochastic", seed=2)[1:], found[1:])
    with pytest.raises(ValueError, match="rounding='up'"):
        rounded(path, rounding="up")
