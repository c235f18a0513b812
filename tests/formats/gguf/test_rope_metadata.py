"""Scalings of rotary frequencies in config.json: written as llama.cpp reads them, or left out with a note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import ckptmap
from tests.formats.gguf.test_writer import fields, saved, stored

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
LONG = {"rope_type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
NONSENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "a type without keys": ("llama", {**LLAMA3, "rope_type": "dynamic"}),
    "a base below 0": ("llama", {**LLAMA3, "rope_theta": -1}),
    "a base of 0": ("llama", {**LLAMA3, "rope_theta": 0}),
    "a factor of 0": ("llama", {**LLAMA3, "factor": 0}),
    "no factor": ("llama", {k: v for k, v in LLAMA3.items() if k != "factor"}),
    "equal ends": ("llama", {**LLAMA3, "low_freq_factor": 4.0}),
    "Llama's in Qwen": ("qwen2", LLAMA3),
    "Phi's in Llama": ("llama", LONG),
    "too few factors": ("phi3", {**LONG, "long_factor": [2.0], "short_factor": [1.0]}),
}
"""Factors of another length, or beside an architecture that has none, make files that llama.cpp does not load."""


def scaled(name: str, folder: Path, scaling: dict[str, Any], **more: object) -> Path:
    source = saved(name, folder)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rope_parameters": scaling, **more}))
    return source


@pytest.mark.parametrize("case", NONSENSE)
def test_left_out_with_a_note(case: str, tmp_path: Path) -> None:
    name, scaling = NONSENSE[case]
    report = ckptmap.convert(scaled(name, tmp_path, scaling), tmp_path / "m.gguf", to="gguf")
    assert any(f"{scaling['rope_type']!r} with such numbers" in note for note in report.notes)
    assert not [key for key in stored(tmp_path / "m.gguf") if key.startswith("rope")]
    told = {key for key in fields(tmp_path / "m.gguf") if "rope.scaling" in key}
    assert told <= {"phi3.rope.scaling.original_context_length"}, "which Phi-3 states in any case"


@pytest.mark.parametrize("before", [-1, 1 << 40])
def test_contexts_that_are_no_u32(before: int, tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": before}
    ckptmap.convert(scaled("llama", tmp_path, scaling), tmp_path / "m.gguf", to="gguf")
    told = fields(tmp_path / "m.gguf")
    assert told["llama.rope.scaling.factor"] == 4.0
    assert "llama.rope.scaling.original_context_length" not in told


def test_numbers_of_yarn_go_there_and_back(tmp_path: Path) -> None:
    """Keys of `gguf.constants.Keys.Rope`, which llama.cpp's converter writes where the config states them."""
    numbers = {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **numbers}
    source = scaled("qwen2", tmp_path, {**yarn, "rope_theta": 10000.0})
    ckptmap.convert(source, tmp_path / "m.gguf", to="gguf", strict=True)
    told = fields(tmp_path / "m.gguf")
    keys = ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
    assert [told[f"qwen2.rope.scaling.{key}"] for key in keys] == [*numbers.values()]
    ckptmap.convert(tmp_path / "m.gguf", tmp_path / "back", to="hf-bf16")
    assert json.loads((tmp_path / "back/config.json").read_text())["rope_scaling"] == yarn


def test_the_base_of_sliding_layers_goes_there_and_back(tmp_path: Path) -> None:
    source = saved("gemma3", tmp_path)
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"]["sliding_attention"]["rope_theta"] = 5000.0
    (source / "config.json").write_text(json.dumps(config))
    ckptmap.convert(source, tmp_path / "m.gguf", to="gguf", strict=True)
    assert fields(tmp_path / "m.gguf")["gemma3.rope.freq_base_swa"] == 5000.0
    ckptmap.convert(tmp_path / "m.gguf", tmp_path / "back", to="hf-bf16")
    back = AutoConfig.from_pretrained(tmp_path / "back").rope_parameters
    assert back["sliding_attention"]["rope_theta"] == 5000.0
    assert back["full_attention"]["rope_theta"] == 1000000.0


def test_attention_of_long_contexts_is_scaled(tmp_path: Path) -> None:
    """llama.cpp takes the factor from the file, and 1 without it; the oracle is transformers."""
    more = {"original_max_position_embeddings": 64, "max_position_embeddings": 2048}
    source = scaled("phi3", tmp_path, LONG | {"rope_theta": 10000.0}, **more)
    ckptmap.convert(source, tmp_path / "m.gguf", to="gguf", strict=True)
    config = Phi3Config.from_pretrained(source)
    _, expected = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
    told = fields(tmp_path / "m.gguf")
    assert expected > 1 and told["phi3.rope.scaling.attn_factor"] == pytest.approx(expected)
    assert told["phi3.rope.scaling.original_context_length"] == 64
    assert stored(tmp_path / "m.gguf")["rope_factors_long.weight"][2].tolist() == [2.0] * 8
