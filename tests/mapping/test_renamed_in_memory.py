"""State dicts of families that transformers renames on disk: it loads their names in memory, and a note says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import ckptmap
from ckptmap.mapping.memory_names import SIGNS, named_as_in_memory
from ckptmap.mapping.renamings_on_disk import TEXT_ON_DISK

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip


def llava() -> Any:
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_index=63,
    )
    return transformers.LlavaForConditionalGeneration(config)


def mistral3() -> Any:
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **TEXT},
        vision_config={"model_type": "pixtral", "head_dim": 16, **VISION},
        image_token_index=63,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def vit() -> Any:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VISION))


def exaone() -> Any:
    if "exaone" not in CONFIG_MAPPING_NAMES:
        pytest.skip("transformers has EXAONE 3 since 5.24")
    config = transformers.AutoConfig.for_model("exaone", **TEXT)
    return transformers.AutoModelForCausalLM.from_config(config)


def altclip() -> Any:
    text = {**TEXT, "project_dim": 32, "pad_token_id": 1}
    config = transformers.AltCLIPConfig(text_config=text, vision_config=VISION, projection_dim=32)
    return transformers.AltCLIPModel(config)


def videomae() -> Any:
    config = transformers.VideoMAEConfig(**VISION, num_frames=4, tubelet_size=2)
    return transformers.VideoMAEForVideoClassification(config)


def mimi() -> Any:
    sizes = {
        "num_filters": 4,
        "num_residual_layers": 1,
        "upsampling_ratios": [4, 2],
        "codebook_size": 16,
    }
    books = {
        "codebook_dim": 16,
        "num_quantizers": 4,
        "num_semantic_quantizers": 1,
        "upsample_groups": 32,
    }
    return transformers.MimiModel(
        transformers.MimiConfig(
            **TEXT, **sizes, **books, vector_quantization_hidden_dimension=16, head_dim=16
        )
    )


def timesfm() -> Any:
    sizes = {**TEXT, "head_dim": 16}
    return transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model("timesfm2_5", **sizes)
    )


def causal(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **TEXT)
        )

    return make


OTHERS = [altclip, videomae, mimi, timesfm]
TEXTS = [pytest.param(causal(kind), id=kind) for kind in ("hrm_text", "inkling2_text")]


def qwen2_vl() -> Any:
    text = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen2VLForConditionalGeneration(config)


def paligemma() -> Any:
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", "head_dim": 16, **TEXT},
        vision_config={"model_type": "siglip_vision_model", **VISION},
        image_token_index=63,
        projection_dim=32,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


@pytest.mark.parametrize("make", [llava, mistral3, qwen2_vl, paligemma])
def test_modules_are_named_as_on_disk_and_as_in_memory(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    """Vision-language models: `--to hf` writes what save_pretrained writes, and `load` takes it back into a live model."""
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(tmp_path / "disk")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "memory.pt")
    (tmp_path / "config").mkdir()
    shutil.copy(tmp_path / "disk/config.json", tmp_path / "config")
    report = ckptmap.convert(
        tmp_path / "memory.pt", tmp_path / "out", to="hf", config_from=tmp_path / "config"
    )
    assert any("as save_pretrained writes them" in note for note in report.notes)
    written, own = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "disk"))
    assert written.keys() == own.keys() != state.keys()
    assert all(torch.equal(written[key], own[key]) for key in own)
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "memory.pt").ok
    options: Any = {"config_from": tmp_path / "config", "names": "hf-memory"}
    ckptmap.convert(tmp_path / "memory.pt", tmp_path / "kept", to="hf", **options)
    assert load_file(tmp_path / "kept/model.safetensors").keys() <= state.keys()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert ckptmap.load(tmp_path / "out", model).names == "hf -> hf-memory"
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_modules_are_named_as_the_release_names_them(tmp_path: Path) -> None:
    """Releases of transformers 4 have one module more inside of their towers, which transformers 5 reads, too."""
    torch.manual_seed(0)
    model = llava()
    model.save_pretrained(tmp_path / "release")
    file = tmp_path / "release/model.safetensors"
    inner = {
        key.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for key, tensor in load_file(file).items()
    }
    save_file(inner, file, metadata={"format": "pt"})
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    torch.save(model.state_dict(), tmp_path / "memory.pt")
    ckptmap.convert(tmp_path / "memory.pt", tmp_path / "a", "hf", config_from=tmp_path / "release")
    ckptmap.convert(tmp_path / "memory.pt", tmp_path / "b", as_=tmp_path / "release")
    for name in ("a", "b"):
        written = load_file(tmp_path / name / "model.safetensors")
        assert written.keys() == inner.keys()
        differ = {key for key in inner if not torch.equal(inner[key], written[key])}
        assert differ == {"language_model.lm_head.weight"}
    assert ckptmap.load(tmp_path / "release", llava()).names == "hf -> hf-memory"


@pytest.mark.parametrize("make", [vit, exaone, *OTHERS, *TEXTS])
def test_transformers_loads_both_and_a_note_tells_them_apart(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(tmp_path / "disk")
    state = model.state_dict()
    torch.save(state, tmp_path / "memory.pt")
    report = ckptmap.convert(
        tmp_path / "memory.pt", tmp_path / "out", to="hf", config_from=tmp_path / "disk"
    )
    notes = [note for note in report.notes if "name in memory" in note]
    assert len(notes) == 1
    assert "transformers 5 loads it" in notes[0]
    assert notes[0].partition(": ")[0] in state
    assert load_file(tmp_path / "out" / "model.safetensors").keys() <= state.keys()
    loaded, told = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    got = loaded.state_dict()
    assert all(torch.equal(value, got[key]) for key, value in state.items())
    again = ckptmap.plan(tmp_path / "disk", "hf")
    assert not any("name in memory" in note for note in again.notes)


def test_every_family_is_one_that_transformers_has() -> None:
    types = [kind for _, kinds in SIGNS for kind in kinds]
    assert set(TEXT_ON_DISK) <= set(types)
    assert len(types) == len(set(types))
    assert not set(types) - set(CONFIG_MAPPING_NAMES) - {"exaone"}
    assert named_as_in_memory(["model.layers.0.self_attn.q_proj.weight"], None) is None
    assert named_as_in_memory(["lm_head.weight"], {"model_type": "exaone"}) is None
    assert named_as_in_memory(["x.attention.k_proj.bias"], {"model_type": ["vit"]}) is None
