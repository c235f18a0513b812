"""Quantization schemes that move as bytes only: all parts are named, never decoded, never cast."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.quantization.unsupported_schemes import READERS, foreign_tensors
from ckptmap.tensors import TensorInfo
from tests.support.int8_models import QUERY, compressed, llama, loaded
from tests.support.paths import GOLDEN
from tests.support.same_tensors import bits

GOLDEN_FILES = GOLDEN / "foreign"
STEM = QUERY.removesuffix(".weight")


def floats(width: int, strategy: str = "group", size: int = 32, **more: Any) -> Any:
    return QuantizationArgs(
        num_bits=width, type="float", symmetric=True, strategy=strategy, group_size=size, **more
    )


EXPONENTS: dict[str, Any] = {"scale_dtype": torch.uint8}
MX = "MXFP6"
COMPRESSED: dict[str, tuple[Any, str, str, tuple[str, ...]]] = {
    "mxfp6": (floats(6, **EXPONENTS), "mxfp6-pack-quantized", MX, ("weight_packed", "weight_scale")),
}  # fmt: skip


def assert_same_files(first: Path, second: Path) -> None:
    before, after = (load_file(path / "model.safetensors") for path in (first, second))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(bits(value), bits(after[key])), key


@pytest.mark.parametrize("name", COMPRESSED)
def test_unsupported_compressed_tensors_move_as_bytes_or_are_refused(
    name: str, tmp_path: Path
) -> None:
    scheme, form, called, parts = COMPRESSED[name]
    compressed(tmp_path / "in", scheme, form)
    plan = ckptmap.plan(tmp_path / "in", "hf-bf16")
    keys = {f"{STEM}.{part}" for part in parts}
    assert keys <= {item.key for item in plan.unresolved}
    with pytest.raises(ckptmap.CkptmapError, match=f"is part of a {called} tensor"):
        plan.require_resolved()
    # Each companion is named for itself: leaving it out would cast it.
    for key in keys:
        partly = ckptmap.plan(tmp_path / "in", "hf-bf16", no_encode=(key,))
        assert keys - {key} <= {item.key for item in partly.unresolved}
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "in").ok
    assert_same_files(tmp_path / "in", tmp_path / "out")
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("in", "out")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    # Named to be left as they are, they go along as bytes and all else is cast.
    every = tuple(item.key for item in plan.unresolved)
    kept = ckptmap.convert(tmp_path / "in", tmp_path / "kept", to="hf-fp32", no_encode=every)
    assert kept.fidelity["bytes"] == len(every) and kept.fidelity["cast"] > 0
    with ckptmap.open(tmp_path / "in") as before, ckptmap.open(tmp_path / "kept") as after:
        for key, tensor in before.items():
            read = after[key].read()
            same = torch.equal(bits(tensor.read()), bits(read)) if key in every else False
            assert same or (key not in every and read.dtype == torch.float32), key
        said = f"{called}, {len(every)} tensors, in parts {', '.join(sorted(parts))}"
        assert any(said in note for note in before.notes), before.notes


def gpt_oss(folder: Path) -> None:
    """One layer with experts in MXFP4, as OpenAI publishes it: transformers writes it with a GPU
    alone, and reads it here."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=32, hidden_size=64, intermediate_size=32, num_hidden_layers=1, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = GptOssForCausalLM(config).bfloat16()
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    for key in [key for key in state if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = state.pop(key).shape
        shape = (experts, outer, inner // 32)
        state[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        state[f"{key}_scales"] = torch.randint(110, 125, shape, dtype=torch.uint8)
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def test_gpt_oss(tmp_path: Path) -> None:
    from transformers import GptOssForCausalLM, Mxfp4Config

    gpt_oss(tmp_path / "in")
    ckptmap.convert(tmp_path / "in", tmp_path / "dcp", to="fsdp2", world_size=3)
    source = str(tmp_path / "in")
    ckptmap.convert(tmp_path / "dcp", tmp_path / "out", to="hf", config_from=source)
    decoded = [
        GptOssForCausalLM.from_pretrained(
            tmp_path / name, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
        ).state_dict()
        for name in ("in", "out")
    ]
    assert decoded[0].keys() == decoded[1].keys() and len(decoded[0]) > 10
    assert all(torch.equal(value, decoded[1][key]) for key, value in decoded[0].items())


def test_torchaos_classes(tmp_path: Path) -> None:
    """MX of 6 bits: pickled it is refused by name; flattened into safetensors it moves as bytes."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    made = MXTensor.to_mx(torch.randn(64, 64).bfloat16(), "fp6_e3m2", 32)
    state = {"fc.weight": made, "norm.weight": torch.ones(4)}
    torch.save(state, tmp_path / "in.pt")
    with pytest.raises(ckptmap.CkptmapError, match=r"fc\.weight: a tensor of unknown .*MXTensor"):
        ckptmap.convert(tmp_path / "in.pt", tmp_path / "out.pt", to="full")
    tensors, metadata = flatten_tensor_state_dict(state)
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt", **metadata})
    plan = ckptmap.plan(tmp_path / "in", "hf-fp32")
    assert {item.key for item in plan.unresolved} == set(tensors) - {"norm.weight"}
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    assert_same_files(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_what_other_libraries_write(name: str, tmp_path: Path) -> None:
    """Made by the libraries, see `golden/foreign/make_foreign.py`. Half cast, and without what
    config.json said of them, transformers would load such layers at random."""
    (tmp_path / "in").mkdir()
    state = load_file(GOLDEN_FILES / f"{name}.safetensors") | {"2.weight": torch.ones(64, 64)}
    save_file(state, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    (tmp_path / "in" / "config.json").write_text('{"quantization_config": {"quant_method": "x"}}')
    parts = {key for key in state if key[0] == "0"}
    for to in ("hf-bf16", "hf-bnb-nf4"):
        plan = ckptmap.plan(tmp_path / "in", to)
        assert {item.key for item in plan.unresolved} == parts - {"0.bias"}
        assert all("is part of a GPTQ or AWQ tensor" in item.reason for item in plan.unresolved)
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    assert_same_files(tmp_path / "in", tmp_path / "out")
    with pytest.raises(
        ckptmap.CkptmapError, match=r"cannot be bnb-nf4 where 0\..* stays"
    ) as caught:
        ckptmap.plan(tmp_path / "in", "hf-bnb-nf4", encode=("2.*",), no_encode=("0.*",))
    assert caught.value.code == "CKM203"
    ckptmap.plan(tmp_path / "in", "full-bnb-nf4", encode=("2.*",), no_encode=("0.*",))
    kept = ckptmap.convert(tmp_path / "in", tmp_path / "kept", to="hf-bf16", no_encode=("0.*",))
    assert kept.fidelity == {"bytes": len(parts), "cast": 3}
    for folder in ("out", "kept"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["quantization_config"] == {"quant_method": "x"}


def test_two_scales_of_modelopt() -> None:
    names = {"weight": "uint8", "weight_scale": "float8_e4m3fn", "weight_scale_2": "float32",
             "input_scale": "float32", "bias": "bfloat16"}  # fmt: skip
    infos = {f"fc.{name}": TensorInfo((4, 4), dtype) for name, dtype in names.items()}
    assert foreign_tensors(infos) == dict.fromkeys(set(infos) - {"fc.bias"}, "NVFP4")


def test_weights_that_compressed_tensors_did_not_compress_yet(tmp_path: Path) -> None:
    """Saved while frozen: dense, with the scales that they are quantized by as they are used."""
    scheme = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="tensor")
    compressed(tmp_path / "in", scheme, "float-quantized", compress=False)
    stored = load_file(tmp_path / "in" / "model.safetensors")
    parts = {key for key in stored if ".layers.0." in key and "layernorm" not in key}
    assert stored[QUERY].dtype == torch.bfloat16 and len(parts) == 3 * 7
    plan = ckptmap.plan(tmp_path / "in", "hf-fp32")
    assert {item.key for item in plan.unresolved} == parts
    assert all("compressed-tensors not yet compressed" in item.reason for item in plan.unresolved)
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    assert_same_files(tmp_path / "in", tmp_path / "out")


def bitnet(folder: Path, packed: bool) -> None:
    """As transformers packs it; or dense, quantized by its layers whenever they are used."""
    from transformers.integrations.bitnet import pack_weights

    model = llama()
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    for key in [key for key in state if packed and key.endswith("_proj.weight")]:
        weight = state[key].float()
        scale = 1 / weight.abs().mean().clamp_min(1e-5)
        state[key] = pack_weights((weight * scale).round().clamp(-1, 1))
        state[f"{key}_scale"] = scale.bfloat16().view(1)
    modes = ("bitlinear", "offline") if packed else ("autobitlinear", "online")
    model.config.quantization_config = {
        "quant_method": "bitnet", "linear_class": modes[0], "quantization_mode": modes[1],
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("packed", [True, False])
def test_bitnet(packed: bool, tmp_path: Path) -> None:
    bitnet(tmp_path / "in", packed)
    _, info = loaded(tmp_path / "in", output_loading_info=True)
    assert not any(info.values()), info
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    assert_same_files(tmp_path / "in", tmp_path / "out")
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("in", "out")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    plan = ckptmap.plan(tmp_path / "in", "hf-fp32")
    assert len(plan.unresolved) == (14 if packed else 0)
    assert all("part of a BitNet tensor" in item.reason for item in plan.unresolved)
    lost = [note for note in plan.notes if "no longer says quantization_config of bitnet" in note]
    assert len(lost) == (0 if packed else 1)


LAYERS: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
    "AQLM": {
        "codes": ((8, 8, 2), torch.int16), "codebooks": ((2, 256, 1, 8), torch.float16),
        "scales": ((8, 1, 1, 1), torch.float16),
    },
    "VPTQ": {
        "indices": ((1, 8, 8), torch.int16), "centroids.weight": ((1, 512), torch.float16),
        "res_centroids.weight": ((1, 512), torch.float16), "weight_scale": ((64,), torch.float16),
        "weight_bias": ((64,), torch.float16), "perm": ((64,), torch.int16),
    },
    "EXL2": {
        "q_weight": ((8, 64), torch.int32), "q_invperm": ((64,), torch.int16),
        "q_scale": ((2, 8), torch.int32), "q_scale_max": ((2,), torch.float16),
        "q_groups": ((4,), torch.int16),
    },
    "EXL3": {
        "trellis": ((4, 4, 48), torch.int16), "suh": ((64,), torch.float16),
        "svh": ((64,), torch.float16), "mcg": ((1,), torch.int32),
    },
    "HIGGS": {
        "weight": ((4, 64), torch.int16), "scales": ((64, 1), torch.float16),
        "tables": ((16,), torch.float16), "tables2": ((16, 16, 1), torch.float32),
    },
    "FP-Quant": {
        "qweight": ((64, 32), torch.uint8), "scales": ((64, 2), torch.uint8),
        "forward_hadamard_matrix": ((32, 32), torch.bfloat16),
        "backward_hadamard_matrix": ((32, 32), torch.bfloat16),
        "weight_global_scale": ((1,), torch.float32), "act_global_scale": ((1,), torch.float32),
    },
    "SpQR": {
        "dense_weights": ((64,), torch.int64), "row_offsets": ((65,), torch.int32),
        "col_vals": ((8,), torch.int32), "in_perm": ((64,), torch.int16),
    },
    "Marlin": {"B": ((4, 128), torch.int32), "s": ((1, 64), torch.float16)},
    "Marlin 2:4": {
        "weight_packed": ((2, 128), torch.int32), "scale_packed": ((1, 64), torch.float16),
        "meta": ((64, 2), torch.int16),
    },
    "EETQ int8": {"weight": ((64, 64), torch.int8), "weight_scales": ((64,), torch.float16)},
    "SINQ": {  # as sinq 0.2 wrote it: its scales are quantized again
        "W_q": ((64, 32), torch.uint8), "meta.scale.x": ((64, 1), torch.uint8),
        "meta.scale.m": ((1, 16), torch.float16), "meta.scale.s": ((1, 16), torch.float16),
        "meta.zero.x": ((64, 1), torch.uint8), "meta.zero.m": ((1, 1), torch.float16),
        "meta.zero.s": ((1, 1), torch.float16), "meta.scale2": ((1, 64), torch.float16),
    },
    "NVFP4 with swizzled scales": {  # buffers of transformers' NVFP4Linear
        "weight": ((64, 32), torch.uint8), "weight_sf": ((128, 1), torch.int32),
        "weight_sf_rowmajor": ((64, 4), torch.uint8), "weight_global_scale": ((1,), torch.float32),
    },
    "QQQ": {  # as gptqmodel 7.7 wrote it
        "B": ((4, 128), torch.int32), "s_group": ((2, 64), torch.float16),
        "s_channel": ((1, 64), torch.float32),
    },
    "ParoQuant": {  # as gptqmodel 7.7 wrote it
        "qweight": ((64, 8), torch.int32), "qzeros": ((2, 8), torch.int32),
        "scales": ((2, 64), torch.float16), "theta": ((8, 32), torch.float16),
        "pairs": ((8, 64), torch.int16), "channel_scales": ((1, 64), torch.float16),
    },
    "Metal": {
        "weight": ((64, 8), torch.uint32), "scales": ((64, 2), torch.float16),
        "qbiases": ((64, 2), torch.float16),
    },
    "MLX": {  # as mlx_lm.convert 0.32 wrote it; the form mxfp4 has no biases
        "weight": ((64, 8), torch.uint32), "scales": ((64, 1), torch.bfloat16),
        "biases": ((64, 1), torch.bfloat16),
    },
    "scaled uint8": {  # as Quark 0.13 exported Uint8PerTensorSpec
        "weight": ((64, 64), torch.uint8), "weight_scale": ((), torch.float32),
        "weight_zero_point": ((), torch.uint8),
    },
    "packed int4 (ModelOpt, Gemma)": {  # as ModelOpt 0.47 exported W4A8_AWQ
        "weight": ((32, 64), torch.uint8), "weight_scale": ((64, 1), torch.float32),
        "weight_scale_2": ((), torch.float32), "input_scale": ((), torch.float32),
        "pre_quant_scale": ((64,), torch.bfloat16),
    },
}  # fmt: skip
"""The names, ranks and dtypes of one layer, by hand: each library needs a GPU, or CUDA to be built."""


@pytest.mark.parametrize("name", LAYERS)
def test_schemes_are_named_with_who_reads_them(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    state = {
        f"fc.{part}": torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        for part, (shape, dtype) in LAYERS[name].items()
    }
    parts = set(state)
    state |= {"fc.bias": torch.ones(64).half(), "norm.weight": torch.ones(64).half()}
    save_file(state, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    plan = ckptmap.plan(tmp_path / "in", "hf-bf16")
    assert not any("converted as a weight" in note for note in plan.notes), plan.notes
    assert {item.key for item in plan.unresolved} == parts
    assert all(f"is part of a {name} tensor" in item.reason for item in plan.unresolved)
    with pytest.raises(ckptmap.CkptmapError) as caught:
        plan.require_resolved()
    assert READERS[name] in str(caught.value) + str(caught.value.hint)
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    assert_same_files(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("scale", [(64,), (64, 1)])
def test_int8_beside_its_scales_does_not_lack_them(scale: tuple[int, ...], tmp_path: Path) -> None:
    """Scales of rows as ModelOpt 0.47 (W8A16, SmoothQuant) and Quark 0.13 wrote them."""
    state = {
        "fc.weight": torch.ones(64, 64).to(torch.int8), "fc.weight_scale": torch.ones(scale),
        "fc.pre_quant_scale": torch.ones(64),
    }  # fmt: skip
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    with ckptmap.open(tmp_path / "in") as ckpt:
        assert not any("without its scales" in note for note in ckpt.notes), ckpt.notes
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    assert_same_files(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("to", ["full-bf16", "full-fp32", "hf-bf16", "full-bnb-nf4"])
def test_dtypes_that_no_library_writes_stay_with_a_note(to: str, tmp_path: Path) -> None:
    """They may be codes of a form that nobody knows here; masks, counts and indices say nothing."""
    odd = {
        "float4_e2m1fn_x2": torch.arange(64, dtype=torch.uint8).view(8, 8).view(torch.float4_e2m1fn_x2),
        "float8_e8m0fnu": torch.full((8, 8), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        **{kind: torch.ones(8, 8).to(getattr(torch, kind)) for kind in ("uint8", "uint16", "uint32", "uint64")},
        "int16": torch.ones(8, 8).short(),
    }  # fmt: skip
    plain = {
        "layers.0.fc.weight": torch.ones(64, 64), "mask": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "count": torch.tensor(3), "index": torch.ones(8, 8).long(), "seen": torch.ones(8, 8).bool(),
    }  # fmt: skip
    torch.save({**plain, **{f"{name}.weight": t for name, t in odd.items()}}, tmp_path / "in.pt")
    title = "stays as it is: "
    lines = [n for n in ckptmap.plan(tmp_path / "in.pt", to).notes if n.startswith(title)]
    assert sorted(
        line.removeprefix(title).split(".weight: cannot be ")[0] for line in lines
    ) == sorted(odd)
    assert all(
        line.split(".weight")[0].removeprefix(title) in line.split("cannot be")[1] for line in lines
    )
    strict = ckptmap.plan(tmp_path / "in.pt", to, strict=True)
    assert sorted(one.key for one in strict.unresolved) == sorted(f"{name}.weight" for name in odd)
    kept = [f"{name}.weight" for name in odd]  # as the hint says
    assert f"--no-encode {strict.unresolved[0].key}" in strict.unresolved[0].hint
    assert not ckptmap.plan(tmp_path / "in.pt", to, strict=True, no_encode=kept).unresolved
