"""Codes of GGUF's blocks that another form has, too, are kept: no weight is quantized twice.

The files are the `gguf` package's, and what is written is decoded by the library that it is written for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import load_file
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
from torchao.quantization import Int8Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ckptmap
from ckptmap.errors import RunError
from ckptmap.storage import lazy_tensor
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box
from tests.operations.test_as_metadata import stated
from tests.support.bnb_cases import same
from tests.support.gguf_files import blocks, dequantized, write
from tests.support.gguf_models import MODELS, build, logits, write_model

LAYER = "model.layers.0.mlp.down_proj"
WEIGHT = f"{LAYER}.weight"


def finite(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random blocks with all codes, whose scales are finite: none has all bits of its exponent."""
    raw = blocks(kind, shape)
    count = {"Q8_0": 34, "Q4_0": 18, "Q5_0": 22, "MXFP4": 17}[kind]
    cut = raw.reshape(-1, count)
    cut[:, 0 if kind == "MXFP4" else 1] &= 0xBF
    cut[0, : 1 if kind == "MXFP4" else 2] = 0
    return raw


def source(
    path: Path, kind: str, name: str = WEIGHT, shape: tuple[int, ...] = (48, 96)
) -> tuple[Path, torch.Tensor]:
    raw = finite(kind, shape)
    norm = ("F32", np.ones(shape[-1], np.float32))
    write(path, {name: (kind, raw), "norm.weight": norm}, arch="none")
    return path, dequantized(kind, raw)


def by_compressed_tensors(parts: dict[str, torch.Tensor], form: str) -> torch.Tensor:
    state = {k.removeprefix(f"{LAYER}."): v for k, v in parts.items() if k.startswith(LAYER)}
    if form == "ct-mxfp4":
        scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
        name = "mxfp4-pack-quantized"
    else:
        bits = int(form.removeprefix("ct-int"))
        args = QuantizationArgs(num_bits=bits, strategy="group", group_size=32)
        scheme, name = QuantizationScheme(targets=["Linear"], weights=args), "pack-quantized"
    decoded: torch.Tensor = BaseCompressor.load_from_registry(name).decompress(state, scheme)[
        "weight"
    ]
    return decoded


def by_torchao(path: Path) -> torch.Tensor:
    file = next(path.glob("*.safetensors"))
    tensors, _ = unflatten_tensor_state_dict(load_file(file), stated(file) or {})
    found: Any = tensors[WEIGHT]
    assert isinstance(found, Int8Tensor | MXTensor)
    decoded: torch.Tensor = found.dequantize()
    return decoded


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("Q8_0", "ct-int8"),
        ("Q8_0", "int8"),
        ("Q4_0", "ct-int4"),
        ("MXFP4", "ct-mxfp4"),
        ("MXFP4", "torchao-mxfp4"),
    ],
)
def test_codes_are_kept(kind: str, form: str, tmp_path: Path) -> None:
    path, truth = source(tmp_path / "in.gguf", kind)
    report = ckptmap.convert(path, tmp_path / "out", to=f"hf-{form}", encode=(WEIGHT,))
    fidelity = "codes" if kind == "MXFP4" else "exact"  # ggml reads the code of -0 as 0
    assert report.fidelity[fidelity] == 1 and "requantize" not in report.fidelity, report
    parts = load_file(next((tmp_path / "out").glob("*.safetensors")))
    is_ct = form.startswith("ct-")
    found = by_compressed_tensors(parts, form) if is_ct else by_torchao(tmp_path / "out")
    if kind == "MXFP4":
        found = found + 0.0
    same(found, truth.to(found.dtype))
    if form != "ct-mxfp4":  # compressed-tensors decodes it to bfloat16, which holds these values
        assert found.dtype == torch.float32
    assert ckptmap.verify(tmp_path / "out", against=path).ok


@pytest.mark.parametrize(("kind", "form", "dtype"), [
    ("Q8_0", "ct-int8", torch.float32), ("Q4_0", "ct-int4", torch.float32), ("MXFP4", "ct-mxfp4", torch.bfloat16),
])  # fmt: skip
def test_transformers_computes_the_same(
    kind: str, form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Rows of q and k lie in another order in GGUF; the embedding, which no library reads in codes, is dense."""
    model = replace(MODELS["llama"], config={**MODELS["llama"].config, "num_hidden_layers": 1})
    path = write_model(model, build(model), tmp_path / "in.gguf", kind)
    report = ckptmap.convert(path, tmp_path / "out", to=f"hf-{form}")
    assert "requantize" not in report.fidelity and "quantize" not in report.fidelity, report
    assert any("embed_tokens.weight: has codes of GGUF files" in n for n in report.notes)
    ckptmap.convert(path, tmp_path / "dense", to="hf-fp32")
    loaded = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype).eval()
        for name in ("out", "dense")
    ]
    with ckptmap.open(tmp_path / "out") as ckpt:
        kept = [fqn for fqn in ckpt if ckpt[fqn].quantized]
    assert len(kept) == 8 and "lm_head.weight" in kept
    assert np.array_equal(*map(logits, loaded))


def test_experts_of_gpt_oss_keep_their_codes(tmp_path: Path) -> None:
    """Three stacks of GGUF in two of gpt-oss, transposed, with the bytes that transformers decodes."""
    model = replace(MODELS["gpt_oss"], config={**MODELS["gpt_oss"].config, "num_hidden_layers": 1})
    path = write_model(model, build(model), tmp_path / "in.gguf", "MXFP4")
    report = ckptmap.convert(path, tmp_path / "out", to="hf-mxfp4")
    assert report.fidelity["codes"] == 2 and "requantize" not in report.fidelity
    ckptmap.convert(path, tmp_path / "dense", to="hf-fp32")
    found, truth = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "dense"))
    for name in ("gate_up_proj", "down_proj"):
        stem = f"model.layers.0.mlp.experts.{name}"
        decoded = convert_moe_packed_tensors(
            found[f"{stem}_blocks"], found[f"{stem}_scales"], dtype=torch.float32
        )
        assert torch.equal(decoded, truth[stem])


def test_scales_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie among the codes, and no tensor is held whole for them."""
    path, _ = source(tmp_path / "in.gguf", "Q8_0")
    monkeypatch.setattr(lazy_tensor, "SCALES_AT_ONCE", 7)
    largest = 0
    read_part = LazyTensor.read_part

    def watched(self: LazyTensor, part: str, box: Box, *more: Any) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, box.numel)
        return read_part(self, part, box, *more)

    monkeypatch.setattr(LazyTensor, "read_part", watched)
    with ckptmap.open(path) as ckpt:
        scales = ckpt[WEIGHT].read_scales()
    assert largest == 6 * 34
    raw = torch.from_numpy(finite("Q8_0", (48, 96))).view(-1, 34)
    same(scales.view(-1), raw[:, :2].clone().view(torch.float16).view(-1).float())


@pytest.mark.parametrize(("kind", "form"), [("Q8_0", "ct-int8"), ("MXFP4", "ct-mxfp4")])
def test_scales_that_are_not_finite_are_refused(kind: str, form: str, tmp_path: Path) -> None:
    raw = finite(kind, (48, 96))
    raw[5, : 1 if kind == "MXFP4" else 2] = 255
    path = write(tmp_path / "in.gguf", {WEIGHT: (kind, raw)}, arch="none")
    with pytest.raises(RunError, match="expected finite scales") as caught:
        ckptmap.convert(path, tmp_path / "out", to=f"hf-{form}", encode=(WEIGHT,))
    assert caught.value.code == "CKM309" and WEIGHT in caught.value.message


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q6_K"])
def test_types_with_a_grid_of_their_own_are_quantized_anew(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in.gguf", {WEIGHT: (kind, blocks(kind, (48, 256)))}, arch="none")
    plan = ckptmap.plan(path, "hf-ct-int8", encode=(WEIGHT,))
    assert plan.steps[0].fidelity == "requantize"


def test_a_grid_of_five_bits(tmp_path: Path) -> None:
    """No setup writes it; its codes and scales are those of the `gguf` package all the same."""
    path, truth = source(tmp_path / "in.gguf", "Q5_0")
    with ckptmap.open(path) as ckpt:
        lazy: Any = ckpt[WEIGHT]
        codes = torch.empty(48, 96, dtype=torch.int8)
        for box in (Box((0, 0), (48, 40)), Box((0, 40), (48, 56))):
            part = torch.empty(box.sizes, dtype=torch.int8)
            lazy.read_codes(box, part)
            codes[:, box.offsets[1] : box.offsets[1] + box.sizes[1]] = part
        assert lazy.encoding_.grid(lazy.info).name == "int5"
        scales = lazy.read_scales()
    same((codes.view(48, 3, 32) * scales[..., None]).view(48, 96), truth)
