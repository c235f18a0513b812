"""Models of transformers become GGUF files that the `gguf` package and transformers read, and come back the same.

The oracle is the `gguf` package: its writer's file of the same model (`tests/support/gguf_models.py`) has the
tensors, types and metadata that ours must have, and its `quantize` the bytes of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ckptmap
from ckptmap.errors import CkptmapError, DestinationError, PlanError, SourceError
from tests.formats.gguf.test_models import BY_TRANSFORMERS
from tests.support.bnb_cases import refused
from tests.support.gguf_models import MODELS, build, logits, named, write_model

OWN = {"general.name", "general.type", "general.file_type", "general.quantization_version"}
"""Keys that `write_model` leaves to llama.cpp's converter, or names otherwise."""
ENCODED = {"q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "mxfp4": 38}
"""Encodings with their `general.file_type`."""


def fields(path: Path) -> dict[str, Any]:
    found = GGUFReader(path).fields
    return {key: value.contents() for key, value in found.items() if not key.startswith("GGUF.")}


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
    """Name -> type, shape and bytes of each tensor, as the `gguf` package finds them."""
    return {
        t.name: (t.tensor_type.name, tuple(map(int, t.shape)), np.asarray(t.data))
        for t in GGUFReader(path).tensors
    }


def saved(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    build(MODELS[name]).to(dtype).save_pretrained(folder / "hf")
    return folder / "hf"


def weights(folder: Path) -> Mapping[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_the_file_is_that_of_the_gguf_package(name: str, tmp_path: Path) -> None:
    built = build(MODELS[name])
    built.save_pretrained(tmp_path / "hf")
    theirs = write_model(MODELS[name], built, tmp_path / "theirs.gguf")
    ckptmap.convert(tmp_path / "hf", tmp_path / "ours.gguf", to="gguf-fp32", strict=True)
    ours, expected = stored(tmp_path / "ours.gguf"), stored(theirs)
    assert ours.keys() == expected.keys()
    for key, (kind, shape, data) in expected.items():
        assert ours[key][:2] == (kind, shape) and np.array_equal(ours[key][2], data), key
    ours_told, theirs_told = fields(tmp_path / "ours.gguf"), fields(theirs)
    assert {k: v for k, v in ours_told.items() if k in theirs_told.keys() - OWN} == {
        k: v for k, v in theirs_told.items() if k not in OWN
    }
    assert ours_told["general.file_type"] == 0
    assert ours_told["general.quantization_version"] == 2


@pytest.mark.parametrize("name", MODELS)
def test_bf16_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path)
    report = ckptmap.convert(source, tmp_path / "m.gguf", to="gguf", strict=True)
    assert any(note.endswith("/gguf") for note in report.notes)
    for key, (kind, shape, _) in stored(tmp_path / "m.gguf").items():
        wide = len(shape) == 1 or "norm" in key or "gate_inp" in key or key.endswith(".bias")
        assert kind == ("F32" if wide else "BF16"), key
    assert ckptmap.verify(tmp_path / "m.gguf", against=source).ok
    ckptmap.convert(tmp_path / "m.gguf", tmp_path / "back", to="hf-bf16", strict=True)
    before, after = weights(source), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_transformers_loads_it_with_the_same_logits(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path)
    ckptmap.convert(source, tmp_path / "m.gguf", to="gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert np.array_equal(logits(theirs.eval()), logits(model.eval()))


@pytest.mark.parametrize("kind", ENCODED)
def test_blocks_are_those_of_the_gguf_package(kind: str, tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, quants

    source = saved("llama", tmp_path)
    ckptmap.convert(source, tmp_path / "m.gguf", to=f"gguf-{kind}", strict=True)
    built = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    found = stored(tmp_path / "m.gguf")
    for key, w in named(MODELS["llama"], built).items():
        wanted = "F32" if w.ndim == 1 else kind.upper()
        if key in ("token_embd.weight", "output.weight"):
            wanted = "Q8_0"
        assert found[key][0] == wanted, key
        expected = quants.quantize(w.detach().numpy(), GGMLQuantizationType[wanted])
        assert np.array_equal(found[key][2].view(np.uint8), expected.view(np.uint8)), key
    assert fields(tmp_path / "m.gguf")["general.file_type"] == ENCODED[kind]
    assert ckptmap.verify(tmp_path / "m.gguf", against=source).ok
    back = ckptmap.open(tmp_path / "m.gguf")
    assert back.setup == (f"gguf-{kind}" if kind == "q8_0" else f"gguf-q8_0-{kind}")


def test_rows_that_are_no_whole_blocks_are_fp16(tmp_path: Path) -> None:
    config = {**MODELS["llama"].config, "intermediate_size": 100}
    model = type(MODELS["llama"])(MODELS["llama"].arch, config, MODELS["llama"].change)
    build(model).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    report = ckptmap.convert(tmp_path / "hf", tmp_path / "m.gguf", to="gguf-q4_0")
    told = [note for note in report.notes if note.startswith("not in blocks: ")]
    why = "is stored as float16, since rows of 100 values are no whole blocks of 32"
    assert told == [f"not in blocks: blk.{n}.ffn_down.weight: {why}" for n in (0, 1)]
    kinds = {key: kind for key, (kind, *_) in stored(tmp_path / "m.gguf").items()}
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == "Q4_0"


def test_factors_of_rotary_frequencies_are_tensors(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    }  # fmt: skip
    config = {k: v for k, v in MODELS["llama"].config.items() if k != "rope_theta"}
    config |= {"rope_parameters": scaling, "head_dim": 64}
    model = type(MODELS["llama"])(MODELS["llama"].arch, config, MODELS["llama"].change)
    build(model).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    ckptmap.convert(tmp_path / "hf", tmp_path / "m.gguf", to="gguf", strict=True)
    kind, shape, values = stored(tmp_path / "m.gguf")["rope_freqs.weight"]
    assert (kind, shape) == ("F32", (32,))
    plain = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, rope_parameters={
        "rope_type": "default", "rope_theta": 500000.0})).inv_freq  # fmt: skip
    scaled = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, rope_parameters=scaling)).inv_freq
    assert np.allclose(values, (plain / scaled).numpy(), rtol=1e-5)
    assert ckptmap.verify(tmp_path / "m.gguf", against=tmp_path / "hf").ok
    ckptmap.convert(tmp_path / "m.gguf", tmp_path / "again.gguf", to="gguf-q8_0")
    assert np.array_equal(stored(tmp_path / "again.gguf")["rope_freqs.weight"][2], values)
    ckptmap.convert(tmp_path / "m.gguf", tmp_path / "back", to="hf-bf16", strict=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert loaded.config.rope_parameters["factor"] == 8.0


def test_a_gguf_file_keeps_its_metadata_in_other_blocks(tmp_path: Path) -> None:
    theirs = write_model(MODELS["qwen2"], build(MODELS["qwen2"]), tmp_path / "theirs.gguf")
    ckptmap.convert(theirs, tmp_path / "m.gguf", to="gguf-q8_0", strict=True)
    assert fields(tmp_path / "m.gguf") == fields(theirs)
    assert stored(tmp_path / "m.gguf")["blk.0.attn_q.weight"][0] == "Q8_0"


def test_the_same_bytes_whatever_runs_them(tmp_path: Path) -> None:
    source = saved("llama", tmp_path)
    for name, threads in (("a", 1), ("b", 4)):
        ckptmap.convert(source, tmp_path / f"{name}.gguf", to="gguf-q4_0", threads=threads)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_names_of_no_known_model_stay(tmp_path: Path) -> None:
    torch.save(
        {"some.w": torch.ones(4, 8, dtype=torch.float16), "n": torch.arange(3)}, tmp_path / "m.pt"
    )
    report = ckptmap.convert(tmp_path / "m.pt", tmp_path / "m.gguf", to="gguf")
    assert any(
        "the names stay as they are, which no library of gguf loads" in n for n in report.notes
    )
    found = stored(tmp_path / "m.gguf")
    assert {key: kind for key, (kind, *_) in found.items()} == {"some.w": "F16", "n": "I64"}


def test_refusals(tmp_path: Path) -> None:
    source = saved("llama", tmp_path)
    with refused(DestinationError, "CKM304", "names another kind of file"):
        ckptmap.convert(source, tmp_path / "m.pt", to="gguf")
    with refused(DestinationError, "CKM304", "names another kind of file"):
        ckptmap.convert(source, tmp_path / "m.gguf", to="full")
    with refused(PlanError, "CKM203", "a GGUF file holds blocks of ggml's, and none of nf4"):
        ckptmap.plan(source, "gguf-nf4")
    (source / "config.json").write_text('{"model_type": "falcon"}')
    with refused(PlanError, "CKM604", "the names fit llama|has no scheme 'gguf'"):
        ckptmap.plan(source, "gguf")
    torch.save({"x" * 64: torch.ones(2)}, tmp_path / "long.pt")
    with refused(PlanError, "CKM203", "a name of 64 bytes, of which llama.cpp reads 63"):
        ckptmap.plan(tmp_path / "long.pt", "gguf")
    torch.save({"w": torch.ones(2, dtype=torch.bool)}, tmp_path / "bool.pt")
    with refused(PlanError, "CKM203", "type of tensor for bool; leave it out with --exclude w"):
        ckptmap.plan(tmp_path / "bool.pt", "gguf")


def test_a_manifest_of_another_size_is_refused(tmp_path: Path) -> None:
    torch.save({"some.w": torch.ones(4, 8)}, tmp_path / "m.pt")
    ckptmap.convert(tmp_path / "m.pt", tmp_path / "m.gguf", to="gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    assert data.endswith(b"ckptmap\n")
    for stated in (0, 1 << 63, len(data)):
        (tmp_path / "m.gguf").write_bytes(data[:-16] + stated.to_bytes(8, "little") + data[-8:])
        with refused(SourceError, "CKM119", f"its manifest: expected .*, found {stated} stated"):
            ckptmap.open(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(data[:-1])
    with pytest.raises(CkptmapError, match="has no manifest, so ckptmap did not write it"):
        ckptmap.verify(tmp_path / "m.gguf")
