"""FP8 with one scale a tensor and static activations, as transformers' FP8Linear holds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Linear

import ckptmap
from ckptmap.errors import PlanError, SourceError
from tests.support.int8_models import QUERY, Truth, dense, llama, loaded

FILE = "model.safetensors"
STATIC: dict[str, Any] = {
    "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip


def static(path: Path, name: str = "activation_scale") -> Truth:
    """A model of FP8Linear layers, saved; the values of its weights in bf16."""
    model = llama(torch.bfloat16)
    truth = {key: value.clone() for key, value in model.state_dict().items()}
    for key, module in list(model.named_modules()):
        if type(module) is not torch.nn.Linear or key == "lm_head":
            continue
        new = FP8Linear(module.in_features, module.out_features, None, "static")
        scale = module.weight.abs().max().float() / 448
        new.weight.data = (module.weight.float() / scale).to(torch.float8_e4m3fn)
        new.weight_scale_inv.data = scale
        new.activation_scale.data = torch.tensor(0.5)
        truth[f"{key}.weight"] = (new.weight.float() * scale).to(torch.bfloat16)
        model.set_submodule(key, new)
    model.save_pretrained(path)
    restate(path, STATIC)
    tensors = load_file(path / FILE)
    renamed = {key.replace("activation_scale", name): t for key, t in tensors.items()}
    save_file(renamed, path / FILE, {"format": "pt"})
    return truth


def restate(path: Path, quantization: object) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": quantization}
    file.write_text(json.dumps(config))


def scales(path: Path) -> set[str]:
    return {key for key in load_file(path / FILE) if key.endswith(("_scale", "_act"))}


def test_scales_by_the_names_of_two_writers_in_one_file(tmp_path: Path) -> None:
    """As a merge of two checkpoints leaves them: DeepSeek-V3's name in attention, V4's in the MLP."""
    truth = static(tmp_path / "src")
    tensors = load_file(tmp_path / "src" / FILE)
    one, other = ".mlp.", ".weight_scale_inv"
    names = {key: key.replace(other, ".scale") if one in key else key for key in tensors}
    assert len({name.rpartition(".")[2] for name in names.values() if "scale" in name}) == 3
    save_file({names[key]: value for key, value in tensors.items()}, tmp_path / "src" / FILE)
    with ckptmap.open(tmp_path / "src") as ckpt:
        assert ckpt.encodings == ("dense", "fp8")
        assert {key for key in truth if not torch.equal(ckpt[key].read(), truth[key])} == set()
    ckptmap.convert(tmp_path / "src", tmp_path / "out", to="hf-bf16")
    state = loaded(tmp_path / "out").state_dict()
    assert {key for key in truth if not torch.equal(state[key], truth[key])} == set()


@pytest.mark.parametrize("name", ["activation_scale", "input_scale", "qscale_act"])
def test_scales_of_activations_go_where_their_weight_goes(name: str, tmp_path: Path) -> None:
    truth = static(tmp_path / "in", name)
    stem = QUERY.removesuffix("weight")
    with ckptmap.open(tmp_path / "in") as ckpt:
        assert set(ckpt) == set(truth), "no activation scale is a weight"
        for key, wanted in truth.items():
            assert torch.equal(ckpt[key].read(), wanted), key
    plan = ckptmap.plan(tmp_path / "in", "hf-bf16")
    assert plan.dropped.keys() == scales(tmp_path / "in") and len(plan.dropped) == 7
    assert plan.dropped[stem + name] == (
        f"scales the activations of {QUERY}, which is no longer stored as fp8"
    )
    assert f"{stem}{name}" in str(plan)
    report = plan.execute(tmp_path / "bf16")
    assert report.dropped == plan.dropped
    decoded = load_file(tmp_path / "bf16" / FILE)
    assert decoded.keys() == truth.keys()
    assert all(torch.equal(decoded[key], wanted) for key, wanted in truth.items())
    assert "quantization_config" not in json.loads((tmp_path / "bf16/config.json").read_text())


def test_they_are_kept_with_the_bytes(tmp_path: Path) -> None:
    truth = static(tmp_path / "in")
    assert ckptmap.plan(tmp_path / "in", "hf").dropped == {}
    ckptmap.convert(tmp_path / "in", tmp_path / "two", to="fsdp2", world_size=2)
    ckptmap.convert(tmp_path / "two", tmp_path / "out", to="hf", config_from=tmp_path / "in")
    before, after = (load_file(tmp_path / n / FILE) for n in ("in", "out"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        bits = [t.reshape(-1).view(torch.uint8) for t in (tensor, after[key])]
        assert torch.equal(*bits), key
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == STATIC
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert torch.equal(ckpt[QUERY].read(), truth[QUERY])
    if not torch.cuda.is_available():
        model = loaded(
            tmp_path / "out",
            torch.bfloat16,
            quantization_config=FineGrainedFP8Config(dequantize=True),
        )
        assert torch.equal(model.state_dict()[QUERY], truth[QUERY]), "transformers decodes the same"


def test_one_config_cannot_declare_tiles_and_single_scales(tmp_path: Path) -> None:
    static(tmp_path / "in")
    tensors = load_file(tmp_path / "in" / FILE)
    stem = "model.layers.0.mlp.extra_proj."
    tensors[stem + "weight"] = torch.randn(128, 128).bfloat16()
    save_file(tensors, tmp_path / "in" / FILE, {"format": "pt"})
    with pytest.raises(
        PlanError, match=r"tiles of \[128, 128\] and dynamic .* one scale and static"
    ):
        ckptmap.plan(tmp_path / "in", "hf-fp8")


# ------------------------------------------------------------------------------- contradictions


def refused(path: Path, said: str, shown: str) -> None:
    with pytest.raises(SourceError) as caught:
        ckptmap.open(path)
    error = caught.value
    assert error.code == "CKM115" and "copy both again" in error.hint
    for text in ("_proj.weight", str(path / FILE), said, shown):
        assert text in error.message, (text, error.message)


@pytest.mark.parametrize("tile", [[128, 128], [64, 64], [32, 16]], ids=str)
def test_tiles_in_the_config_of_tensors_with_one_scale(tile: list[int], tmp_path: Path) -> None:
    static(tmp_path)
    tensors = load_file(tmp_path / FILE)
    wide = {QUERY: torch.zeros(256, 256).to(torch.float8_e4m3fn)}
    save_file(tensors | wide, tmp_path / FILE, {"format": "pt"})
    ckptmap.open(tmp_path).close()
    restate(tmp_path, STATIC | {"weight_block_size": tile})
    refused(tmp_path, f"weight_block_size {tile}", "float32[]")


@pytest.mark.parametrize("tile", [None, [64, 128], [128, 64]], ids=str)
def test_other_tiles_in_the_config_than_the_scales_have(tile: Any, tmp_path: Path) -> None:
    """64 rows a tile and 4 bands of scales of 256 rows are 128: it was read by the shape alone."""
    ckptmap.convert(dense(tmp_path / "dense", hidden=256), tmp_path / "out", to="hf-fp8")
    ckptmap.open(tmp_path / "out").close()
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    restate(tmp_path / "out", config | {"weight_block_size": tile})
    shown = "null" if tile is None else str(tile)
    refused(tmp_path / "out", f"weight_block_size {shown}", "float32[2, 4]")
    with safe_open(tmp_path / "out" / FILE, "pt") as opened:
        metadata = opened.metadata()
    plain = {key: text for key, text in metadata.items() if "scheme" not in text}
    save_file(load_file(tmp_path / "out" / FILE), tmp_path / "out" / FILE, plain)
    refused(tmp_path / "out", f"weight_block_size {shown}", "float32[2, 4]")


def test_tiles_of_our_record_and_of_the_config(tmp_path: Path) -> None:
    """Tiles of 129 rows would make as many scales: the record in the file says which they are."""
    tensors = {"fc.weight": torch.randn(256, 128), "fc.bias": torch.zeros(256)}
    save_file(tensors, tmp_path / "in.safetensors")
    ckptmap.convert(tmp_path / "in.safetensors", tmp_path / "out", "hf-fp8")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [129, 128]}}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"states weight_block_size \[129, 128\].*\[128, 128\]"):
        ckptmap.open(tmp_path / "out")


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_a_weight_without_elements_is_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    static(tmp_path)
    tensors = load_file(tmp_path / FILE)
    tensors[QUERY] = torch.zeros(shape).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(SourceError, match=rf"q_proj\.weight: .*\[{shape[0]}, {shape[1]}\]"):
        ckptmap.open(tmp_path)
