"""Kept codes are sharded over ranks, on the command line, in live models, in the kit, in benchmarks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

import ckptmap
from ckptmap.quantization.bnb.fourbit import FourBit
from ckptmap.tensors import Box, TensorInfo
from ckptmap.testing.codes import check_codes
from tests.corpus.ranks import run_ranks
from tests.support.bnb_cases import (
    Layers,
    bnb_file,
    calm,
    codes_of,
    linear4bit,
    same,
    truth,
    weight,
)
from tests.support.examples import examples
from tests.support.forked import run_forked
from tests.support.paths import ROOT

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WORLDS = (1, 2, 3, 4, 8)


# ------------------------------------------------------------------------------- cutting


@examples(6)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 6), kind=st.sampled_from(["nf4", "fp4"]),
    double=st.booleans(), dtype=st.sampled_from(sorted(DTYPES)), seed=st.integers(0, 9),
)  # fmt: skip
def test_resharding_is_exact_for_every_shape(
    rows: int, columns: int, kind: str, double: bool, dtype: str, seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Rows need not divide by the world size, nor end on blocks: packed bytes are cut, no values."""
    folder = tmp_path_factory.mktemp("cut")
    w = calm((rows + 1, columns * 24), DTYPES[dtype], seed)
    layer = linear4bit(w, kind, double)
    save_file({f"fc.{k}": v for k, v in layer.state_dict().items()}, folder / "b.safetensors")
    for world in WORLDS:
        ckptmap.convert(folder / "b.safetensors", folder / f"w{world}", "fsdp2", world_size=world)
        with ckptmap.open(folder / f"w{world}") as ckpt:
            same(ckpt["fc.weight"].read(), truth(layer))


@examples(3)
@given(
    rows=st.integers(1, 24), columns=st.integers(1, 4), exact=st.booleans(), seed=st.integers(0, 9),
    order=st.permutations(WORLDS),
)  # fmt: skip
def test_kept_codes_do_not_depend_on_the_world_size(
    rows: int, columns: int, exact: bool, seed: int, order: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """bitsandbytes -> NF4 over any world size, then from one to the next: the same bits."""
    folder = tmp_path_factory.mktemp("cut")
    source = bnb_file(folder, calm((rows + 1, columns * 64), torch.bfloat16, seed))
    scales = ("*",) if exact else ()
    ckptmap.convert(source, folder / "0", "fsdp2-nf4", world_size=1, exact_scales=scales)
    with ckptmap.open(folder / "0") as ckpt:
        expected = ckpt["fc.weight"].read()
    at = folder / "0"
    for world in order:
        ckptmap.convert(
            source, folder / f"a{world}", "fsdp2-nf4", world_size=world, exact_scales=scales
        )
        ckptmap.convert(at, folder / f"b{world}", "fsdp2", world_size=world)
        at = folder / f"b{world}"
        for name in ("a", "b"):
            with ckptmap.open(folder / f"{name}{world}") as ckpt:
                same(ckpt["fc.weight"].read(), expected)


# ------------------------------------------------------------------------------- around it


def test_a_plan_that_keeps_codes_needs_no_torch(tmp_path: Path) -> None:
    source = bnb_file(tmp_path, calm((64, 128), torch.bfloat16), "nf4", True)
    script = (
        "import sys, ckptmap\n"
        f"plan = ckptmap.plan({str(source)!r}, 'hf-nf4', exact_scales=('*',))\n"
        "assert plan.fidelities()['exact'] == 1, plan.fidelities()\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_command_line_has_both_options(tmp_path: Path) -> None:
    source = bnb_file(tmp_path, calm((64, 128), torch.bfloat16))
    run = ["plan", source, "--to", "hf-nf4"]
    kept = run_forked("ckptmap", *run, check=True).stdout
    assert "bnb-nf4(bfloat16) -> nf4(bfloat16)" in kept and "codes 1" in kept
    exact = run_forked("ckptmap", *run, "--exact-scales", check=True).stdout
    assert "exact 1" in exact
    missing = run_forked("ckptmap", *run, "--base", tmp_path / "no")
    assert (missing.returncode, "error[CKM101]" in missing.stderr) == (2, True), missing.stderr


class Net(nn.Module):
    """A frozen linear layer, NF4 or not, and a norm."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(128, 64, bias=False)
        self.fc.weight = nn.Parameter(weight, requires_grad=False)
        self.norm = nn.LayerNorm(16)


@pytest.mark.parametrize("live", [False, True], ids=["dense", "nf4"])
def test_exact_nf4_computes_in_a_live_model_what_bitsandbytes_decodes(
    live: bool, tmp_path: Path
) -> None:
    source = bnb_file(tmp_path, weight((64, 128), torch.bfloat16))
    ckptmap.convert(source, tmp_path / "ao", "hf-nf4", exact_scales=("*",))
    given = torch.zeros(64, 128, dtype=torch.bfloat16)
    model = Net(to_nf4(calm((64, 128), torch.bfloat16), 64, 64) if live else given)
    ckptmap.load(tmp_path / "ao", model)
    x = torch.randn(3, 128).bfloat16()
    with ckptmap.open(source) as ckpt:
        expected = nn.functional.linear(x, ckpt["fc.weight"].read())
    same(linear_nf4(x, model.fc.weight), expected)


def test_a_live_nf4_weight_takes_the_codes_of_bitsandbytes(tmp_path: Path) -> None:
    source = bnb_file(tmp_path, calm((64, 128), torch.bfloat16), "nf4", True, 128)
    model = Net(to_nf4(calm((64, 128), torch.bfloat16, 3), 64, 64))
    report = ckptmap.load(source, model)
    assert not report.quantized
    found: Any = model.fc.weight
    assert found.block_size == 128
    assert torch.equal(found.quantized_data, codes_of(source, ""))
    with ckptmap.open(source) as ckpt:
        expected = ckpt["fc.weight"].read().float()
    error = (found.get_original_weight().float() - expected).norm() / expected.norm()
    assert 0 < float(error) < 1e-2


def test_the_kernels_that_are_timed_are_right() -> None:
    spec = importlib.util.spec_from_file_location(
        "kernels_4bit", ROOT / "benchmarks" / "kernels_4bit.py"
    )
    assert spec is not None and spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    sys.modules["kernels_4bit"] = kernels
    spec.loader.exec_module(kernels)
    kernels.check(kernels._weight(256, "bfloat16"))


@dataclass(frozen=True)
class Lying(FourBit):
    """Says of its codes or scales what is not so."""

    fault: str = ""

    def codes(self, info: Any, parts: Any, box: Box, out: Tensor) -> None:
        super().codes(info, parts, box, out)
        if self.fault == "boxes" and box.offsets[0]:
            out[:1] += 1

    def scales(self, info: Any, parts: Any) -> Tensor:
        found = super().scales(info, parts)
        return found[1:] if self.fault == "shape" else found * (2 if self.fault == "values" else 1)


@pytest.mark.parametrize(
    "fault, message",
    [
        ("boxes", "other codes at"),
        ("shape", "scales torch.Size"),
        ("values", "says exact, but its own codes decode differently"),
    ],
)
def test_the_kit_finds_encodings_that_lie_about_their_codes(fault: str, message: str) -> None:
    encoding, info = Lying("nf4", fault=fault), TensorInfo((64, 64), "bfloat16")
    w = calm((64, 64), torch.bfloat16)
    packed, state = bnb.functional.quantize_4bit(w, quant_type="nf4")
    blob = torch.tensor(list(encoding.blob(info)), dtype=torch.uint8)
    parts = {"": packed, "absmax": state.absmax, "quant_map": state.code, encoding.state: blob}
    check_codes("nf4", FourBit("nf4"), info, parts)
    with pytest.raises(AssertionError, match=message):
        check_codes("nf4", encoding, info, parts)


def test_several_ranks_write_the_same_bytes(tmp_path: Path) -> None:
    """Exact scales are then asked for by name: ranks cannot change a plan that all have agreed on."""
    layers = {
        f"l{i}": linear4bit(calm((96, 64), torch.bfloat16, i), "nf4", False) for i in range(5)
    }
    save_file(Layers(layers).state_dict(), tmp_path / "b.safetensors")
    w = torch.randn(128, 1024, generator=torch.Generator().manual_seed(5)) * 0.02
    w[:, :2] *= 600
    save_file({"fc.weight": w}, tmp_path / "o.safetensors")
    given = [str(tmp_path / "b.safetensors"), str(tmp_path / "o.safetensors"), str(tmp_path)]
    (done, *_) = run_ranks("tests.ranks.recode", 2, given)
    for to in ("fsdp2-nf4", "fsdp2-bnb-nf4-dq"):
        ckptmap.convert(tmp_path / "b.safetensors", tmp_path / "one" / to, to, world_size=3)
        written = sorted(file.name for file in (tmp_path / to).iterdir())
        assert len(written) == 5
        for name in written:
            assert (tmp_path / to / name).read_bytes() == (
                tmp_path / "one" / to / name
            ).read_bytes()
    assert "exact_scales=True" in done.stdout and not (tmp_path / "coarse").exists()
