"""A LoRA adapter merged into a GGUF file in one command: its names are llama.cpp's, the adapter's are peft's.

The oracle is the way by three commands: to Hugging Face's names, the merge, back `--as` the base.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ckptmap
from ckptmap.errors import PlanError
from tests.formats.gguf.test_like import k_quants
from tests.formats.gguf.test_writer import fields, stored
from tests.support.bnb_cases import refused
from tests.support.gguf_models import MODELS, build, write_model
from tests.support.merge_cases import LINEARS, adapted, merged_by_peft, save_adapter

FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
OF_MODEL = {"phi3": FUSED, "qwen3_moe": ("q_proj", "v_proj")}


def base_and_adapter(name: str, kind: str, folder: Path) -> tuple[Path, Path]:
    built = build(MODELS[name])
    source = write_model(MODELS[name], built, folder / "base.gguf", kind)
    save_adapter(
        adapted(built, target_modules=list(OF_MODEL.get(name, LINEARS))), folder / "adapter"
    )
    return source, folder / "adapter"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "Q8_0"), ("llama", "F16"), ("llama-tied", "Q4_0"), ("qwen2", "Q4_0"), ("gemma2", "Q4_1"),
        ("phi3", "Q5_0"), ("qwen3_moe", "Q8_0"),
    ],
)  # fmt: skip
def test_one_command_makes_the_file_of_three(name: str, kind: str, tmp_path: Path) -> None:
    source, adapter = base_and_adapter(name, kind, tmp_path)
    report = ckptmap.merge(source, adapter, tmp_path / "new.gguf", force=True)
    assert "weights byte-identical" in str(report)
    ckptmap.convert(source, tmp_path / "BASE", to="hf-fp32")
    ckptmap.merge(tmp_path / "BASE", adapter, tmp_path / "MERGED")
    ckptmap.convert(tmp_path / "MERGED", tmp_path / "three.gguf", as_=source)
    one, three, before = map(stored, (tmp_path / "new.gguf", tmp_path / "three.gguf", source))
    assert one.keys() == three.keys() == before.keys()
    for key, (type_, shape, data) in three.items():
        assert one[key][:2] == (type_, shape) == before[key][:2]
        assert np.array_equal(one[key][2], data), key
    assert fields(tmp_path / "new.gguf") == fields(source)
    changed = [key for key in before if not np.array_equal(before[key][2], one[key][2])]
    assert 0 < len(changed) < len(before)
    assert ckptmap.verify(tmp_path / "new.gguf", against=source, adapter=adapter).ok
    assert not ckptmap.verify(tmp_path / "new.gguf", against=source).ok


@pytest.mark.parametrize("to", ["hf-bf16", "gguf-q8_0", "gguf-bf16", "fsdp2-fp32"])
def test_in_another_setup(to: str, tmp_path: Path) -> None:
    source, adapter = base_and_adapter("llama", "Q4_0", tmp_path)
    ckptmap.merge(source, adapter, tmp_path / "out", to=to, force=True)
    assert ckptmap.verify(tmp_path / "out", against=source, adapter=adapter).ok
    if to.startswith("gguf"):
        told, said = fields(tmp_path / "out"), fields(source)
        assert told.keys() >= said.keys()
        assert {k: v for k, v in told.items() if k in said and "file_type" not in k} == {
            k: v for k, v in said.items() if "file_type" not in k
        }
    if to == "hf-bf16":
        ckptmap.convert(source, tmp_path / "BASE", to="hf-fp32")
        ckptmap.merge(tmp_path / "BASE", adapter, tmp_path / "MERGED", to="hf-bf16")
        one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "MERGED"))
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("target", ["q_proj", "up_proj"])
def test_a_grid_needs_force(target: str, tmp_path: Path) -> None:
    """Rows of q are in another order in GGUF, so the merged tensor is a derived one there."""
    built = build(MODELS["llama"])
    source = write_model(MODELS["llama"], built, tmp_path / "base.gguf", "Q4_0")
    save_adapter(adapted(built, target_modules=[target]), tmp_path / "adapter")
    with refused(PlanError, "CKM323", "2 merged tensors would be rounded to the gguf-q4_0 grid"):
        ckptmap.merge(source, tmp_path / "adapter", tmp_path / "new.gguf")
    assert not (tmp_path / "new.gguf").exists()


def test_types_that_are_not_made_here(tmp_path: Path) -> None:
    source = k_quants(tmp_path)
    ckptmap.convert(source, tmp_path / "hf", to="hf-bf16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    save_adapter(adapted(model, target_modules=["q_proj"]), tmp_path / "adapter")
    with refused(
        PlanError, "CKM202", r"blk.0.attn_q.weight: is merged, and cannot be made gguf-q4_k"
    ):
        ckptmap.merge(source, tmp_path / "adapter", tmp_path / "new.gguf")
    ckptmap.merge(source, tmp_path / "adapter", tmp_path / "new.gguf", to="gguf-q8_0", force=True)
    assert {kind for kind, *_ in stored(tmp_path / "new.gguf").values()} == {"F32", "Q8_0"}


def test_by_the_command_line(tmp_path: Path) -> None:
    from ckptmap_cli.main import main

    source, adapter = base_and_adapter("llama", "F16", tmp_path)
    assert main(["merge", str(source), str(adapter), str(tmp_path / "new.gguf")]) == 0
    assert stored(tmp_path / "new.gguf")["blk.0.attn_q.weight"][0] == "F16"


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["lm_head", "embed_tokens"])
def test_a_head_that_is_tied_in_the_file(whole: str, tmp_path: Path) -> None:
    """A file without `output.weight` ties its head, which no config.json has to tell: peft trains one of the two."""
    built = build(MODELS["llama-tied"])
    source = write_model(MODELS["llama-tied"], built, tmp_path / "base.gguf", "Q8_0")
    ckptmap.convert(source, tmp_path / "BASE", to="hf-fp32")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "BASE", dtype=torch.float32)
    wrapped = adapted(base, target_modules=["q_proj"], modules_to_save=[whole])
    save_adapter(wrapped, tmp_path / "adapter")
    wanted = merged_by_peft(wrapped)
    assert not torch.equal(wanted["lm_head.weight"], wanted["model.embed_tokens.weight"])
    ckptmap.merge(source, tmp_path / "adapter", tmp_path / "out", to="hf-fp32")
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(merged.lm_head.weight, wanted["lm_head.weight"])
    with refused(PlanError, "CKM212", match="a tensor of its own: it cannot"):
        ckptmap.merge(source, tmp_path / "adapter", tmp_path / "new.gguf", force=True)
    ckptmap.merge(source, tmp_path / "adapter", tmp_path / "new.gguf", to="gguf-q8_0", force=True)
    assert ckptmap.verify(tmp_path / "new.gguf", against=source, adapter=tmp_path / "adapter").ok
    ckptmap.convert(tmp_path / "new.gguf", tmp_path / "again", to="hf-fp32")
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (again[key] - value).norm() <= 0.01 * value.norm(), key
