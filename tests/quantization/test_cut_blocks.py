"""Codes whose blocks the destination cuts into smaller ones are kept, and each new block repeats the scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import load_file, save_file
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization import Float8Tensor, Int8Tensor, PerTensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

import ckptmap
from ckptmap.quantization.blockwise.block_geometry import cuts, spread
from tests.support.bnb_cases import same
from tests.support.int8_models import weights

KEY = "layers.0.q_proj.weight"
FILE = "model.safetensors"


class _Quantizer:
    """What transformers' operations ask of theirs."""

    class quantization_config:
        weight_block_size = (128, 128)
        scale_fmt = "ue8m0"


def test_one_scale_becomes_that_of_every_tile(tmp_path: Path) -> None:
    """torchao's Float8Tensor of one scale, for transformers; and back no block is joined."""
    tensor = Float8Tensor.from_hp(weights((256, 384), torch.bfloat16), granularity=PerTensor())
    torch.save({KEY: tensor}, tmp_path / "in.pt")
    report = ckptmap.convert(tmp_path / "in.pt", tmp_path / "out", to="hf-fp8")
    assert report.fidelity == {"exact": 1}
    made = load_file(tmp_path / "out" / FILE)
    assert made[f"{KEY}_scale_inv"].shape == (2, 3)
    same(made[KEY], tensor.qdata)
    decoded = Fp8Dequantize(_Quantizer())._dequantize_one(
        made[KEY], made[f"{KEY}_scale_inv"], torch.bfloat16
    )
    same(decoded, tensor.dequantize())
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "in.pt").ok


@pytest.mark.parametrize("to", ["hf-ct-mxfp8", "full-torchao-mxfp8"])
def test_tiles_with_exponents_become_mxfp8(to: str, tmp_path: Path) -> None:
    """128 x 128 of transformers' own quantizer, in blocks of 32 of a row."""
    w = weights((256, 384), torch.bfloat16, "heavy")
    source = Fp8Quantize(_Quantizer()).convert({KEY: w})
    save_file(source, tmp_path / "in.safetensors")
    scales = source[f"{KEY}_scale_inv"]
    truth = Fp8Dequantize(_Quantizer())._dequantize_one(source[KEY], scales, torch.bfloat16)
    report = ckptmap.convert(tmp_path / "in.safetensors", tmp_path / "out", to=to)
    assert report.fidelity == {"exact": 1}
    if to == "hf-ct-mxfp8":
        made = load_file(tmp_path / "out" / FILE)
        stem = KEY.removesuffix("weight")
        state = {key.removeprefix(stem): value for key, value in made.items()}
        scheme = preset_name_to_scheme("MXFP8A16", ["Linear"])
        decoded = BaseCompressor.load_from_registry("mxfp8-quantized").decompress(state, scheme)
        same(decoded["weight"], truth)
        same(made[KEY], source[KEY])
        return
    made = torch.load(tmp_path / "out")
    codes, scale = made[f"{KEY[:-6]}_weight_qdata"], made[f"{KEY[:-6]}_weight_scale"]
    tensor = MXTensor(codes, scale, torch.float8_e4m3fn, 32, torch.bfloat16, None, None, False)
    same(tensor.dequantize(torch.bfloat16), truth)


def test_one_scale_becomes_that_of_every_row(tmp_path: Path) -> None:
    tensor = Int8Tensor.from_hp(weights((64, 96), torch.bfloat16), PerTensor())
    torch.save({KEY: tensor}, tmp_path / "in.pt")
    report = ckptmap.convert(tmp_path / "in.pt", tmp_path / "out", to="full-bnb-int8")
    assert report.fidelity == {"codes": 1}
    with ckptmap.open(tmp_path / "out") as ckpt:
        same(ckpt[KEY].read(), tensor.dequantize())


def test_blocks_that_would_be_joined_are_quantized_again(tmp_path: Path) -> None:
    """Whether all scales of a tile are equal, only reading tells."""
    save_file({KEY: weights((256, 384), torch.bfloat16)}, tmp_path / "in.safetensors")
    ckptmap.convert(tmp_path / "in.safetensors", tmp_path / "rows", to="hf-ct-fp8")
    assert ckptmap.plan(tmp_path / "rows", "full-fp8").fidelities() == {"requantize": 1}
    ckptmap.convert(tmp_path / "in.safetensors", tmp_path / "mx", to="hf-ct-mxfp8")
    assert ckptmap.plan(tmp_path / "mx", "full-fp8-ue8m0").fidelities() == {"requantize": 1}
    ckptmap.convert(tmp_path / "in.safetensors", tmp_path / "fp8", to="hf-fp8")
    plan = ckptmap.plan(tmp_path / "fp8", "full-torchao-mxfp8")
    assert plan.fidelities() == {"requantize": 1}, "float32 scales are no powers of two"


@pytest.mark.parametrize(
    ("shape", "coarse", "fine"),
    [((300, 70), (128, 64), (64, 32)), ((300, 70), (300, 70), (128, 32)), ((5,), (5,), (2,))],
)
def test_scales_are_those_of_the_block_around(
    shape: tuple[int, ...], coarse: tuple[int, ...], fine: tuple[int, ...]
) -> None:
    assert cuts(fine, coarse, shape) and not cuts(coarse, fine, shape)
    counts = [-(-n // large) for n, large in zip(shape, coarse, strict=True)]
    scales = torch.arange(torch.Size(counts).numel()).view(counts).float()
    wide = spread(scales, coarse, fine, shape)
    assert wide.shape == tuple(-(-n // small) for n, small in zip(shape, fine, strict=True))
    for index in torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, len(shape)):
        at = tuple(int(i) // n for i, n in zip(index, fine, strict=True))
        around = tuple(int(i) // n for i, n in zip(index, coarse, strict=True))
        assert wide[at] == scales[around]
