"""optimum-quanto's weights, quantized and saved by itself: bit-equal to its own `dequantize`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ckptmap
from ckptmap.errors import PlanError, SourceError
from ckptmap.quantization.striped.quanto import QuantoPackedScheme
from tests.support.bnb_cases import same

Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"
KINDS = ["qint8", "qfloat8_e4m3fn", "qfloat8_e5m2", "qfloat8_e4m3fnuz", "qint4", "qint2"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """What quanto's `library/unpack.py` computes where it has no compiled operator."""
    return torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)])


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do in torch what quanto would compile in C++ first, for a minute: it only takes words apart."""
    from optimum.quanto.library.extensions.cpp import ext

    monkeypatch.setattr(ext, "_lib", SimpleNamespace(unpack=unpacked))


def model(dtype: torch.dtype) -> nn.ModuleDict:
    """Rows in groups of 128, 64 and 32, rows without groups, rows that no word divides; a convolution."""
    torch.manual_seed(3)
    layers = {
        "a": nn.Linear(256, 48), "b": nn.Linear(320, 6), "c": nn.Linear(160, 12),
        "d": nn.Linear(100, 33, bias=False), "e": nn.Linear(128, 64), "conv": nn.Conv2d(16, 24, 3),
        "norm": nn.LayerNorm(16),
    }  # fmt: skip
    return nn.ModuleDict(layers).to(dtype)


def written(folder: Path, made: nn.Module, kind: str, **more: Any) -> Tensors:
    """Quantize, save the state dict, and return the values."""
    from optimum.quanto import freeze, qtypes, quantize
    from optimum.quanto.tensor.qtensor import QTensor

    quantize(made, weights=qtypes[kind], **more)
    freeze(made)
    folder.mkdir()
    save_file(made.state_dict(), folder / FILE, {"format": "pt"})
    return {
        name: value.dequantize() if isinstance(value, QTensor) else value.detach()
        for name, value in made.named_parameters()
    }


def assert_values(path: Path, truth: Tensors, quantized: str) -> None:
    with ckptmap.open(path) as ckpt:
        assert set(ckpt) == set(truth)
        for key, wanted in truth.items():
            same(ckpt[key].read(), wanted)
            if key.endswith("weight"):
                assert ckpt[key].encoding == ("dense" if key == "norm.weight" else quantized), key
        same(ckpt["a.weight"][5:9, 3:250], truth["a.weight"][5:9, 3:250])
        same(ckpt["conv.weight"][3:20, 2:9], truth["conv.weight"][3:20, 2:9])


def name_of(kind: str) -> str:
    return f"quanto-{kind}" if kind in ("qint4", "qint2") else "quanto-8bit"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    truth = written(tmp_path / "in", model(dtype), kind)
    assert_values(tmp_path / "in", truth, name_of(kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS[:4])
def test_one_output_has_one_scale(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The head of a reward model: quanto stores a scale without dims."""
    torch.manual_seed(5)
    made = nn.ModuleDict({"score": nn.Linear(320, 1), "conv": nn.Conv2d(4, 1, 3)}).to(dtype)
    truth = written(tmp_path / "in", made, kind)
    assert load_file(tmp_path / "in" / FILE)["score.weight._scale"].shape == ()
    with ckptmap.open(tmp_path / "in") as ckpt:
        for key, value in truth.items():
            same(ckpt[key].read(), value)
        same(ckpt["score.weight"][:, 7:300], truth["score.weight"][:, 7:300])
    ckptmap.convert(tmp_path / "in", tmp_path / "dcp", to="fsdp2", world_size=2)
    ckptmap.convert(tmp_path / "dcp", tmp_path / "out", to="hf", strict=True)
    before, after = (load_file(tmp_path / name / FILE) for name in ("in", "out"))
    assert before.keys() == after.keys()
    for key, stored in before.items():
        same(stored, after[key])


@pytest.mark.parametrize("kind", ["qint4", "qint2"])
def test_zero_points(kind: str, tmp_path: Path) -> None:
    """Shifts that are integers: quanto's modules never make them, its tensors can."""
    from optimum.quanto import MaxOptimizer, WeightQBitsTensor, qtypes

    torch.manual_seed(1)
    base, kind_ = torch.randn(48, 256).bfloat16(), qtypes[kind]
    scale, shift = MaxOptimizer()(base, kind_, 0, 128, zeropoint=True)
    coded = WeightQBitsTensor.quantize(base, kind_, 0, 128, scale, shift, optimized=False)
    state: Tensors = {"a.bias": torch.zeros(48)}
    coded.save_to_state_dict(state, "a.weight.", False)
    assert state["a.weight._shift"].dtype == torch.uint8
    save_file(state, tmp_path / FILE, {"format": "pt"})
    with ckptmap.open(tmp_path / FILE) as ckpt:
        same(ckpt["a.weight"].read(), coded.dequantize())


@pytest.mark.parametrize("kind", ["qint8", "qint4"])
def test_moved_and_decoded(kind: str, tmp_path: Path) -> None:
    truth = written(tmp_path / "in", model(torch.bfloat16), kind, activations="qint8")
    ckptmap.convert(tmp_path / "in", tmp_path / "dense", to="hf-bf16")
    decoded = load_file(tmp_path / "dense" / FILE)
    assert set(truth) <= set(decoded)
    for key, value in truth.items():
        same(decoded[key], value)
    assert not [key for key in decoded if key[0] in "abcde" and key.endswith("put_scale")]
    ckptmap.convert(tmp_path / "in", tmp_path / "dcp", to="fsdp2", world_size=3)
    ckptmap.convert(tmp_path / "dcp", tmp_path / "out", to="hf")
    before, after = (load_file(tmp_path / name / FILE) for name in ("in", "out"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        same(value, after[key])


def test_codes_of_int8_are_kept(tmp_path: Path) -> None:
    truth = written(tmp_path / "in", model(torch.float32), "qint8")
    report = ckptmap.convert(tmp_path / "in", tmp_path / "out", to="full-int8")
    assert report.fidelity["exact"] >= 5, report.fidelity
    with ckptmap.open(tmp_path / "out") as ckpt:
        for key in ("a.weight", "b.weight"):
            assert ckpt[key].encoding == "int8"
            same(ckpt[key].read(), truth[key])


def save_model(folder: Path, kind: str, hidden: int = 320) -> Tensors:
    """A Llama saved by `QuantizedModelForCausalLM`; quanto leaves no layer dense but the embedding."""
    from optimum.quanto import QuantizedModelForCausalLM, qtypes
    from optimum.quanto.tensor.qtensor import QTensor

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1,
        num_attention_heads=5, num_key_value_heads=1,
    )  # fmt: skip
    made = LlamaForCausalLM(config).bfloat16()
    QuantizedModelForCausalLM.quantize(made, weights=qtypes[kind]).save_pretrained(folder)
    return {
        name: value.dequantize() if isinstance(value, QTensor) else value.detach()
        for name, value in made.named_parameters()
    }


@pytest.mark.parametrize("kind", ["qint4", "qint2"])
@pytest.mark.parametrize("hidden", [160, 320])
def test_shapes_of_a_model_follow_from_its_config(kind: str, hidden: int, tmp_path: Path) -> None:
    truth = save_model(tmp_path / "in", kind, hidden)
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-bf16")
    decoded = load_file(tmp_path / "out" / FILE)
    assert set(decoded) == set(truth)
    for key, value in truth.items():
        same(decoded[key], value)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    same(loaded.state_dict()["lm_head.weight"], truth["lm_head.weight"])


def test_without_its_config_no_shape_is_guessed(tmp_path: Path) -> None:
    save_model(tmp_path / "in", "qint4")
    (tmp_path / "in" / "config.json").unlink()
    plan = ckptmap.plan(tmp_path / "in", "full-bf16")
    assert plan.unresolved and all("quanto" in item.reason for item in plan.unresolved)
    ckptmap.convert(tmp_path / "in", tmp_path / "out.pt", to="full")
    before = load_file(tmp_path / "in" / FILE)
    after = torch.load(tmp_path / "out.pt", weights_only=True)
    assert before.keys() == after.keys()
    for key, value in before.items():
        same(value, after[key])


def test_a_record_that_does_not_fit(tmp_path: Path) -> None:
    """The record of a converted file, with another number of bits."""
    written(tmp_path / "in", model(torch.bfloat16), "qint4")
    with ckptmap.open(tmp_path / "in") as ckpt:
        lazy = ckpt["a.weight"]
        record = lazy.encoding_.record(lazy.info)
        assert record is not None and record["native"] == "quanto"
        stored = {f"a.weight.{name}": part for name, part in lazy.parts.items() if name[0] == "_"}
    for edit, said in (({"bits": 3}, "bits 3"), ({"shift_dtype": "int64"}, "'int64'"),
                       ({"bits": 2}, "part"), ({"block": [1, 64]}, "part")):  # fmt: skip
        with pytest.raises(SourceError, match=said) as caught:
            QuantoPackedScheme().group(stored, {"a.weight": {**record, "extra": [], **edit}})
        assert caught.value.code == "CKM115"


def test_parts_without_codes_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "in", "qint4", 160)
    state = load_file(tmp_path / "in" / FILE)
    del state["lm_head.weight._data._data"]
    save_file(state, tmp_path / "in" / FILE, {"format": "pt"})
    with pytest.raises(
        PlanError, match="is part of a quantized weight that is not whole"
    ) as caught:
        ckptmap.convert(tmp_path / "in", tmp_path / "out.pt", to="full")
    assert caught.value.code == "CKM202" and "lm_head.weight._scale" in str(caught.value)


def test_codes_of_another_width_than_the_config_states(tmp_path: Path) -> None:
    """Rows of 31 codes are no group, so rows of a weight [320, 31], of which the model has none."""
    save_model(tmp_path / "in", "qint4", 160)
    state = load_file(tmp_path / "in" / FILE)
    state["lm_head.weight._data._data"] = state["lm_head.weight._data._data"][:, :31].clone()
    save_file(state, tmp_path / "in" / FILE, {"format": "pt"})
    with pytest.raises(
        SourceError, match="hidden_size 160, and its codes are of a weight"
    ) as caught:
        ckptmap.open(tmp_path / "in")
    assert caught.value.code == "CKM115" and "lm_head.weight" in str(caught.value)


@pytest.mark.parametrize("kind", ["qint8", "qint4", "qfloat8_e4m3fn"])
@pytest.mark.parametrize("stated", ["qint2", "none", 4])
def test_a_map_of_another_save_is_refused(kind: str, stated: object, tmp_path: Path) -> None:
    """quanto's `save_pretrained` writes a map of its modules, by which it makes them again."""
    from optimum.quanto import quantization_map

    made = model(torch.bfloat16)
    truth = written(tmp_path / "in", made, kind)
    stating: dict[str, Any] = quantization_map(made)
    file = tmp_path / "in" / "quanto_qmap.json"
    file.write_text(json.dumps(stating))
    assert_values(tmp_path / "in", truth, name_of(kind))
    stating["b"] = {**stating["b"], "weights": stated}
    file.write_text(json.dumps(stating))
    with pytest.raises(SourceError, match=f"{stated!r} for b, and its codes are {kind}") as caught:
        ckptmap.open(tmp_path / "in")
    assert caught.value.code == "CKM115"


@pytest.mark.parametrize("kind", ["qint4", "qint2"])
def test_the_head_of_a_gpt2(kind: str, tmp_path: Path) -> None:
    """Its config.json has `n_embd` for the hidden size. Once the head was refused, with a hint to put config.json there."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(vocab_size=160, n_embd=256, n_layer=1, n_head=2, n_positions=8)
    made = nn.ModuleDict({"lm_head": GPT2LMHeadModel(config).lm_head})
    truth = written(tmp_path / "in", made, kind)
    config.save_pretrained(tmp_path / "in")
    with ckptmap.open(tmp_path / "in") as ckpt:
        assert ckpt["lm_head.weight"].encoding == name_of(kind)
        same(ckpt["lm_head.weight"].read(), truth["lm_head.weight"])
