"""Codes move between torchao's NF4 and bitsandbytes bit for bit, and scales without loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

import ckptmap
from ckptmap.errors import PlanError, RunError
from ckptmap.live.quantized.nf4_torchao import to_torchao
from ckptmap.quantization.blockwise.eight_bit_scales import ScaleLevels
from ckptmap.quantization.bnb import double_quant as bnb_nested
from ckptmap.quantization.nf4 import scales as nf4_recode
from ckptmap.quantization.nf4.encoding import NF4
from ckptmap.tensors import Box
from tests.support.bnb_cases import (
    HEAVY,
    Layers,
    bnb_file,
    calm,
    codes_of,
    linear4bit,
    refused,
    same,
    weight,
)
from tests.support.examples import examples

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WORLDS = (1, 2, 3, 4, 8)


# ------------------------------------------------------------------------------- between libraries


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("block, scaler_block", [(64, 256), (32, 8), (128, 1)])
def test_torchao_to_bitsandbytes_keeps_codes(
    dtype: torch.dtype, block: int, scaler_block: int, tmp_path: Path
) -> None:
    theirs = to_nf4(calm((256, 256), dtype), block, scaler_block)
    torch.save({"fc.weight": theirs}, tmp_path / "ao.pt")
    plan = ckptmap.plan(tmp_path / "ao.pt", "hf-bnb-nf4")
    assert [step.fidelity for step in plan.steps] == ["codes"]
    report = plan.execute(tmp_path / "out")
    assert report.errors["fc.weight"] < 4e-3
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["fc.weight"].view(-1), theirs.quantized_data)
    scale = theirs.dequantize_scalers(
        theirs.quantized_scalers, theirs.quantization_factor, scaler_block
    )
    same(stored["fc.weight.absmax"], scale.float().view(-1))
    checked = ckptmap.verify(tmp_path / "out", tmp_path / "ao.pt")
    assert checked.ok and 0 < checked.errors["fc.weight"] < 4e-3


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("block", [32, 64, 4096])
def test_bitsandbytes_to_torchao_keeps_codes(
    dtype: torch.dtype, block: int, double: bool, tmp_path: Path
) -> None:
    source = bnb_file(tmp_path, calm((128, 256), dtype), "nf4", double, block)
    report = ckptmap.convert(source, tmp_path / "ao", "hf-nf4")
    assert report.fidelity["codes"] == 1 and 0 < report.errors["fc.weight"] < 1e-2
    data, packed = codes_of(tmp_path / "ao", "quantized_data"), codes_of(source, "")
    rows = packed.view(128, -1)
    zeros = torch.zeros(128, dtype=torch.bool)
    zeros[1] = block <= 256  # a zero row's codes are those of zero already
    assert torch.equal(data, packed) and bool((rows[zeros] == 0x77).all())
    with ckptmap.open(tmp_path / "ao") as ckpt, ckptmap.open(source) as origin:
        lazy = ckpt["fc.weight"]
        encoding = lazy.encoding_
        assert isinstance(encoding, NF4) and encoding.block_size == block
        parts = {n: lazy.read_part(n, Box.whole(p.info.shape)) for n, p in lazy.parts.items()}
        live: Any = to_torchao(parts, lazy.info, encoding)
        same(live.get_original_weight(), lazy.read())
        assert not block <= 256 or not bool(lazy[1].any()), "zeros stay zeros"
        assert ckptmap.verify(tmp_path / "ao", origin).ok


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_exact_scales_carry_every_bit_there_and_back(
    dtype: torch.dtype, double: bool, tmp_path: Path
) -> None:
    w = weight((96, 128), dtype, outliers=not double)  # outliers x30, tiny rows
    source = bnb_file(tmp_path, w, "nf4", double)
    with ckptmap.open(source) as origin:
        expected = origin["fc.weight"].read()
    report = ckptmap.convert(
        source, tmp_path / "ao", "fsdp2-nf4", world_size=2, exact_scales=("*",)
    )
    assert report.fidelity["exact"] == 1 and not report.errors
    assert ckptmap.verify(tmp_path / "ao", source).ok
    with ckptmap.open(tmp_path / "ao") as ckpt:
        lazy = ckpt["fc.weight"]
        same(lazy.read(), expected)
        same(lazy[17:40, 3:90], expected[17:40, 3:90].contiguous())
        encoding = lazy.encoding_
        assert isinstance(encoding, NF4) and encoding == NF4(64, 1, True)
        parts = {n: lazy.read_part(n, Box.whole(p.info.shape)) for n, p in lazy.parts.items()}
        live: Any = to_torchao(parts, lazy.info, encoding)
        assert live.dtype == torch.float32, "torchao has one dtype for parts and values"
        same(live.get_original_weight().to(dtype), expected)
    back = ckptmap.convert(tmp_path / "ao", tmp_path / "back", "hf-bnb-nf4")
    assert back.fidelity["exact"] == 1
    with ckptmap.open(tmp_path / "back") as ckpt:
        same(ckpt["fc.weight"].read(), expected)
    assert torch.equal(codes_of(tmp_path / "back", ""), codes_of(source, ""))


def test_undoing_double_quantization_is_exact(tmp_path: Path) -> None:
    source = bnb_file(tmp_path, calm((64, 128), torch.bfloat16), "fp4", True)
    report = ckptmap.convert(source, tmp_path / "single", "hf-bnb-fp4")
    assert report.fidelity["exact"] == 1
    with ckptmap.open(tmp_path / "single") as ckpt, ckptmap.open(source) as origin:
        same(ckpt["fc.weight"].read(), origin["fc.weight"].read())
    report = ckptmap.convert(tmp_path / "single", tmp_path / "double", "hf-bnb-fp4-dq")
    assert report.fidelity["codes"] == 1 and report.errors["fc.weight"] < 1e-2
    assert torch.equal(codes_of(tmp_path / "double", ""), codes_of(source, ""))
    kept = ckptmap.plan(source, "hf-bnb-fp4-dq")
    assert kept.fidelities()["bytes"] == 3


@pytest.mark.parametrize("to, fidelity", [("hf-nf4", "requantize"), ("hf-bnb-nf4", "requantize")])
def test_another_grid_is_requantized(to: str, fidelity: str, tmp_path: Path) -> None:
    source = bnb_file(tmp_path, calm((64, 128), torch.bfloat16), "fp4")
    report = ckptmap.convert(source, tmp_path / "out", to)
    assert report.fidelity[fidelity] == 1 and 1e-2 < report.errors["fc.weight"] < 0.25
    assert ckptmap.verify(tmp_path / "out", source).ok


def test_a_block_size_that_bitsandbytes_has_not_is_requantized(tmp_path: Path) -> None:
    torch.save({"fc.weight": to_nf4(calm((64, 64), torch.bfloat16), 16, 4)}, tmp_path / "ao.pt")
    assert ckptmap.plan(tmp_path / "ao.pt", "hf-bnb-nf4").fidelities() == {"requantize": 1}


def test_layers_that_bitsandbytes_does_not_load_are_refused_by_name(tmp_path: Path) -> None:
    theirs = to_nf4(calm((64, 64), torch.bfloat16), 64, 64)
    for fqn in ("h.0.attn.c_attn.weight", "model.embed_tokens.weight"):
        torch.save({fqn: theirs}, tmp_path / "ao.pt")
        with refused(
            PlanError,
            "CKM203",
            match=f"{fqn}: cannot be bnb-nf4: .* not the weight of one linear module",
        ):
            ckptmap.plan(tmp_path / "ao.pt", "hf-bnb-nf4")
        ckptmap.plan(tmp_path / "ao.pt", "hf-bf16").require_resolved()


# ------------------------------------------------------------------------------- scales


@examples(200)
@given(
    st.lists(
        st.floats(2**-120, 2**127, width=32) | st.floats(-1e4, 1e4, width=32),
        min_size=1,
        max_size=64,
    )
)
def test_any_scale_has_an_exact_scaler_and_factor(values: list[float]) -> None:
    scales = torch.tensor([v for v in values if v == 0 or abs(v) > 2**-120] or [1.0])
    scalers, factor = nf4_recode.exact_scalers(scales)
    same((scalers / factor).view(-1) + 0.0, scales + 0.0)


def test_a_scale_out_of_reach_is_refused() -> None:
    with refused(RunError, "CKM309", match="no float32 division gives 1 of the block scales"):
        nf4_recode.exact_scalers(torch.tensor([1e-42]))


def _passes(at: Path, forms: tuple[str, str], folder: Path, count: int) -> list[list[bytes]]:
    """Bytes of the weights after each conversion to the one form and on to the other."""
    found: list[list[bytes]] = []
    for turn in range(count):
        found.append([])
        for form in forms:
            ckptmap.convert(at, folder / f"{turn}-{form}", f"hf-{form}")
            at = folder / f"{turn}-{form}"
            found[-1].append(next(at.glob("*.safetensors")).read_bytes())
    return found


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("block, outliers", [(64, False), (256, True)])
def test_repeated_conversions_do_not_drift(
    block: int, outliers: bool, double: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """torchao -> bitsandbytes -> torchao ...: the first pass brings scales onto the grids of both,
    and from then on every byte stays."""
    w = calm((256, 512), dtype)
    w[:, :2] *= HEAVY if outliers else 1
    at = bnb_file(tmp_path, w, "nf4", double, block)
    forms = ("nf4", "bnb-nf4-dq" if double else "bnb-nf4")
    found = _passes(at, forms, tmp_path, 4)
    assert found[1:] == [found[-1]] * 3
    errors = []
    with ckptmap.open(at) as origin:
        given = origin["fc.weight"].read().double()
    for turn in (0, 3):
        with ckptmap.open(tmp_path / f"{turn}-{forms[0]}") as ckpt:
            now = ckpt["fc.weight"].read().double()
        errors.append(float((now - given).norm() / given.norm()))
    limit = 5e-2 if outliers else 5e-3
    assert errors[0] < limit and errors[1] < limit * (2 if double else 1), errors


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_grid_of_torchaos_own_is_found_again(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its mean and factors cannot be told from single scales: there and back, the same values."""
    w = calm((256, 512), dtype)
    w[1] = w[2]  # torchao makes zeros something else
    torch.save({"fc.weight": to_nf4(w, 64, 256)}, tmp_path / "ao.pt")
    ckptmap.convert(tmp_path / "ao.pt", tmp_path / "bnb", "hf-bnb-nf4")
    ckptmap.convert(tmp_path / "bnb", tmp_path / "ao", "hf-nf4")
    with ckptmap.open(tmp_path / "ao") as ckpt, ckptmap.open(tmp_path / "ao.pt") as origin:
        same(ckpt["fc.weight"].read(), origin["fc.weight"].read())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_own_double_quantization_is_found_again(kind: str, tmp_path: Path) -> None:
    source = bnb_file(tmp_path, calm((256, 512), torch.bfloat16), kind, True)
    ckptmap.convert(source, tmp_path / "single", f"hf-bnb-{kind}")
    ckptmap.convert(tmp_path / "single", tmp_path / "double", f"hf-bnb-{kind}-dq")
    with ckptmap.open(tmp_path / "double") as ckpt, ckptmap.open(source) as origin:
        same(ckpt["fc.weight"].read(), origin["fc.weight"].read())


@examples(30)
@given(
    units=st.integers(1, 12), unit=st.sampled_from([1, 2, 16, 256]), spread=st.floats(0, 2),
    dtype=st.sampled_from(sorted(DTYPES)), double=st.booleans(), power=st.integers(-6, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_scales_on_a_grid_stay_where_they_are(
    units: int, unit: int, spread: float, dtype: str, double: bool, power: int, seed: int
) -> None:
    """Whatever their spread, however few; scales of zero among them."""
    maker = torch.Generator().manual_seed(seed)
    s = torch.randn(units * unit, generator=maker).mul(spread).exp().mul(10.0**power).clamp(max=3e4)
    s[seed % len(s) :: 5] = 0
    levels = torch.arange(-128, 128).float()
    grid = ScaleLevels(levels, unit, DTYPES[dtype], divides=True)
    if double:
        grid = ScaleLevels(bnb_nested.dynamic_map(), 256, torch.float32, divides=False)
    once = grid.coded(s, *grid.fitted(s)).decoded.float()
    least = 1e-5 if dtype == "fp16" and not double else 0  # factors end at 65504
    assert float((once - s).abs().max()) <= max(float(s.max()) / 60, least), "half of a level"
    same(grid.coded(once, *grid.fitted(once)).decoded.float(), once)


def test_outliers_never_turn_the_sign_of_a_block(tmp_path: Path) -> None:
    """Two columns x600: in 8 bits with a common step some of torchao's scales decode below zero."""
    w = torch.randn(128, 1024, generator=torch.Generator().manual_seed(5)) * 0.02
    w[:, :2] *= 600
    theirs = to_nf4(w, 64, 256)
    decoded = theirs.dequantize_scalers(theirs.quantized_scalers, theirs.quantization_factor, 256)
    assert int((decoded <= 0).sum()) > 20, "torchao itself turns them"
    save_file({"fc.weight": w, "calm.weight": calm((64, 64), w.dtype)}, tmp_path / "m.safetensors")
    report = ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "out", "hf-nf4")
    assert any(note.startswith("fc.weight: scales are kept exactly") for note in report.notes)
    assert not list(tmp_path.glob(".out*")), "the first attempt leaves nothing"
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert ckpt["fc.weight"].encoding_ == NF4(64, 1, True)
        assert ckpt["calm.weight"].encoding_ == NF4(64, 64)
        found = ckpt["fc.weight"].read()
    assert bool((found.sign() * w.sign() >= 0).all())
    assert ckptmap.verify(tmp_path / "out", tmp_path / "m.safetensors").ok
    source = bnb_file(tmp_path, w)
    with ckptmap.open(source) as origin:
        expected = origin["fc.weight"].read()
    report = ckptmap.convert(source, tmp_path / "kept", "hf-nf4")
    assert report.fidelity["exact"] == 1
    with ckptmap.open(tmp_path / "kept") as ckpt:
        same(ckpt["fc.weight"].read(), expected)
    report = ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "dq", "hf-bnb-nf4-dq")
    with ckptmap.open(tmp_path / "dq") as ckpt:
        assert bool((ckpt["fc.weight"].read().sign() * w.sign() >= 0).all())


def test_exact_scales_move_as_bytes_beside_a_tensor_that_is_recoded(tmp_path: Path) -> None:
    """Single quantization to double: if most blocks dwarf the rest, it stays, beside one that does not."""
    w = torch.randn(128, 1024, generator=torch.Generator().manual_seed(5)) * 0.02
    w[:, 64:] *= 60000
    w[:, 128:192] *= 4
    save_file({"fc.weight": w, "calm.weight": calm((64, 64), w.dtype)}, tmp_path / "m.safetensors")
    ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "single.pt", "full-bnb-nf4")
    report = ckptmap.convert(tmp_path / "single.pt", tmp_path / "out.pt", "full-bnb-nf4-dq")
    assert report.fidelity == {"bytes": 1, "codes": 1}
    assert any(note.startswith("fc.weight: scales are kept exactly") for note in report.notes)
    assert ckptmap.verify(tmp_path / "out.pt", tmp_path / "single.pt").ok


def test_scales_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    state = Layers({"fc": linear4bit(calm((64, 128), torch.bfloat16), "nf4", False)}).state_dict()
    state["fc.weight.absmax"][7] = torch.nan
    save_file(state, tmp_path / "m.safetensors")
    with refused(
        RunError,
        "CKM309",
        match="fc.weight: expected finite scales, found NaN or infinity in 1 of 128",
    ):
        ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "out", "hf-nf4")
    assert ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "same", "hf").fidelity == {
        "bytes": 3
    }


def test_zero_blocks_of_a_gpu_stay_zero(tmp_path: Path) -> None:
    """bitsandbytes on CUDA gives a zero block the code of -1; its absmax is 0, torchao's is not."""
    state = Layers({"fc": linear4bit(calm((64, 128), torch.bfloat16), "nf4", False)}).state_dict()
    state["fc.weight"].view(64, 64)[1] = 0
    save_file(state, tmp_path / "m.safetensors")
    for to in ("hf-nf4", "hf-bnb-nf4-dq"):
        ckptmap.convert(tmp_path / "m.safetensors", tmp_path / to, to)
        with ckptmap.open(tmp_path / to) as ckpt:
            assert not bool(ckpt["fc.weight"][1].any())
    ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "exact", "hf-nf4", exact_scales=("*",))
    assert torch.equal(codes_of(tmp_path / "exact", "quantized_data"), state["fc.weight"].view(-1))


def test_a_coarse_grid_is_verified_by_its_codes_not_by_its_error(tmp_path: Path) -> None:
    """Values between two steps of FP4, beside one that stands out: far off, and as they should be."""
    values = torch.full((64, 64), 0.09)
    values[:, 0] = 1
    save_file({"fc.weight": values}, tmp_path / "in.safetensors")
    ckptmap.convert(tmp_path / "in.safetensors", tmp_path / "int8.pt", to="full-int8")
    ckptmap.convert(tmp_path / "int8.pt", tmp_path / "out.pt", to="full-bnb-fp4")
    report = ckptmap.verify(tmp_path / "out.pt", against=tmp_path / "int8.pt")
    assert report.ok and report.errors["fc.weight"] > 0.3
    ckptmap.convert(tmp_path / "in.safetensors", tmp_path / "nf4.pt", to="full-nf4")
    other = ckptmap.verify(tmp_path / "out.pt", against=tmp_path / "nf4.pt")
    assert not other.ok and "differ from an encoding of the source" in other.problems[0]


def test_zeros_without_their_sign_are_no_error(tmp_path: Path) -> None:
    values = torch.zeros(64, 64)
    values[::2] = -0.0
    save_file({"fc.weight": values}, tmp_path / "in.safetensors")
    report = ckptmap.convert(tmp_path / "in.safetensors", tmp_path / "out", "hf-nf4")
    checked = ckptmap.verify(tmp_path / "out", tmp_path / "in.safetensors")
    assert checked.ok and report.errors == checked.errors == {"fc.weight": 0.0}
