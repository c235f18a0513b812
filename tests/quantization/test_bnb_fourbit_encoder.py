"""bitsandbytes 4-bit, written: its own codes and scales, in directories that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import ckptmap
from ckptmap.errors import PlanError, RunError
from ckptmap.quantization.bnb.fourbit import FourBit, Nested
from ckptmap.quantization.nf4.encoding import NF4
from ckptmap.tensors import TensorInfo
from tests.conftest import Device
from tests.support import bnb_cases
from tests.support.bnb_cases import decoded_weights, llama, logits, quantized, refused, same, weight
from tests.support.examples import examples
from tests.support.library import Library

bnb = Library("bitsandbytes")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def encoded(encoding: FourBit | NF4, w: Tensor, split: int) -> dict[str, Tensor]:
    """The parts that the encoder makes of values fed in pieces."""
    info = TensorInfo(tuple(w.shape), str(w.dtype).removeprefix("torch."))
    encoder, flat = encoding.encoder(info, str(w.device)), w.reshape(-1)
    found: dict[str, list[Tensor]] = {}
    for at in range(0, flat.numel(), split):
        for write in encoder.feed(at, flat[at : at + split]):
            found.setdefault(write.part, []).append(write.values)
    for write in encoder.finish():
        found.setdefault(write.part, []).append(write.values)
    return {name: torch.cat(values) for name, values in found.items()}


@examples(60)
@given(
    kind=st.sampled_from(["nf4", "fp4"]),
    dtype=st.sampled_from(sorted(DTYPES)),
    block=st.sampled_from([32, 64, 128, 1024, 4096]),
    shape=st.tuples(st.integers(3, 90), st.integers(2, 200)),
    seed=st.integers(0, 99),
    pieces=st.integers(1, 5),
)
def test_codes_and_absmax_are_those_of_bitsandbytes(
    kind: str, dtype: str, block: int, shape: tuple[int, int], seed: int, pieces: int
) -> None:
    w = weight(shape, DTYPES[dtype], seed)
    packed, state = bnb.functional.quantize_4bit(w, blocksize=block, quant_type=kind)
    found = encoded(FourBit(kind, block), w, pieces * block)
    assert torch.equal(found[""], packed.view(-1))
    same(found["absmax"], state.absmax)
    same(found["quant_map"], state.code)


def test_double_quantization_is_as_near_as_bitsandbytes_own() -> None:
    """Not its bytes: those depend on its threads and on a table that is not exact."""
    w = weight((512, 1024), torch.float32, outliers=False)
    w[2] = w[3]  # a tiny row would be another test: its scales need to be exact
    packed, state = bnb.functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
    _, single = bnb.functional.quantize_4bit(w, quant_type="nf4")
    found = encoded(FourBit("nf4", nested=Nested()), w, 1 << 16)
    assert torch.equal(found[""], packed.view(-1))
    same(found["nested_quant_map"], state.state2.code)
    torch.testing.assert_close(found["nested_absmax"], state.state2.absmax, rtol=1e-5, atol=0)
    steps = found["absmax"].int() - state.absmax.int()
    assert int(steps.abs().max()) <= 1 and float((steps != 0).float().mean()) < 0.01
    blob = json.loads(bytes(found["quant_state.bitsandbytes__nf4"].tolist()))
    assert blob["nested_offset"] == pytest.approx(float(state.offset), rel=1e-5)
    theirs = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    scale = found["nested_absmax"].repeat_interleave(256)[: found["absmax"].numel()]
    mine = found["nested_quant_map"][found["absmax"].int()] * scale + blob["nested_offset"]
    errors = [float((x - single.absmax).square().mean()) for x in (mine, theirs)]
    assert errors[0] <= errors[1] * 1.001


def test_non_finite_values_are_refused_by_name(tmp_path: Path) -> None:
    w = weight((64, 128), torch.bfloat16)
    w[3, 5] = torch.inf
    save_file({"layers.0.fc.weight": w}, tmp_path / "m.safetensors")
    with refused(RunError, "CKM309", match="layers.0.fc.weight: .*flat elements 384 to 447"):
        ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "out", "hf-bnb-nf4")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["full-bnb-nf4-dq", "full-bnb-fp4-dq"])
@pytest.mark.parametrize(
    ("dtype", "largest"), [("fp32", 1e36), ("fp16", 65504.0)], ids=["mean", "scales"]
)
def test_scales_that_overflow_once_they_are_in_8_bits_are_refused_by_name(
    to: str, dtype: str, largest: float, tmp_path: Path
) -> None:
    """The sum of 4096 absmax that their mean is made of; or absmax that 8 bits round upwards."""
    maker = torch.Generator().manual_seed(2)
    w = torch.rand(512, 512, generator=maker)
    blocks = w.view(-1, 64)
    blocks /= blocks.amax(1, keepdim=True)
    blocks *= torch.rand(len(blocks), 1, generator=maker) * 0.3 + 0.7
    blocks[::7] /= blocks[::7].amax(1, keepdim=True)
    save_file({"layers.0.fc.weight": (w * largest).to(DTYPES[dtype])}, tmp_path / "m.safetensors")
    with refused(RunError, "CKM309", match="layers.0.fc.weight: [0-9,]* block scales overflow"):
        ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "out", to)
    assert not (tmp_path / "out").exists()
    ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "out", to, exact_scales=("*",))
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert bool(ckpt["layers.0.fc.weight"][:].isfinite().all())


@pytest.mark.parametrize(
    "encoding",
    [FourBit("nf4"), FourBit("fp4", 128), FourBit("nf4", nested=Nested()), NF4(64, 1, True)],
    ids=["nf4", "fp4", "double", "exact"],
)
def test_the_encoder_runs_on_any_device(encoding: FourBit | NF4, device: Device) -> None:
    w = weight((64, 128), torch.bfloat16, outliers=False)[3:]
    info, flat = TensorInfo((61, 128), "bfloat16"), w.reshape(-1)
    with device.mode():
        encoder = encoding.encoder(info, device.name)
        given = torch.empty_like(flat, device=device.name) if device.fake else flat.to(device.name)
        (write,) = encoder.feed(0, given)
        assert write.values.device.type == device.name and write.values.shape == (61 * 128 // 2,)
    if not device.fake:
        found = {part.part: part.values for part in [write, *encoder.finish()]}
        for name, part in encoded(encoding, w, 1 << 20).items():
            same(found[name].cpu(), part)


# ------------------------------------------------------------------------------- transformers


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_transformers_loads_the_model_that_it_would_have_quantized(
    kind: str, dense: Path, tmp_path: Path
) -> None:
    report = ckptmap.convert(dense, tmp_path / "out", f"hf-bnb-{kind}", max_shard_nbytes=60_000)
    assert report.fidelity == {"bytes": 7, "quantize": 14}
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    mine, theirs = load(tmp_path / "out"), quantized(dense, kind, False)
    found, expected = decoded_weights(mine), decoded_weights(theirs)
    assert list(found) == list(expected)
    for fqn, value in expected.items():
        same(found[fqn], value)
    same(logits(mine), logits(theirs))
    checked = ckptmap.verify(tmp_path / "out", dense)
    assert checked.ok and len(checked.errors) == 14


def test_double_quantized_too(dense: Path, tmp_path: Path) -> None:
    ckptmap.convert(dense, tmp_path / "out", "hf-bnb-nf4-dq")
    mine = load(tmp_path / "out")
    found, theirs = decoded_weights(mine), quantized(dense, "nf4", True)
    with ckptmap.open(tmp_path / "out") as ckpt:
        for fqn, value in found.items():
            same(ckpt[fqn].read(), value)
    torch.testing.assert_close(logits(mine), logits(theirs), rtol=0, atol=0.02)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["bnb_4bit_use_double_quant"] is True
    assert ckptmap.verify(tmp_path / "out", dense).ok


def test_config_json_says_what_is_written(dense: Path, tmp_path: Path) -> None:
    keep = ("model.layers.1.self_attn.*",)
    ckptmap.convert(dense, tmp_path / "out", "hf-bnb-nf4", no_encode=keep)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "bitsandbytes" and config["bnb_4bit_quant_type"] == "nf4"
    attention = {f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"}
    assert set(config["llm_int8_skip_modules"]) == {"lm_head", "model.embed_tokens", *attention}
    model = load(tmp_path / "out")
    assert len(decoded_weights(model)) == 10
    source = load_file(dense / "model.safetensors")
    for name in attention:
        same(model.get_parameter(f"{name}.weight").data, source[f"{name}.weight"])
    ckptmap.convert(tmp_path / "out", tmp_path / "again", "hf")  # bytes: its config stays
    assert (tmp_path / "again" / "config.json").read_bytes() == (
        tmp_path / "out" / "config.json"
    ).read_bytes()
    ckptmap.convert(
        tmp_path / "out", tmp_path / "nf4", "hf-nf4", no_encode=keep
    )  # transformers knows no such
    assert "quantization_config" not in json.loads((tmp_path / "nf4" / "config.json").read_text())
    ckptmap.convert(tmp_path / "nf4", tmp_path / "back", "hf-bnb-nf4", no_encode=keep)
    back = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert back == config


@pytest.mark.parametrize("to", ["bnb-nf4", "bnb-int8", "ct-int8", "int8"])
def test_a_tied_head_that_no_file_holds_stays_dense(to: str, tmp_path: Path) -> None:
    """Were it not named in the config, transformers would look for its quantized weight."""
    model = llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    ckptmap.convert(tmp_path / "tied", tmp_path / "out", f"hf-{to}")
    found, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values())
    same(found.lm_head.weight.data, model.lm_head.weight.data)
    assert (logits(found) - logits(model)).norm() < 0.3 * logits(model).norm()


def test_float64_cannot_become_bnb_nf4(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(64, 64, dtype=torch.float64)}, tmp_path / "m.safetensors")
    with refused(PlanError, "CKM203", match="fc.weight: cannot be bnb-nf4: .*found float64"):
        ckptmap.plan(tmp_path / "m.safetensors", "hf-bnb-nf4", encode=("fc.weight",))


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_codes_in_another_storage_are_those_of_bitsandbytes(storage: str) -> None:
    w = bnb_cases.weight((64, 96), torch.bfloat16)
    layer = bnb_cases.linear4bit(w, "nf4", False, storage=getattr(torch, storage))
    encoding, info = FourBit("nf4", storage=storage), TensorInfo((64, 96), "bfloat16")
    encoder = encoding.encoder(info, "cpu")
    flat = w.reshape(-1)
    codes = [
        write for at in (0, 2048) for write in encoder.feed(at, flat[at : 2048 if not at else None])
    ]
    made = torch.cat([write.values for write in codes])
    assert made.dtype == getattr(torch, storage)
    assert torch.equal(made.view(torch.uint8), layer.weight.data.view(-1).view(torch.uint8))
    assert [write.box.offsets[0] for write in codes] == [0, 1024 // made.element_size()]
