"""A live quantized weight keeps how it is stored and how it is quantized, whatever the checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import (
    Int8Tensor,
    Int8WeightOnlyConfig,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

import ckptmap
from ckptmap.errors import LoadError
from tests.support.bnb_cases import quantized, same
from tests.support.library import Library
from tests.support.live_model import inner
from tests.support.merge_cases import gpt2

bnb = Library("bitsandbytes")
BF16 = torch.bfloat16
VALUES = (torch.randn(128, 256, generator=torch.Generator().manual_seed(7)) * 0.02).bfloat16()
GRANULARITIES = [PerRow(), PerGroup(32), PerTensor()]


def net(linear: nn.Module | None = None) -> Any:
    return nn.Sequential(linear or nn.Linear(256, 128, bias=False, dtype=BF16)).requires_grad_(
        False
    )


def int8(granularity: Any, **settings: Any) -> Any:
    model = net()
    model[0].weight = nn.Parameter(
        Int8Tensor.from_hp(model[0].weight, granularity, **settings), requires_grad=False
    )
    return model


def nf4(block: int) -> Any:
    model = net()
    model[0].weight = nn.Parameter(to_nf4(model[0].weight, block, 256), requires_grad=False)
    return model


def fourbit(storage: torch.dtype, double: bool, kind: str = "nf4") -> Any:
    layer = bnb.nn.Linear4bit(
        256, 128, bias=False, compute_dtype=BF16, quant_type=kind, compress_statistics=double,
        quant_storage=storage,
    )  # fmt: skip
    weight = torch.randn(128, 256, dtype=BF16)
    layer.weight = bnb.nn.Params4bit(
        weight, False, quant_type=kind, compress_statistics=double, quant_storage=storage,
        module=layer,
    )  # fmt: skip
    return net(layer).to("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings")
    torch.save({"0.weight": VALUES}, path / "dense.pt")
    for form in ("nf4", "bnb-nf4", "bnb-nf4-dq", "int8"):
        ckptmap.convert(path / "dense.pt", path / f"{form}.pt", to=f"full-{form}", encode=("*",))
    return path


# ------------------------------------------------------------------------------- bitsandbytes


@pytest.mark.parametrize("source", ["dense", "nf4", "bnb-nf4", "bnb-nf4-dq"])
def test_the_dtype_that_stores_the_codes_stays(source: str, folder: Path) -> None:
    """QLoRA under FSDP stores codes in the dtype of the other weights: a flat parameter has one dtype."""
    models = [fourbit(storage, False) for storage in (torch.uint8, BF16)]
    for model in models:
        ckptmap.load(folder / f"{source}.pt", model)
    plain, packed = (model[0].weight for model in models)
    assert packed.dtype == packed.quant_storage == BF16
    same(packed.data.view(torch.uint8).view(-1, 1), plain.data)
    same(packed.quant_state.absmax, plain.quant_state.absmax)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.float32], ids=str)
def test_what_a_double_quantized_model_saved_makes_it_again(
    kind: str, storage: torch.dtype, tmp_path: Path
) -> None:
    saved, loaded = (fourbit(storage, True, kind) for _ in range(2))
    ckptmap.save(tmp_path / "step", saved).wait()
    ckptmap.load(tmp_path / "step", loaded)
    before, after = saved.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys() and loaded[0].weight.quant_state.nested
    for key, value in before.items():
        same(after[key].view(torch.uint8), value.view(torch.uint8))
    x = torch.randn(3, 256, dtype=BF16)
    same(loaded(x), saved(x))


def test_int8_does_not_take_the_place_of_a_weight_of_bitsandbytes(folder: Path) -> None:
    """Its layer would fail in a forward: it computes with weights of its own class."""
    layer = bnb.nn.Linear4bit(256, 128, bias=False, compute_dtype=BF16, quant_type="nf4")
    layer.weight.data = layer.weight.data.to(BF16)
    model = net(layer)
    report = ckptmap.load(folder / "int8.pt", model)
    assert [one.fqn for one in report.decoded] == ["0.weight"]
    assert type(model[0].weight).__name__ == "Params4bit"
    with ckptmap.open(folder / "int8.pt") as ckpt:
        same(model[0].weight.data, ckpt["0.weight"].read())
    model.to("cpu")(torch.randn(3, 256, dtype=BF16))


@pytest.mark.parametrize("source", ["dense", "quantized"])
def test_a_square_weight_in_the_place_of_a_conv1d_is_not_taken_as_it_lies(
    source: str, tmp_path: Path
) -> None:
    """transformers has quantized its transpose, and both have one shape."""
    gpt2().save_pretrained(tmp_path / "dense")
    model = quantized(tmp_path / "dense", "nf4", False)
    model.save_pretrained(tmp_path / "quantized")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(LoadError, match=r"attn\.c_proj\.weight is a Linear4bit in the place of"):
        ckptmap.load(tmp_path / source, model, strict=False)
    ckptmap.save(tmp_path / "step", model).wait()
    again = quantized(tmp_path / "dense", "nf4", False)
    ckptmap.load(tmp_path / "step", again)
    for one in (model, again):
        for key, value in one.state_dict().items():
            same(value, before[key])


# ------------------------------------------------------------------------------- torchao


def by_load(folder: Path, model: Any) -> None:
    ckptmap.load(folder / "dense.pt", model)


def by_hooks(folder: Path, model: Any) -> None:
    handle = ckptmap.hooks.install(model)
    model.load_state_dict({"0.weight": VALUES})
    handle.remove()


def by_translate(folder: Path, model: Any) -> None:
    model.load_state_dict(ckptmap.translate({"0.weight": VALUES}, like=model))


WAYS = [by_load, by_hooks, by_translate]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_int8_is_quantized_as_the_live_weight_was(
    granularity: Any, narrow: bool, way: Callable[[Path, Any], None], folder: Path
) -> None:
    """As torchao itself quantizes the values: groups, one scale of all, a smaller range."""
    model = int8(granularity, reduce_range=narrow)
    way(folder, model)
    wanted = Int8Tensor.from_hp(VALUES, granularity, reduce_range=narrow)
    found = model[0].weight
    assert found.block_size == wanted.block_size and found.reduce_range == narrow
    same(found.qdata, wanted.qdata)
    same(found.scale, wanted.scale)
    same(found.zero_point, wanted.zero_point)


@pytest.mark.parametrize("way", [by_load, by_hooks])
@pytest.mark.parametrize("block", [32, 64])
def test_nf4_is_quantized_in_the_blocks_of_the_live_weight(
    block: int, way: Callable[[Path, Any], None], folder: Path
) -> None:
    model = nf4(block)
    way(folder, model)
    wanted = to_nf4(VALUES, block, 256)
    assert model[0].weight.block_size == block
    for name, part in inner(wanted).items():
        same(inner(model[0].weight.detach())[name], part)


def test_a_state_dict_of_nf4_leaves_a_model_int8(folder: Path) -> None:
    """What `translate` makes, the model's own `load_state_dict` takes; hooks keep the class, too."""
    other, model, hooked = nf4(64), net(), net()
    ckptmap.load(folder / "nf4.pt", other)
    state = other.state_dict()
    for one in (model, hooked):
        quantize_(one, Int8WeightOnlyConfig(version=2))
    model.load_state_dict(ckptmap.translate(state, like=model))
    handle = ckptmap.hooks.install(hooked)
    hooked.load_state_dict(state)
    handle.remove()
    with ckptmap.open(folder / "nf4.pt") as ckpt:
        wanted = Int8Tensor.from_hp(ckpt["0.weight"].read(), PerRow())
    for one in (model, hooked):
        assert type(one[0].weight) is Int8Tensor
        same(one[0].weight.qdata, wanted.qdata)


@pytest.mark.parametrize("name", ["act_pre_scale", "act_quant_scale"])
def test_factors_of_activations_are_not_lost_in_silence(name: str, tmp_path: Path) -> None:
    factors = torch.ones(256, dtype=BF16) if name == "act_pre_scale" else torch.ones(1, 1)
    model = int8(PerRow(), **{name: factors})
    with pytest.raises(LoadError, match=rf"0\.weight is int8 with {name}"):
        ckptmap.save(tmp_path / "step", model).wait()
    torch.save(model.state_dict(), tmp_path / "saved.pt")  # as the hint says
    with ckptmap.open(tmp_path / "saved.pt") as ckpt:
        same(ckpt["0.weight"].read(), model[0].weight.dequantize())
