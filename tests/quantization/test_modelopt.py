"""ModelOpt's NVFP4 and FP8. ModelOpt needs a GPU to calibrate: these are its names and layout, with torchao's
codes and values (its `NVFP4Tensor` has the same arithmetic)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
from safetensors.torch import load_file, save_file
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

import ckptmap
from ckptmap.errors import SourceError
from tests.support.bnb_cases import same
from tests.support.int8_models import QUERY, llama

Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"
VALUE = QUERY.replace("q_proj", "v_proj")
OWN = "hf_quant_config.json"
DTYPES = [torch.bfloat16, torch.float16]


@cache
def made(algo: str, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """Stored tensors, and their values."""
    truth = {key: value.clone() for key, value in llama(dtype).state_dict().items()}
    stored = dict(truth)
    for key, weight in list(truth.items()):
        if not key.endswith("_proj.weight"):
            continue
        stored[key.removesuffix("weight") + "input_scale"] = torch.tensor(0.25)
        if algo == "FP8":
            scale = weight.abs().max().float() / 448
            stored[key] = (weight.float() / scale).to(torch.float8_e4m3fn)
            stored[f"{key}_scale"] = scale
            truth[key] = (stored[key].float() * scale).to(dtype)
            continue
        overall = per_tensor_amax_to_scale(weight.abs().max())
        coded = NVFP4Tensor.to_nvfp4(weight.bfloat16(), per_tensor_scale=overall)
        stored[key], stored[f"{key}_scale"] = coded.qdata, coded.scale
        stored[f"{key}_scale_2"] = overall
        truth[key] = coded.dequantize(dtype)
    return stored, truth


def write(path: Path, algo: str, dtype: torch.dtype = torch.bfloat16, beside: str = "both") -> Path:
    """Write what ModelOpt exports. beside: "both" configs, or its "own" alone."""
    path.mkdir()
    save_file(made(algo, dtype)[0], path / FILE, {"format": "pt"})
    config = json.loads(llama(dtype).config.to_json_string())
    if beside == "both":
        config["quantization_config"] = {
            "quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.47.0"},
        }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    own = {"quant_algo": algo, "exclude_modules": ["lm_head"], "kv_cache_quant_algo": None}
    producer = {"name": "modelopt", "version": "0.29.0"}
    (path / OWN).write_text(json.dumps({"producer": producer, "quantization": own}))
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beside", ["both", "own"])
@pytest.mark.parametrize("algo", ["NVFP4", "FP8"])
def test_decoded_by_its_formula(algo: str, beside: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path, truth = write(tmp_path / "in", algo, dtype, beside), made(algo, dtype)[1]
    with ckptmap.open(path) as ckpt:
        assert set(ckpt) == set(truth), "no scale is a weight"
        assert ckpt[QUERY].encoding == f"modelopt-{algo.lower()}"
        for key, wanted in truth.items():
            same(ckpt[key].read(), wanted)
        same(ckpt[QUERY][5:41, 3:50], truth[QUERY][5:41, 3:50])


@pytest.mark.parametrize("algo", ["NVFP4", "FP8"])
def test_its_configs_go_where_its_codes_go(algo: str, tmp_path: Path) -> None:
    path, (stored, truth) = write(tmp_path / "in", algo), made(algo, torch.bfloat16)
    ckptmap.convert(path, tmp_path / "ranks", to="fsdp2", world_size=3)
    ckptmap.convert(tmp_path / "ranks", tmp_path / "hf", to="hf", config_from=str(path))
    for key, value in load_file(tmp_path / "hf" / FILE).items():
        same(value, stored[key])
    assert (tmp_path / "hf" / OWN).is_file()
    said = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "modelopt"
    plan = ckptmap.plan(path, "hf-bf16")
    assert "input_scale" in str(plan) and OWN in str(plan)
    plan.execute(tmp_path / "bf16")
    assert not (tmp_path / "bf16" / OWN).exists()
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    for key, value in load_file(tmp_path / "bf16" / FILE).items():
        same(value, truth[key])


def blocks_of_32(folder: Path) -> Tensors:
    """As ModelOpt 0.47 exports W4A8_NVFP4_FP8 and NVFP4_MLP_WEIGHT_ONLY, with codes and scales by chance. The values
    are those of its own `NVFP4QTensor.dequantize`."""
    path, (stored, truth) = write(folder, "NVFP4"), made("NVFP4", torch.bfloat16)
    stored, truth = dict(stored), dict(truth)
    torch.manual_seed(0)
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for key in [key for key in stored if key.endswith("weight_scale_2")]:
        fqn = key.removesuffix("_scale_2")
        rows, columns = truth[fqn].shape
        codes = torch.randint(0, 16, (rows, columns))
        scale = (torch.rand(rows, columns // 32) * 400 + 1).to(torch.float8_e4m3fn)
        stored[fqn] = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        stored[f"{fqn}_scale"] = scale
        values = torch.where(codes < 8, 1.0, -1.0) * levels[codes % 8]
        factors = (scale.float() * stored[key]).repeat_interleave(32, 1)
        truth[fqn] = (values * factors).bfloat16()
    save_file(stored, path / FILE, {"format": "pt"})
    return truth


def test_blocks_of_32(tmp_path: Path) -> None:
    truth = blocks_of_32(tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "work.pt", to="full-bf16")
    state = torch.load(tmp_path / "work.pt", weights_only=True)
    for key, wanted in truth.items():
        same(state[key], wanted)
    state[QUERY] = state[QUERY] * 1.25
    torch.save(state, tmp_path / "work.pt")
    ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=tmp_path / "in")
    before, after = (load_file(tmp_path / name / FILE) for name in ("in", "back"))
    assert {key for key in before if not torch.equal(before[key], after[key])} == {
        f"{QUERY}{end}" for end in ("_scale_2", "_scale", "")
    }
    with ckptmap.open(tmp_path / "back") as ckpt:
        found, wanted = ckpt[QUERY].read().float(), state[QUERY].float()
    assert float((found - wanted).norm() / wanted.norm()) < 0.12
    ckptmap.convert(tmp_path / "in", tmp_path / "ranks", to="fsdp2", world_size=3)
    with ckptmap.open(tmp_path / "ranks") as ckpt:
        same(ckpt[QUERY].read(), truth[QUERY])


def test_its_codes_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    """The library's own converter inverts the scale of the tensor; the codes and float8 scales stay."""
    path = write(tmp_path / "in", "NVFP4")
    report = ckptmap.convert(path, tmp_path / "out", to="hf-ct-nvfp4")
    assert report.fidelity["codes"] == 7
    theirs = ModelOptNvfp4Converter(targets=["re:.*_proj$"]).process(load_file(path / FILE))
    ours = load_file(tmp_path / "out" / FILE)
    assert ours.keys() == {key for key in theirs if "input_global" not in key}
    for key, value in ours.items():
        if key.endswith("global_scale"):
            assert torch.allclose(value.view(()), theirs[key], rtol=2**-22, atol=0)
        else:
            same(value, theirs[key])
    truth = made("NVFP4", torch.bfloat16)[1]
    with ckptmap.open(tmp_path / "out") as ckpt:
        for key, wanted in truth.items():
            assert torch.allclose(ckpt[key].read(), wanted, rtol=2**-8, atol=0)


def test_smoothed_weights_are_those_of_the_layer(tmp_path: Path) -> None:
    """`NVFP4_AWQ`: the layer multiplies its inputs by `pre_quant_scale`, which its weight takes in fp32."""
    stored, values = made("NVFP4", torch.bfloat16)
    smoothing = torch.rand(64, generator=torch.Generator().manual_seed(0)).bfloat16() + 0.5
    name = QUERY.removesuffix("weight") + "pre_quant_scale"
    write(tmp_path / "in", "NVFP4")
    save_file({**stored, name: smoothing}, tmp_path / "in" / FILE, {"format": "pt"})
    with ckptmap.open(tmp_path / "in") as ckpt:
        assert name not in ckpt
        same(ckpt[QUERY][7:9, 5:41], ckpt[QUERY].read()[7:9, 5:41])
        wide = NVFP4Tensor(
            stored[QUERY], stored[f"{QUERY}_scale"], 16, torch.float32, stored[f"{QUERY}_scale_2"]
        ).dequantize(torch.float32)
        same(ckpt[QUERY].read(), (wide * smoothing.float()).bfloat16())
        same(ckpt[VALUE].read(), values[VALUE])
    ckptmap.convert(tmp_path / "in", tmp_path / "bf16.pt", to="full-bf16")
    ckptmap.convert(tmp_path / "bf16.pt", tmp_path / "back", as_=tmp_path / "in")
    back = load_file(tmp_path / "back" / FILE)
    for key, value in (stored | {name: smoothing}).items():
        same(back[key], value)
    fidelity = ckptmap.plan(tmp_path / "in", "hf-ct-nvfp4").fidelities()
    assert (fidelity["codes"], fidelity["requantize"]) == (6, 1)


def _cut(tensors: Tensors) -> None:
    tensors[f"{QUERY}_scale"] = tensors[f"{QUERY}_scale"][:, :-1].contiguous()


def _several(tensors: Tensors) -> None:
    tensors[f"{QUERY}_scale_2"] = torch.ones(3)


def _infinite(tensors: Tensors) -> None:
    tensors[f"{QUERY}_scale_2"] = torch.tensor(torch.inf)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_cut, r"part 'scale', expected float8_e4m3fn\[64, 4\]"),
        (_several, r"scale_2 float32\[3\], expected one scale"),
        (_infinite, "expected finite scales"),
    ],
)
def test_bad_parts_are_refused(
    change: Callable[[Tensors], None], said: str, tmp_path: Path
) -> None:
    stored = dict(made("NVFP4", torch.bfloat16)[0])
    change(stored)
    write(tmp_path / "in", "NVFP4")
    save_file(stored, tmp_path / "in" / FILE, {"format": "pt"})
    with pytest.raises(SourceError, match=said) as caught:
        ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-bf16")
    assert caught.value.code == "CKM115" and "q_proj.weight" in caught.value.message


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_float8_scale_that_is_not_finite_is_refused(value: float, tmp_path: Path) -> None:
    stored = dict(made("FP8", torch.bfloat16)[0])
    stored[f"{QUERY}_scale"] = torch.tensor(value)
    write(tmp_path / "in", "FP8")
    save_file(stored, tmp_path / "in" / FILE, {"format": "pt"})
    with pytest.raises(SourceError, match=f"expected a finite scale, found {value}") as caught:
        ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-bf16")
    assert caught.value.code == "CKM115" and not (tmp_path / "out").exists()


OTHER = {"FP8": "NVFP4", "NVFP4": "FP8"}


@pytest.mark.parametrize("algo", ["NVFP4", "FP8"])
@pytest.mark.parametrize("file", ["config.json", OWN])
@pytest.mark.parametrize("key", ["quant_algo", "list"])
def test_a_config_that_contradicts_the_tensors_is_refused(
    key: str, file: str, algo: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "in", algo)
    config = json.loads((path / file).read_text())
    section = config["quantization" if file == OWN else "quantization_config"]
    if key == "quant_algo":
        section[key] = OTHER[algo]
        said = f"{file} states quant_algo '{OTHER[algo]}'.*stored as {algo}"
    else:
        key = "exclude_modules" if file == OWN else "ignore"
        section[key] = ["lm_head", QUERY.removesuffix(".weight")]
        said = f"{file} states '.*q_proj' in {key}.*stored as codes"
    (path / file).write_text(json.dumps(config))
    with pytest.raises(SourceError, match=said) as caught:
        ckptmap.open(path)
    assert caught.value.code == "CKM115"


@pytest.mark.parametrize("said", ["MIXED_PRECISION", "NVFP4_AWQ", None])
def test_algorithms_that_hold_the_form_agree(said: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "in", "NVFP4")
    config = json.loads((path / OWN).read_text())
    config["quantization"]["quant_algo"] = said
    (path / OWN).write_text(json.dumps(config))
    assert ckptmap.open(path)[QUERY].encoding == "modelopt-nvfp4"


@pytest.mark.parametrize(("algo", "most"), [("FP8", 0.04), ("NVFP4", 0.12)])
def test_changed_weights_are_given_back(algo: str, most: float, tmp_path: Path) -> None:
    """`--as`: with the scale that ModelOpt states, absmax / 448 (of NVFP4 / 6, too), which multiplies."""
    path = write(tmp_path / "in", algo)
    ckptmap.convert(path, tmp_path / "work.pt", to="full-bf16")
    state = torch.load(tmp_path / "work.pt", weights_only=True)
    state[QUERY] = state[QUERY] * 1.25
    torch.save(state, tmp_path / "work.pt")
    report = ckptmap.convert(tmp_path / "work.pt", tmp_path / "out", as_=path)
    assert report.likeness is not None and report.likeness.changed.keys() == {QUERY}
    before, after = (load_file(tmp_path / name / FILE) for name in ("in", "out"))
    assert before.keys() == after.keys()
    scale = after[f"{QUERY}_scale" + ("_2" if algo == "NVFP4" else "")]
    largest = state[QUERY].abs().max().float() / (448 * (6 if algo == "NVFP4" else 1))
    assert torch.allclose(scale, largest, rtol=2**-7, atol=0)
    with ckptmap.open(tmp_path / "out") as ckpt:
        found, wanted = ckpt[QUERY].read().float(), state[QUERY].float()
    assert float((found - wanted).norm() / wanted.norm()) < most


def test_zero_points_of_a_kv_cache_are_told(tmp_path: Path) -> None:
    """As llm-compressor 0.14 writes an int8 cache; the patterns of the notes leave both kinds out."""
    path = write(tmp_path / "in", "FP8")
    stored = load_file(path / FILE)
    for name in "kv":
        stored[f"model.layers.0.self_attn.{name}_scale"] = torch.tensor([0.5])
        stored[f"model.layers.0.self_attn.{name}_zero_point"] = torch.tensor([3], dtype=torch.int8)
    save_file(stored, path / FILE, {"format": "pt"})
    notes = [n for n in ckptmap.plan(path, "hf-bf16").notes if "KV cache" in n]
    assert len(notes) == 2
    patterns = [note.rpartition("--exclude ")[2].strip("'") for note in notes]
    ckptmap.convert(path, tmp_path / "out", to="hf-bf16", exclude=patterns)
    left = load_file(tmp_path / "out" / FILE)
    assert len(left) and not [key for key in left if key.endswith(("_scale", "_point"))]


def test_scales_of_a_kv_cache_are_told(tmp_path: Path) -> None:
    """They move as they are; the config.json of decoded weights declares no quantized cache."""
    path = write(tmp_path / "in", "FP8")
    stored = load_file(path / FILE)
    for name in "kv":
        stored[f"model.layers.0.self_attn.{name}_proj.{name}_scale"] = torch.tensor(0.5)
    save_file(stored, path / FILE, {"format": "pt"})
    (note,) = [n for n in ckptmap.plan(path, "hf-bf16").notes if "KV cache" in n]
    assert note.startswith("model.layers.0.self_attn.k_proj.k_scale and 1 more: ")
    ckptmap.convert(path, tmp_path / "out", to="hf-bf16", exclude=["*.[kv]_scale"])
    assert not [key for key in load_file(tmp_path / "out" / FILE) if key.endswith("_scale")]
    assert not [n for n in ckptmap.plan(path, "hf").notes if "KV cache" in n], (
        "its own config stays"
    )
