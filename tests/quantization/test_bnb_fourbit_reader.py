"""bitsandbytes 4-bit, read: what bitsandbytes wrote decodes to the bits of its own formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import ckptmap
from ckptmap.errors import PlanError, RunError, SourceError
from tests.corpus.ranks import run_ranks
from tests.support.bnb_cases import (
    Layers,
    decoded_weights,
    linear4bit,
    llama,
    logits,
    quantized,
    refused,
    same,
    truth,
    weight,
)
from tests.support.examples import examples

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = ((64, 128), (66, 48), (33, 51), (5, 4304))
"""Rows of whole blocks; of parts of one; an odd number of elements; SigLIP's width."""


def layers_of(kind: str, double: bool, dtype: torch.dtype) -> dict[str, bnb.nn.Linear4bit]:
    """Every shape, block size and storage dtype that fits it."""
    found = {}
    for shape in SHAPES:
        for block in (32, 64, 128, 256, 512, 1024, 2048, 4096):
            for storage in (torch.uint8, torch.bfloat16, torch.float16, torch.float32):
                if shape[0] * shape[1] % (2 * storage.itemsize) and storage.itemsize > 1:
                    continue
                if storage.itemsize > 1 and block not in (64, 4096):
                    continue
                name = f"l{shape[1]}_{block}_{str(storage).removeprefix('torch.')}"
                w = weight(shape, dtype, block)
                found[name] = linear4bit(w, kind, double, block, storage)
    return found


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_decodes_to_the_bits_of_bitsandbytes(
    kind: str, double: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    layers = layers_of(kind, double, dtype)
    assert len(layers) > 40
    model = Layers(layers)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    with ckptmap.open(tmp_path / "m.safetensors") as ckpt:
        for name, layer in layers.items():
            lazy = ckpt[f"{name}.weight"]
            assert lazy.encoding == f"bnb-{kind}-dq" if double else f"bnb-{kind}"
            same(lazy.read(), truth(layer))
        assert ckpt["norm.weight"].encoding == "dense"


def test_where_bitsandbytes_own_kernel_is_right_it_agrees(tmp_path: Path) -> None:
    layer = linear4bit(weight((96, 256), torch.bfloat16), "nf4", False)
    save_file(Layers({"a": layer}).state_dict(), tmp_path / "m.safetensors")
    with ckptmap.open(tmp_path / "m.safetensors") as ckpt:
        kernel = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        same(ckpt["a.weight"].read(), kernel)


def _torch_save(state: dict[str, Tensor], folder: Path) -> Path:
    torch.save(state, folder / "m.bin")
    return folder / "m.bin"


def _safetensors(state: dict[str, Tensor], folder: Path) -> Path:
    save_file(state, folder / "m.safetensors")
    return folder / "m.safetensors"


def _dcp(state: dict[str, Tensor], folder: Path) -> Path:
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)  # type: ignore[attr-defined]
    return folder / "dcp"


@pytest.mark.parametrize("save", [_torch_save, _safetensors, _dcp])
def test_containers(save: Any, tmp_path: Path) -> None:
    layers = {
        f"{kind}{double}": linear4bit(
            weight((64, 96), torch.bfloat16), kind, double, 64, torch.bfloat16
        )
        for kind in ("nf4", "fp4")
        for double in (False, True)
    }
    with ckptmap.open(save(Layers(layers).state_dict(), tmp_path)) as ckpt:
        assert set(ckpt.encodings) == {"bnb-nf4", "bnb-nf4-dq", "bnb-fp4", "bnb-fp4-dq", "dense"}
        for name, layer in layers.items():
            same(ckpt[f"{name}.weight"].read(), truth(layer))


@pytest.fixture(scope="module")
def boxed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Tensor]]:
    layers = {
        "single": linear4bit(weight((70, 48), torch.bfloat16), "nf4", False, 64, torch.float32),
        "nested": linear4bit(weight((300, 96), torch.float32), "fp4", True, 32),
        "odd": linear4bit(weight((33, 51), torch.float16), "nf4", True, 256),
    }
    file = _safetensors(Layers(layers).state_dict(), tmp_path_factory.mktemp("boxed"))
    ckpt = ckptmap.open(file)
    return {name: (ckpt[f"{name}.weight"], truth(layer)) for name, layer in layers.items()}


@examples(60)
@given(st.data())
def test_any_box_is_that_of_the_whole(
    boxed: dict[str, tuple[Any, Tensor]], data: st.DataObject
) -> None:
    lazy, whole = boxed[data.draw(st.sampled_from(sorted(boxed)))]
    low = [data.draw(st.integers(0, n - 1)) for n in lazy.shape]
    size = [data.draw(st.integers(0, n - o)) for n, o in zip(lazy.shape, low, strict=True)]
    box = whole[low[0] : low[0] + size[0], low[1] : low[1] + size[1]]
    same(lazy.read(low, size), box.contiguous())


# ------------------------------------------------------------------------------- what may be wrong


def test_the_malformed_file_of_the_cpu_path_is_repaired_and_said_so(tmp_path: Path) -> None:
    """bitsandbytes writes absmax bf16 and transposed after a forward on AVX512-BF16: by itself
    where this CPU can, else that file is imitated."""
    layer = linear4bit(weight((64, 128), torch.bfloat16), "nf4", False)
    expected, good = truth(layer), layer.state_dict()
    if bnb.functional.has_avx512bf16():
        model = Layers({"a": layer}).eval()
        with torch.no_grad():
            layer(torch.ones(1, 128, dtype=torch.bfloat16))
        state = {key: value.contiguous() for key, value in model.state_dict().items()}
    else:
        turned = good["weight.absmax"].view(64, 2).T.contiguous().bfloat16()
        state = {f"a.{k}": v for k, v in (good | {"weight.absmax": turned}).items()}
    assert state["a.weight.absmax"].shape == (2, 64), "this release no longer writes it so"
    save_file(state, tmp_path / "m.safetensors")
    with ckptmap.open(tmp_path / "m.safetensors") as ckpt:
        same(ckpt["a.weight"].read(), expected)
        same(ckpt["a.weight"].read((5, 100), (9, 20)), expected[5:14, 100:120].contiguous())
        assert any("a.weight: absmax was bf16 and transposed" in note for note in ckpt.notes)
    report = ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "out", "hf")
    assert report.fidelity["exact"] == 1 and any("transposed" in note for note in report.notes)
    mended = load_file(tmp_path / "out" / "model.safetensors")
    assert set(mended) == set(state)
    for key, value in good.items():
        same(mended[f"a.{key}"], value)


def test_bf16_nested_absmax_is_decoded_as_it_was_rounded(tmp_path: Path) -> None:
    layer = linear4bit(weight((64, 128), torch.bfloat16), "nf4", True)
    state = layer.state_dict()
    key = "weight.quant_state.bitsandbytes__nf4"
    document = json.loads(bytes(state[key].tolist())) | {"nested_dtype": "bfloat16"}
    state[key] = torch.tensor(list(json.dumps(document).encode()), dtype=torch.uint8)
    save_file(state, tmp_path / "m.safetensors")
    layer.weight.quant_state.state2.dtype = torch.bfloat16
    with ckptmap.open(tmp_path / "m.safetensors") as ckpt:
        same(ckpt["weight"].read(), truth(layer))
        assert any("rounded to bfloat16" in note for note in ckpt.notes)


@pytest.mark.parametrize(
    "part, change, message",
    [
        ("absmax", None, "absmax is missing, expected float32"),
        ("", None, "expected the payload"),
        ("absmax", torch.ones(3), r"absmax, expected float32\[128\], found float32\[3\]"),
        ("quant_state.bitsandbytes__nf4", torch.zeros(4, dtype=torch.uint8), "expected JSON with blocksize"),
        ("nested_absmax", torch.ones(1), "says single quantization, its companions double"),
    ],
)  # fmt: skip
def test_incomplete_tensors_are_refused_by_name(
    part: str, change: Tensor | None, message: str, tmp_path: Path
) -> None:
    state = linear4bit(weight((64, 128), torch.bfloat16), "nf4", False).state_dict()
    key = f"weight.{part}".removesuffix(".")
    if change is None:
        del state[key]
    else:
        state[key] = change
    save_file(state, tmp_path / "m.safetensors")
    with refused(SourceError, "CKM115", match=f"weight.*{message}"):
        ckptmap.open(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"blocksize": 48}, "block size 48 is not one that bitsandbytes has"),
        ({"dtype": "int8"}, "expected JSON with blocksize, dtype and shape"),
        ({"shape": [64, -1]}, "expected JSON with blocksize, dtype and shape"),
        ({"shape": [1 << 40]}, r"expected uint8\[549755813888, 1\], found uint8\[4096, 1\]"),
    ],
)
def test_a_lying_json_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    state = linear4bit(weight((64, 128), torch.bfloat16), "nf4", False).state_dict()
    key = "weight.quant_state.bitsandbytes__nf4"
    document = json.loads(bytes(state[key].tolist())) | change
    state[key] = torch.tensor(list(json.dumps(document).encode()), dtype=torch.uint8)
    save_file(state, tmp_path / "m.safetensors")
    with refused(SourceError, "CKM115", match=message):
        ckptmap.open(tmp_path / "m.safetensors")


# ------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_transformers_model_decodes_to_its_own_weights(
    kind: str, double: bool, dense: Path, tmp_path: Path
) -> None:
    model = quantized(dense, kind, double)
    expected = decoded_weights(model)
    model.save_pretrained(tmp_path / "q")
    with ckptmap.open(tmp_path / "q") as ckpt:
        assert ckpt.setup == (f"hf-bnb-{kind}-dq" if double else f"hf-bnb-{kind}")
        assert len(expected) == 14
        for fqn, value in expected.items():
            same(ckpt[fqn].read(), value)
    ckptmap.convert(tmp_path / "q", tmp_path / "bf16", "hf-bf16")
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    for fqn, value in expected.items():
        same(found[fqn], value)


def test_conv1d_of_gpt2_is_turned_back(tmp_path: Path) -> None:
    torch.manual_seed(1)
    GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=80, n_positions=32)).save_pretrained(tmp_path / "dense")  # fmt: skip
    model = quantized(tmp_path / "dense", "nf4", True)
    expected = decoded_weights(model)
    model.save_pretrained(tmp_path / "q")
    name = "transformer.h.0.attn.c_attn.weight"
    with ckptmap.open(tmp_path / "q") as ckpt:
        assert expected[name].shape == (192, 64) and ckpt[name].shape == (64, 192)
        same(ckpt[name].read(), expected[name].T.contiguous())
        same(ckpt[name][3:7, 10:90], expected[name].T[3:7, 10:90].contiguous())
    ckptmap.convert(tmp_path / "q", tmp_path / "back", "hf-bf16")
    back = GPT2LMHeadModel.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
    same(back.transformer.h[0].attn.c_attn.weight.data, expected[name].T.contiguous())
    ckptmap.convert(tmp_path / "q", tmp_path / "q.pt", "full")  # no config.json says that it is one
    square = "transformer.h.0.attn.c_proj.weight"
    with ckptmap.open(tmp_path / "q.pt") as ckpt:
        same(ckpt[name].read(), expected[name].T.contiguous())
        same(ckpt[square].read(), expected[square].T.contiguous())
    assert ckptmap.verify(tmp_path / "q.pt", tmp_path / "q").ok
    plan = ckptmap.plan(tmp_path / "dense", "hf-bnb-nf4")
    made = {step.fqn: step.fidelity for step in plan.steps}
    assert made[name] == "quantize", (
        "as tests/quantization/test_conv1d.py compares with the library"
    )


# ------------------------------------------------------------------------------- without scales


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bitsandbytes model under FSDP2 on 2 ranks, saved by DCP: packed bytes and no scales."""
    folder = tmp_path_factory.mktemp("fsdp2")
    run_ranks("tests.ranks.bnb", 2, [str(folder)], timeout=120)
    return folder


@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_a_payload_without_its_scales_is_known_for_what_it_is(
    storage: str, sharded: Path, tmp_path: Path
) -> None:
    source = sharded / storage
    with ckptmap.open(source) as ckpt:
        assert any("bitsandbytes 4-bit, without its scales" in note for note in ckpt.notes)
    ckptmap.plan(source, "full").require_resolved()
    plan = ckptmap.plan(source, "full-fp32")
    assert {item.key for item in plan.unresolved} == {"up.weight", "down.weight"}
    assert all("--base PATH" in item.hint for item in plan.unresolved)
    with refused(PlanError, "CKM202", match="without its scales tensor, which cannot be decoded"):
        ckptmap.convert(source, tmp_path / "o.pt", "full-fp32")


@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_base_restores_the_scales_where_the_packed_bytes_are_the_same(
    storage: str, sharded: Path, tmp_path: Path
) -> None:
    base = sharded / f"base-{storage}.safetensors"
    report = ckptmap.convert(sharded / storage, tmp_path / "o.pt", "full-bf16", base=str(base))
    assert any("scales of 2 tensors are from" in note for note in report.notes)
    found = torch.load(tmp_path / "o.pt", weights_only=True)
    with ckptmap.open(base) as expected:
        for fqn in ("up.weight", "down.weight"):
            same(found[fqn], expected[fqn].read())
    again = ckptmap.convert(sharded / storage, tmp_path / "hf", "hf", base=str(base))
    assert again.fidelity == {"bytes": 3}
    assert ckptmap.verify(tmp_path / "hf", sharded / storage).ok
    checked = ckptmap.verify(tmp_path / "o.pt", sharded / storage)
    assert len(checked.problems) == 2 and "up.weight: bfloat16[64, 128], " in checked.problems[0]
    assert ckptmap.verify(tmp_path / "o.pt", sharded / storage, base=base).ok
    with ckptmap.open(tmp_path / "hf") as whole:
        assert whole["up.weight"].encoding == "bnb-nf4-dq"


def test_another_base_is_refused(sharded: Path, tmp_path: Path) -> None:
    source, base = sharded / "uint8", load_file(sharded / "base-uint8.safetensors")
    base["down.weight"][100] ^= 1
    save_file(base, tmp_path / "other.safetensors")
    with refused(RunError, "CKM310", match="down.weight.*differs.*") as caught:
        ckptmap.convert(
            source, tmp_path / "o.pt", "full-bf16", base=str(tmp_path / "other.safetensors")
        )
    assert "other weights" in str(caught.value) and not (tmp_path / "o.pt").exists()
    save_file({"x": torch.ones(3)}, tmp_path / "plain.safetensors")
    with refused(PlanError, "CKM312", match="has scales for no tensor"):
        ckptmap.plan(source, "full-bf16", base=str(tmp_path / "plain.safetensors"))
    wider = linear4bit(weight((128, 128), torch.bfloat16), "nf4", True)
    save_file({f"up.{k}": v for k, v in wider.state_dict().items()}, tmp_path / "wide.safetensors")
    with refused(
        PlanError, "CKM312", match=r"up.weight: uint8\[4096, 1\], expected the uint8\[8192, 1\]"
    ):
        ckptmap.plan(source, "full-bf16", base=str(tmp_path / "wide.safetensors"))


def test_base_knows_the_names_that_peft_gives(dense: Path, tmp_path: Path) -> None:
    """A QLoRA state dict without its companions, as FSDP2 leaves it: adapters stay as they are."""
    model = quantized(dense, "nf4", True)
    expected = decoded_weights(model)
    model.save_pretrained(tmp_path / "base")
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    state = {
        key: value.contiguous()
        for key, value in tuned.state_dict().items()
        if not key.split(".weight.")[1:]
    }
    save_file(state, tmp_path / "tuned.safetensors")
    base = str(tmp_path / "base")
    ckptmap.convert(tmp_path / "tuned.safetensors", tmp_path / "o.pt", "full-bf16", base=base)
    found = torch.load(tmp_path / "o.pt", weights_only=True)
    layer = "model.layers.0.self_attn"
    same(
        found[f"base_model.model.{layer}.q_proj.base_layer.weight"],
        expected[f"{layer}.q_proj.weight"],
    )
    same(found[f"base_model.model.{layer}.k_proj.weight"], expected[f"{layer}.k_proj.weight"])
    adapter = f"base_model.model.{layer}.q_proj.lora_A.default.weight"
    same(found[adapter], state[adapter].bfloat16())


def test_logits_survive_the_way_through_a_distributed_checkpoint(
    dense: Path, tmp_path: Path
) -> None:
    """hf -> fsdp2 of 3 ranks -> hf, all bytes: transformers loads the same model."""
    model = quantized(dense, "nf4", True)
    expected = logits(model)
    model = quantized(dense, "nf4", True)
    model.save_pretrained(tmp_path / "q")
    ckptmap.convert(tmp_path / "q", tmp_path / "dcp", "fsdp2", world_size=3)
    report = ckptmap.convert(
        tmp_path / "dcp", tmp_path / "hf", "hf", config_from=str(tmp_path / "q")
    )
    assert set(report.fidelity) == {"bytes"}
    from transformers import AutoModelForCausalLM

    back = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).eval()
    same(logits(back), expected)


def test_a_parameter_pickled_whole_is_refused(tmp_path: Path) -> None:
    """torch pickles a Params4bit as a Parameter, with its scales among Python's attributes: its
    codes alone would mean nothing."""
    layer = linear4bit(torch.randn(8, 64), "nf4", True)
    torch.save({"up.weight": layer.weight, "norm.weight": torch.ones(3)}, tmp_path / "a.pt")
    with ckptmap.open(tmp_path / "a.pt") as ckpt:
        assert list(ckpt) == ["norm.weight"]
        assert [(one.key, one.reason) for one in ckpt.refused] == [
            ("up.weight", "an object of unknown class bitsandbytes.nn.modules.Params4bit")
        ]
    with pytest.raises(PlanError, match=r"up\.weight: an object of unknown class"):
        ckptmap.convert(tmp_path / "a.pt", tmp_path / "out", to="hf")
