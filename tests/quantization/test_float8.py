"""float8: torchao's Float8Tensor, and DeepSeek's block scales as transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchao.quantization import Float8Tensor, Float8WeightOnlyConfig, PerRow, PerTensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

import ckptmap
from ckptmap.errors import RunError, SourceError
from ckptmap.quantization.deepseek_fp8 import Fp8
from ckptmap.quantization.torchao.float8 import Float8
from ckptmap.tensors import Box, TensorInfo
from tests.support.int8_models import (
    QUERY,
    decoded,
    dense,
    encoded,
    info_of,
    loaded,
    logits,
    plain,
    torchao_hf,
    weights,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Quantizer:
    """What transformers' operations ask of theirs."""

    class quantization_config:
        weight_block_size = (128, 128)
        scale_fmt = "float"


def finegrained(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = Fp8Quantize(_Quantizer()).convert({"fc.weight": w})
    return made["fc.weight"], made["fc.weight_scale_inv"]


def theirs(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return Fp8Dequantize(_Quantizer())._dequantize_one(codes, scale, dtype)


# ------------------------------------------------------------------------------- torchao


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()], ids=["row", "tensor"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float8tensor_is_read_as_torchao_decodes_it(
    dtype: torch.dtype, granularity: Any, tmp_path: Path
) -> None:
    w = weights((64, 96), dtype, "heavy")
    tensor = Float8Tensor.from_hp(w, granularity=granularity)
    torch.save({"fc.weight": tensor}, tmp_path / "in.pt")
    with ckptmap.open(tmp_path / "in.pt") as ckpt:
        wanted = tensor.dequantize()
        assert ckpt["fc.weight"].encoding == "float8"
        assert torch.equal(ckpt["fc.weight"].read(), wanted)
        assert torch.equal(ckpt["fc.weight"][3:50, 7:8], wanted[3:50, 7:8])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_quantized_bit_equal_to_torchao(dtype: torch.dtype) -> None:
    w = weights((64, 96), dtype, "heavy")
    reference: Any = Float8Tensor.from_hp(w, granularity=PerRow())
    parts = encoded(Float8((1, 96)), w, 5)
    assert torch.equal(parts["qdata"].view(torch.uint8), reference.qdata.view(torch.uint8))
    assert torch.equal(parts["scale"], reference.scale)
    w[9] = 0
    parts = encoded(Float8((1, 96)), w)
    assert not decoded(Float8((1, 96)), info_of(w), parts)[9].any(), "NaN in torchao: 0 / 0"


def test_torchaos_safetensors_both_ways(tmp_path: Path) -> None:
    truth = torchao_hf(tmp_path / "theirs", Float8WeightOnlyConfig())
    with ckptmap.open(tmp_path / "theirs") as ckpt:
        for key, wanted in truth.items():
            assert torch.equal(ckpt[key].read().nan_to_num(7), wanted.nan_to_num(7)), key
    ckptmap.convert(tmp_path / "theirs-dense", tmp_path / "ours", to="hf-float8")
    model = loaded(tmp_path / "ours")
    with ckptmap.open(tmp_path / "ours") as ckpt:
        values = {key: ckpt[key].read() for key in ckpt}
    query = model.model.layers[0].self_attn.q_proj.weight
    assert isinstance(query, Float8Tensor) and torch.equal(query.dequantize(), values[QUERY])
    assert torch.equal(logits(model), logits(plain(values)))
    assert all(torch.equal(values[k].nan_to_num(7), v.nan_to_num(0) if k == QUERY else v)
               for k, v in truth.items() if k != QUERY)  # fmt: skip


# ------------------------------------------------------------------------------- block scales


@pytest.mark.parametrize("shape", [(256, 384), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_are_quantized_and_decoded_bit_equal_to_transformers(
    dtype: torch.dtype, shape: Any
) -> None:
    w = weights(shape, dtype, "heavy")
    w[:128, :128] = 0
    codes, scale = finegrained(w)
    parts = encoded(Fp8((128, 128)), w, 1)
    assert torch.equal(parts[""].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(parts["scale_inv"], scale)
    whole = decoded(Fp8((128, 128)), info_of(w), parts)
    assert torch.equal(whole, theirs(codes, scale, dtype))
    assert not whole[:128, :128].any()
    box = Box((100, 50), (28, 70))
    assert torch.equal(decoded(Fp8((128, 128)), info_of(w), parts, box), whole[100:128, 50:120])


@pytest.mark.parametrize("split", [0, 1, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_within_rows(dtype: torch.dtype, split: int) -> None:
    """The tiles of a transpose, were they 128 x 1: each row by itself, however it is fed."""
    w = weights((6, 1024), dtype, "heavy")
    parts = encoded(Fp8((1, 128)), w, split)
    blocks = w.float().view(6, 8, 128)
    forward = 448.0 / blocks.abs().amax(-1)
    codes = (blocks * forward.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn).view(6, 1024)
    assert torch.equal(parts[""].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(parts["scale_inv"], 1.0 / forward)


@pytest.mark.parametrize("block", [(128, 128), (1, 128)], ids=str)
def test_tiny_blocks_do_not_turn_zeros_into_nan(block: tuple[int, int]) -> None:
    """448 / absmax overflows below 1.3e-36, and infinity times 0 is none."""
    w = torch.zeros(128, 256)
    w[:, ::2] = 1e-38 * torch.randn(128, 128, generator=torch.Generator().manual_seed(1))
    parts = encoded(Fp8(block), w)
    values = decoded(Fp8(block), info_of(w), parts)
    assert not values[:, 1::2].any()
    assert (values - w).norm(dtype=torch.float64) < 0.1 * w.norm(dtype=torch.float64)


@pytest.mark.parametrize("shape", [(200, 300), (5, 129), (1000, 60)], ids=str)
def test_short_tiles(shape: Any) -> None:
    """ceil(out / 128) x ceil(in / 128) scales, as DeepSeek has them; each tile by itself."""
    w = weights(shape, torch.bfloat16)
    parts = encoded(Fp8((128, 128)), w)
    whole = decoded(Fp8((128, 128)), info_of(w), parts)
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            tile = w[row : row + 128, column : column + 128].float()
            scale = parts["scale_inv"][row // 128, column // 128]
            assert scale == 1.0 / (448.0 / tile.abs().max())
            codes = (tile * (448.0 / tile.abs().max())).clamp(-448, 448).to(torch.float8_e4m3fn)
            wanted = (codes.float() * scale).to(torch.bfloat16)
            assert torch.equal(whole[row : row + 128, column : column + 128], wanted)


def deepseek(path: Path, name: str, scale_dtype: torch.dtype, config: bool = False) -> torch.Tensor:
    """A checkpoint as DeepSeek ships it, in bf16 but for its linear weights; its values."""
    w = weights((192, 256), torch.bfloat16)
    parts = encoded(Fp8((128, 128)), w)
    scale = parts["scale_inv"]
    if scale_dtype == torch.float8_e8m0fnu:
        scale = scale.log2().ceil().exp2()
    path.mkdir()
    stem = "model.layers.0.mlp.up_proj."
    tensors = {
        stem + "weight": parts[""],
        stem + name: scale.to(scale_dtype),
        "model.norm.weight": torch.ones(256, dtype=torch.bfloat16),
        "model.embed_tokens.weight": torch.randn(512, 256).bfloat16(),
    }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    if config:
        (path / "config.json").write_text(
            '{"quantization_config": {"weight_block_size": [96, 128]}}'
        )
    spread = scale.to(scale_dtype).float().repeat_interleave(96 if config else 128, 0)[:192]
    return (parts[""].float() * spread.repeat_interleave(128, 1)).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("name", ["weight_scale_inv", "scale", "qscale_weight"])
def test_every_name_and_dtype_of_scales(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    wanted = deepseek(tmp_path / "in", name, dtype)
    with ckptmap.open(tmp_path / "in") as ckpt:
        tensor = ckpt["model.layers.0.mlp.up_proj.weight"]
        kind = "fp8-ue8m0" if dtype == torch.float8_e8m0fnu else "fp8"
        assert tensor.encoding == kind and tensor.dtype == "bfloat16", "that of the model"
        assert torch.equal(tensor.read(), wanted)
        assert len(ckpt) == 3
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("in", "out"))
    assert before.keys() == after.keys(), "under the names that it had"


def test_the_config_beside_it_says_the_tiles(tmp_path: Path) -> None:
    wanted = deepseek(tmp_path / "in", "weight_scale_inv", torch.float32, config=True)
    with ckptmap.open(tmp_path / "in") as ckpt:
        assert torch.equal(ckpt["model.layers.0.mlp.up_proj.weight"].read(), wanted)


def test_one_scale_of_the_whole_tensor(tmp_path: Path) -> None:
    codes = torch.randn(40, 50).to(torch.float8_e4m3fn)
    for shape in ((), (1,), (1, 1)):
        scale = torch.full(shape, 0.25)
        save_file({"fc.weight": codes, "fc.weight_scale_inv": scale}, tmp_path / "in.safetensors")
        with ckptmap.open(tmp_path / "in.safetensors") as ckpt:
            wanted = (codes.float() * 0.25).to(torch.bfloat16)
            assert torch.equal(ckpt["fc.weight"].read(), wanted)
            assert torch.equal(ckpt["fc.weight"][3:5, 9:], wanted[3:5, 9:])


def test_experts_of_three_dims(tmp_path: Path) -> None:
    codes = torch.randn(3, 256, 128).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, 1)
    tensors = {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale_inv": scale}
    save_file(tensors, tmp_path / "in.safetensors")
    wanted = torch.stack([theirs(c, s, torch.bfloat16) for c, s in zip(codes, scale, strict=True)])
    with ckptmap.open(tmp_path / "in.safetensors") as ckpt:
        assert torch.equal(ckpt["experts.gate_up_proj"].read(), wanted)
        assert torch.equal(ckpt["experts.gate_up_proj"][1, 100:200, 3:5], wanted[1, 100:200, 3:5])


def test_scales_of_no_known_tiles_are_refused(tmp_path: Path) -> None:
    codes = torch.randn(40, 50).to(torch.float8_e4m3fn)
    save_file(
        {"fc.weight": codes, "fc.weight_scale_inv": torch.ones(7, 3)}, tmp_path / "x.safetensors"
    )
    with pytest.raises(ckptmap.CkptmapError, match=r"fc\.weight: scales .* fit no known tiles"):
        ckptmap.open(tmp_path / "x.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_transformers_loads_what_we_write(dtype: torch.dtype, tmp_path: Path) -> None:
    """Without a GPU it decodes them; with one it computes in float8."""
    source = dense(tmp_path / "dense", dtype, hidden=128)
    ckptmap.convert(source, tmp_path / "out", to="hf-fp8")
    assert ckptmap.verify(tmp_path / "out", against=source).ok
    with ckptmap.open(tmp_path / "out") as ckpt:
        values = {key: ckpt[key].read() for key in ckpt}
        assert ckpt[QUERY].encoding == "fp8" and ckpt["lm_head.weight"].encoding == "dense"
    if torch.cuda.is_available():
        pytest.skip("a GPU computes in float8, whose outputs are others")
    model = loaded(tmp_path / "out")
    state = model.state_dict()
    assert all(torch.equal(state[key], wanted) for key, wanted in values.items())
    assert torch.equal(logits(model), logits(plain(values, hidden=128)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exponents_bit_equal_to_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    """`scale_fmt` "ue8m0": written with its codes, loaded by it, and given float32 scales losslessly."""
    w = weights((256, 384), dtype, "heavy")
    w[128:, :128] = 0
    save_file({"fc.weight": w}, tmp_path / "in.safetensors")
    report = ckptmap.convert(tmp_path / "in.safetensors", tmp_path / "out", to="hf-fp8-ue8m0")
    made = load_file(tmp_path / "out" / "model.safetensors")
    wanted = Fp8Quantize(_Exponents()).convert({"fc.weight": w})
    for key, value in wanted.items():
        assert made[key].dtype == value.dtype
        assert torch.equal(made[key].view(torch.uint8), value.view(torch.uint8)), key
    truth = theirs(wanted["fc.weight"], wanted["fc.weight_scale_inv"], dtype)
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert torch.equal(ckpt["fc.weight"].read(), truth)
    report = ckptmap.convert(tmp_path / "out", tmp_path / "wide", to="hf-fp8")
    assert report.fidelity == {"exact": 1}
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert torch.equal(wide["fc.weight_scale_inv"], made["fc.weight_scale_inv"].float())


class _Exponents(_Quantizer):
    class quantization_config(_Quantizer.quantization_config):
        scale_fmt = "ue8m0"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_blocks_of_32_with_exponents(dtype: torch.dtype, tmp_path: Path) -> None:
    """MXFP8 under DeepSeek's names; 255 is NaN, which no conversion of values takes."""
    codes = torch.randn(64, 128).to(torch.float8_e4m3fn)
    scale = torch.randint(110, 130, (64, 4), dtype=torch.uint8)
    for nan in (False, True):
        scale[3, 1] = 255 if nan else 127
        tensors = {"fc.weight": codes, "fc.weight_scale_inv": scale.view(dtype)}
        save_file(tensors, tmp_path / "in.safetensors")
        with ckptmap.open(tmp_path / "in.safetensors") as ckpt:
            assert ckpt["fc.weight"].encoding == "fp8-ue8m0"
            if not nan:
                wanted = theirs(codes, scale.view(dtype), torch.bfloat16)
                assert torch.equal(ckpt["fc.weight"].read(), wanted)
                continue
            with pytest.raises(SourceError, match=r"fc\.weight: scale_inv: .* 255, which is NaN"):
                ckpt["fc.weight"].read()


@pytest.mark.parametrize("name", ["scale", "weight_scale_inv"])
def test_experts_in_four_bits(name: str, tmp_path: Path) -> None:
    """DeepSeek-V4: codes in int8 beside float8 layers, by hand, as transformers decodes them."""
    wanted = deepseek(tmp_path / "in", name, torch.float8_e8m0fnu)
    file = tmp_path / "in" / "model.safetensors"
    codes = torch.randint(-128, 128, (96, 32), dtype=torch.int8)
    scale = torch.randint(110, 130, (96, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    stem = "model.layers.0.mlp.experts.0.w1"
    save_file({**load_file(file), f"{stem}.weight": codes, f"{stem}.{name}": scale}, file)
    truth = theirs(codes, scale, torch.bfloat16)
    ckptmap.convert(tmp_path / "in", tmp_path / "ranks", to="fsdp2", world_size=3)
    ckptmap.convert(tmp_path / "ranks", tmp_path / "out", to="hf-bf16")
    for place in ("in", "ranks", "out"):
        with ckptmap.open(tmp_path / place) as ckpt:
            assert ckpt[f"{stem}.weight"].encoding == ("dense" if place == "out" else "fp8-fp4")
            assert torch.equal(ckpt[f"{stem}.weight"].read(), truth)
            assert torch.equal(ckpt[f"{stem}.weight"][5:60, 7:40], truth[5:60, 7:40])
            assert torch.equal(ckpt["model.layers.0.mlp.up_proj.weight"].read(), wanted)
            assert len(ckpt) == 4
    save_file({f"{stem}.weight": codes, f"{stem}.{name}": scale[:, :1].contiguous()}, file)
    with pytest.raises(SourceError, match=r"part 'scale', expected float8_e8m0fnu\[96, 2\]"):
        ckptmap.open(tmp_path / "in")


@pytest.mark.parametrize("encoding", [Float8((1, 128)), Fp8((128, 128))], ids=lambda e: e.name)
def test_nan_and_infinity_are_refused(encoding: Any) -> None:
    w = weights((256, 128), torch.bfloat16)
    w[200, 5] = torch.inf
    with pytest.raises(RunError, match="expected finite values, found NaN or infinity in 1 block"):
        encoded(encoding, w)


def test_a_target_takes_what_whole_tiles_cut() -> None:
    from ckptmap.quantization.deepseek_fp8 import Fp8Scheme

    scheme = Fp8Scheme()
    assert scheme.target("a.q_proj.weight", TensorInfo((256, 128), "bfloat16")) is not None
    assert scheme.target("a.q_proj.weight", TensorInfo((200, 128), "bfloat16")) is None


@pytest.mark.parametrize("scale", ["bfloat16", "float16"])
def test_codes_are_of_the_scale_as_it_is_stored(scale: str) -> None:
    values = weights((256, 128), torch.bfloat16)
    encoding = Fp8((128, 128), scale_dtype=scale)
    parts = encoded(encoding, values)
    assert parts["scale_inv"].dtype == getattr(torch, scale)
    exact = parts["scale_inv"].float().repeat_interleave(128, 0)
    wanted = (values.float() / exact).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert float((parts[""].float() - wanted).abs().max()) <= 32, "one step of the largest binade"
    error = decoded(encoding, info_of(values), parts).float() - values.float()
    assert float(error.norm() / values.float().norm()) < 0.04
