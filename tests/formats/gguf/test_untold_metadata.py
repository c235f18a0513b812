"""What a config.json does not say, or says wrongly, is told when a GGUF file is made of it, and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

import ckptmap
from tests.formats.gguf.test_writer import fields, saved
from tests.support.gguf_models import MODELS, build, write_model


def noted(folder: Path, name: str = "llama", drop: str = "", **changes: Any) -> list[str]:
    """Notes of a conversion to GGUF, with an edited config.json."""
    source = saved(name, folder)
    config = json.loads((source / "config.json").read_text())
    config |= changes
    config.pop(drop, None)
    (source / "config.json").write_text(json.dumps(config))
    report = ckptmap.convert(source, folder / "m.gguf", to="gguf")
    return [note for note in report.notes if "config.json" in note and note.startswith(("config.json", "the file says"))]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_config_needs_no_note(name: str, tmp_path: Path) -> None:
    assert not noted(tmp_path, name)


@pytest.mark.parametrize(
    ("key", "missing"),
    [
        ("max_position_embeddings", "llama.context_length"),
        ("intermediate_size", "llama.feed_forward_length"),
        ("rms_norm_eps", "llama.attention.layer_norm_rms_epsilon"),
    ],
)
def test_a_size_that_is_missing(key: str, missing: str, tmp_path: Path) -> None:
    (note,) = noted(tmp_path, drop=key)
    assert f"states no {key} ({missing}), without which llama.cpp loads no llama" in note
    assert missing not in fields(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_position_embeddings", "64"), ("max_position_embeddings", -64), ("rms_norm_eps", True),
        ("rope_theta", []), ("head_dim", 16.0), ("max_position_embeddings", 1 << 32),
        ("rms_norm_eps", {}), ("rms_norm_eps", float("nan")), ("partial_rotary_factor", "half"),
    ],
)  # fmt: skip
def test_a_size_of_another_type(key: str, value: object, tmp_path: Path) -> None:
    notes = noted(tmp_path, **{key: value})
    assert any(f"{key}: {value!r} is no number that llama." in note for note in notes), notes


def test_further_tokens_that_end_a_text(tmp_path: Path) -> None:
    """Llama 3 and Gemma 3 state several; the file states the first."""
    (note,) = noted(tmp_path, eos_token_id=[2, 5, 9])
    assert (
        "3 tokens end a text (eos_token_id [2, 5, 9]), and tokenizer.ggml.eos_token_id states one"
        in note
    )
    assert fields(tmp_path / "m.gguf")["tokenizer.ggml.eos_token_id"] == 2


def test_experts_that_are_not_counted(tmp_path: Path) -> None:
    (note,) = noted(tmp_path, "qwen3_moe", drop="num_experts_per_tok")
    assert "states no num_experts_per_tok (qwen3moe.expert_used_count)" in note


@pytest.mark.parametrize("model_type", [None, ""])
def test_a_model_without_an_architecture(model_type: object, tmp_path: Path) -> None:
    """Its names tell what it is, but not its sizes."""
    (note,) = noted(tmp_path, "qwen3", model_type=model_type)
    assert note.startswith("the file says nothing of the model")
    assert f"model_type {model_type!r} of config.json is none of gemma, gemma2" in note
    assert not [key for key in fields(tmp_path / "m.gguf") if key.startswith("qwen3.")]


@pytest.mark.parametrize("token", ["padding", "bos"])
def test_a_token_beyond_the_vocabulary(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """transformers makes an embedding with that row, and stops."""
    add = GGUFWriter.add_uint32
    monkeypatch.setattr(
        GGUFWriter, "add_uint32",
        lambda self, key, value: add(self, key, 96 if key.endswith(f"{token}_token_id") else value),
    )  # fmt: skip
    path = write_model(MODELS["llama"], build(MODELS["llama"]), tmp_path / "m.gguf")
    assert fields(path)[f"tokenizer.ggml.{token}_token_id"] == 96
    report = ckptmap.convert(path, tmp_path / "out", to="hf-bf16")
    (note,) = [note for note in report.notes if "is no token of the 96" in note]
    assert note.startswith(f"{'pad' if token == 'padding' else token}_token_id 96: ")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("name", MODELS)
def test_whole_metadata_need_no_note(name: str, tmp_path: Path) -> None:
    path = write_model(MODELS[name], build(MODELS[name]), tmp_path / "m.gguf")
    assert not ckptmap.open(path).index.notes


def test_metadata_without_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GGUFWriter, "add_layer_norm_rms_eps", lambda self, value: None)
    monkeypatch.setattr(GGUFWriter, "add_context_length", lambda self, value: None)
    path = write_model(MODELS["llama"], build(MODELS["llama"]), tmp_path / "m.gguf")
    (note,) = ckptmap.open(path).index.notes
    assert "state no llama.context_length, llama.attention.layer_norm_rms_epsilon, and" in note
    assert "no max_position_embeddings, rms_norm_eps: transformers takes its defaults" in note


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("qwen2_moe", "norm_topk_prob", True, "with False"),
        ("qwen3_moe", "norm_topk_prob", False, "with True"),
        ("gemma2", "query_pre_attn_scalar", 144, "with 256"),
        ("gemma3", "query_pre_attn_scalar", 168, "with 256"),
        ("mixtral", "sliding_window", 32, "without it"),
    ],
)
def test_what_llama_cpp_computes_otherwise(
    name: str, key: str, value: object, said: str, tmp_path: Path
) -> None:
    """Its converter writes nothing of these, too: the program knows them by the architecture."""
    (note,) = noted(tmp_path, name, **{key: value})
    assert f"{key}: {value!r} has no key in GGUF" in note and note.endswith(said)


@pytest.mark.parametrize("slides", [False, True])
def test_a_window_that_does_not_slide_needs_no_note(slides: bool, tmp_path: Path) -> None:
    notes = noted(tmp_path, "qwen2", sliding_window=32, use_sliding_window=slides)
    assert [note.endswith("llama.cpp computes without it") for note in notes] == [True] * slides
