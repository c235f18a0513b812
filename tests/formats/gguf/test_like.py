"""`--as model.gguf`: weights that did not change are its bytes, and so are its metadata; the others have its types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import PlanError
from tests.formats.gguf.test_writer import fields, stored
from tests.support.bnb_cases import refused
from tests.support.gguf_files import blocks, write
from tests.support.gguf_models import MODELS, build, write_model


def trained(folder: Path, key: str) -> Path:
    """Change one weight of a model, as training would, and save it as transformers does."""
    weights = load_file(folder / "model.safetensors")
    weights[key] = weights[key] + 0.5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "ckptmap.manifest.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "Q8_0"), ("llama", "F16"), ("llama-tied", "Q4_0"), ("qwen2", "Q5_1"), ("qwen3_moe", "Q8_0"),
        ("gemma2", "Q4_1"), ("gemma3", "F16"), ("phi3", "Q5_0"), ("gpt_oss", "MXFP4"),
    ],
)  # fmt: skip
def test_the_way_there_and_back_is_the_same_file(name: str, kind: str, tmp_path: Path) -> None:
    source = write_model(MODELS[name], build(MODELS[name]), tmp_path / "source.gguf", kind)
    to = "hf-bf16" if name != "gemma2" else "fsdp2-bf16"  # which has no config.json
    ckptmap.convert(source, tmp_path / "work", to=to, strict=True)
    ckptmap.convert(tmp_path / "work", tmp_path / "back.gguf", as_=source)
    before, after = source.read_bytes(), (tmp_path / "back.gguf").read_bytes()
    assert after[: len(before)] == before, "the manifest follows it"
    assert ckptmap.verify(tmp_path / "back.gguf").ok


def test_a_changed_weight_has_the_type_of_the_source(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, quants

    source = write_model(MODELS["qwen2"], build(MODELS["qwen2"]), tmp_path / "source.gguf", "Q4_0")
    ckptmap.convert(source, tmp_path / "hf", to="hf-bf16")
    trained(tmp_path / "hf", key := "model.layers.0.self_attn.q_proj.weight")
    report = ckptmap.convert(tmp_path / "hf", tmp_path / "back.gguf", as_=source)
    assert "26 of 27 weights byte-identical" in str(report)
    before, after = stored(source), stored(tmp_path / "back.gguf")
    changed = [name for name in before if not np.array_equal(before[name][2], after[name][2])]
    assert changed == ["blk.0.attn_q.weight"]
    w = load_file(tmp_path / "hf" / "model.safetensors")[key].float().numpy()
    assert np.array_equal(after[changed[0]][2], quants.quantize(w, GGMLQuantizationType.Q4_0))
    assert fields(source) == fields(tmp_path / "back.gguf")


def k_quants(folder: Path) -> Path:
    """A Llama of one layer in Q4_K and Q6_K, with random codes and scales that are finite."""
    shapes = {
        "token_embd": (96, 256), "blk.0.attn_q": (256, 256), "blk.0.attn_k": (256, 256), "blk.0.attn_v": (256, 256),
        "blk.0.attn_output": (256, 256), "blk.0.ffn_gate": (512, 256), "blk.0.ffn_up": (512, 256),
        "blk.0.ffn_down": (256, 512),
    }  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        kind = "Q6_K" if name.endswith("down") else "Q4_K"
        raw = blocks(kind, shape)
        scales = (208, 210) if kind == "Q6_K" else (0, 4)
        numel = 210 if kind == "Q6_K" else 144
        raw.reshape(-1, numel)[:, scales[0] : scales[1]] = np.frombuffer(
            np.full((scales[1] - scales[0]) // 2, 0.01, dtype=np.float16).tobytes(), dtype=np.uint8
        )
        tensors[f"{name}.weight"] = (kind, raw)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        tensors[f"{name}.weight"] = ("F32", np.ones(256, dtype=np.float32))
    sizes = {
        "block_count": 1,
        "embedding_length": 256,
        "feed_forward_length": 512,
        "context_length": 64,
    }
    heads = {"attention__head_count": 4, "attention__head_count_kv": 4}
    keys = {f"llama__{key}": value for key, value in {**sizes, **heads}.items()}
    return write(folder / "k.gguf", tensors, llama__attention__layer_norm_rms_epsilon=1e-6, **keys)


def test_types_that_are_not_made_here(tmp_path: Path) -> None:
    """They stay as bytes; a changed weight is refused by its name, with the command that writes all."""
    source = k_quants(tmp_path)
    ckptmap.convert(source, tmp_path / "work", to="hf-bf16")
    ckptmap.convert(tmp_path / "work", tmp_path / "same.gguf", as_=source)
    before = source.read_bytes()
    assert (tmp_path / "same.gguf").read_bytes()[: len(before)] == before
    trained(tmp_path / "work", "model.layers.0.mlp.up_proj.weight")
    with refused(
        PlanError, "CKM202", r"blk.0.ffn_up.weight: has changed, and cannot be made gguf-q4_k.*"
    ) as caught:
        ckptmap.convert(tmp_path / "work", tmp_path / "back.gguf", as_=source)
    assert "--to gguf-q8_0 --config-from MODEL.gguf" in str(caught.value)
    ckptmap.convert(
        tmp_path / "work", tmp_path / "back.gguf", to="gguf-q8_0", config_from=str(source)
    )
    kinds = {kind for kind, *_ in stored(tmp_path / "back.gguf").values()}
    assert kinds == {"F32", "Q8_0"}
    told = fields(tmp_path / "back.gguf")
    assert {key: told[key] for key in fields(source)} == fields(source)
