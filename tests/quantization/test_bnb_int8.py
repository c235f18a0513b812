"""bitsandbytes' LLM.int8: we decode what it wrote as it does, and it loads what we write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import RunError
from ckptmap.quantization.bnb.int8 import BnbInt8
from ckptmap.tensors import Box
from tests.support.int8_models import (
    QUERY,
    bnb_int8,
    decoded,
    dense,
    encoded,
    info_of,
    loaded,
    logits,
    plain,
    weights,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WRITTEN = BnbInt8(extra=(("weight_format", "uint8", ()),))


# ------------------------------------------------------------------------------- read


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_read_as_it_decodes(dtype: torch.dtype, tmp_path: Path) -> None:
    truth = bnb_int8(tmp_path / "in", dtype)
    with ckptmap.open(tmp_path / "in") as ckpt:
        assert set(ckpt.encodings) == {"dense", "bnb-int8"}
        for key, wanted in truth.items():
            assert ckpt[key].encoding == "bnb-int8" and ckpt[key].torch_dtype == dtype
            assert torch.equal(ckpt[key].read(), wanted), key
        assert torch.equal(ckpt[QUERY][7:30, 9:50], truth[QUERY][7:30, 9:50])
        assert not ckpt[QUERY][3].any(), "a row of zeros"


def test_a_torch_file_and_dcp_of_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    truth = bnb_int8(tmp_path / "in", torch.bfloat16)
    state = load_file(tmp_path / "in" / "model.safetensors")
    torch.save(state, tmp_path / "in.pt")
    save_dcp(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for path in (tmp_path / "in.pt", tmp_path / "dcp"):
        with ckptmap.open(path) as ckpt:
            assert torch.equal(ckpt[QUERY].read(), truth[QUERY])


def test_conv1d_is_read_as_the_model_has_it(tmp_path: Path) -> None:
    """GPT-2's Conv1D weights are [in, out]; bitsandbytes holds the transpose."""
    from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    )
    model.to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    config = BitsAndBytesConfig(load_in_8bit=True)
    loaded(tmp_path / "dense", quantization_config=config).save_pretrained(tmp_path / "in")
    with ckptmap.open(tmp_path / "in") as ckpt, ckptmap.open(tmp_path / "dense") as original:
        for key in ("transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_proj.weight"):
            found, wanted = ckpt[key].read(), original[key].read()
            assert ckpt[key].encoding == "bnb-int8" and found.shape == wanted.shape
            assert (found - wanted).norm() < 0.02 * wanted.norm()
            assert torch.equal(ckpt[key][3:9, 5:20], found[3:9, 5:20])
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-fp32")
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "in").ok
    loaded(tmp_path / "out")
    plan = ckptmap.plan(tmp_path / "in", "full-int8", encode=("*c_proj.weight",))
    fidelity = {step.fqn: step.fidelity for step in plan.steps}
    assert fidelity["transformer.h.0.attn.c_proj.weight"] == "requantize", "square, but across"


@pytest.mark.parametrize(("number", "name"), [(1, "col32"), (2, "col_turing"), (3, "col_ampere")])
def test_tiles_of_a_gpus_kernels_are_refused(number: int, name: str, tmp_path: Path) -> None:
    bnb_int8(tmp_path / "in", torch.bfloat16)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors[QUERY.replace("weight", "weight_format")] = torch.tensor(number, dtype=torch.uint8)
    save_file(tensors, tmp_path / "tiles.safetensors")
    # A torch file of bitsandbytes before 0.43 has the name itself, which is no tensor.
    said = {**tensors, QUERY.replace("weight", "weight_format"): name}
    torch.save(said, tmp_path / "name.pt")
    torch.save({"model": said, "step": 3}, tmp_path / "within.pt")
    for file in ("tiles.safetensors", "name.pt", "within.pt"):
        with pytest.raises(ckptmap.CkptmapError, match=f"expected rows, found {name}") as caught:
            ckptmap.open(tmp_path / file)
        assert caught.value.code == "CKM316"


def test_a_format_by_name(tmp_path: Path) -> None:
    truth = bnb_int8(tmp_path / "in", torch.float16)
    tensors: dict[str, Any] = load_file(tmp_path / "in" / "model.safetensors")
    named = {k: "row" if k.endswith("weight_format") else v for k, v in tensors.items()}
    torch.save(named, tmp_path / "old.pt")
    with ckptmap.open(tmp_path / "old.pt") as ckpt:
        assert torch.equal(ckpt[QUERY].read(), truth[QUERY])


def test_files_without_a_format_number(tmp_path: Path) -> None:
    truth = bnb_int8(tmp_path / "in", torch.float16)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    old = {key: value for key, value in tensors.items() if not key.endswith("weight_format")}
    save_file(old, tmp_path / "old.safetensors")
    with ckptmap.open(tmp_path / "old.safetensors") as ckpt:
        assert torch.equal(ckpt[QUERY].read(), truth[QUERY])


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    bnb_int8(tmp_path / "in", torch.float16)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors[QUERY.replace("weight", "SCB")] = torch.ones(63)
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(
        ckptmap.CkptmapError, match=r"'SCB', expected float32\[64\], found float32\[63\]"
    ):
        ckptmap.open(tmp_path / "bad.safetensors")


# ------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("kind", ["normal", "heavy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_bit_equal_to_bitsandbytes(dtype: torch.dtype, kind: str) -> None:
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    w = weights((70, 100), dtype, kind)
    w[5] = 0
    codes, scb, _ = int8_vectorwise_quant(w.to(torch.float16))
    for split in (0, 1, 9):
        parts = encoded(WRITTEN, w, split)
        assert torch.equal(parts[""], codes) and torch.equal(parts["SCB"], scb)
        assert parts["weight_format"].item() == 0
    values = decoded(WRITTEN, info_of(w), parts)
    assert torch.equal(values, int8_vectorwise_dequant(codes, scb).to(dtype))
    assert torch.equal(decoded(WRITTEN, info_of(w), parts, Box((3, 4), (9, 8))), values[3:12, 4:12])
    assert not values[5].any()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1e5, torch.bfloat16), (1e-8, torch.float32), (torch.nan, torch.float32), (torch.inf, torch.float16)],
)  # fmt: skip
def test_rows_that_do_not_fit_float16_are_refused(value: float, dtype: torch.dtype) -> None:
    """bitsandbytes casts to it first: 1e5 becomes infinite, a row of 1e-8 all zero."""
    w = weights((64, 64), dtype)
    w[11] = 0
    w[11, 2] = value
    with pytest.raises(RunError, match=r"1 row does not fit float16.*not so in row 11"):
        encoded(WRITTEN, w, 4)


# ------------------------------------------------------------------------------- written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_transformers_loads_what_we_write(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = bnb_int8(tmp_path / "theirs", dtype)
    ckptmap.convert(tmp_path / "theirs-dense", tmp_path / "out", to="hf-bnb-int8")
    before = load_file(tmp_path / "theirs" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items()), "the same bytes"
    model: Any = loaded(tmp_path / "out")
    query = model.model.layers[0].self_attn.q_proj
    assert type(query).__name__ == "Linear8bitLt"
    reference = logits(loaded(tmp_path / "theirs"))
    assert torch.equal(logits(model), reference)
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert torch.equal(ckpt[QUERY].read(), theirs[QUERY])
        assert ckpt["lm_head.weight"].encoding == "dense", "as transformers leaves it out"
        values = {key: ckpt[key].read() for key in ckpt}
    assert torch.allclose(logits(plain(values)), reference, atol=5e-2)


def test_a_copy_of_a_hugging_face_directory_keeps_every_byte(tmp_path: Path) -> None:
    bnb_int8(tmp_path / "in", torch.bfloat16)
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    before = load_file(tmp_path / "in" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(loaded(tmp_path / "in")))


def test_a_dense_source_stays_where_no_scheme_fits(tmp_path: Path) -> None:
    source = dense(tmp_path / "dense")
    plan = ckptmap.plan(source, "hf-bnb-int8")
    kept = {step.fqn for step in plan.steps if step.fidelity == "bytes"}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= kept
    assert QUERY not in kept
