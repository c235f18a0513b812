"""Mapping files against the installed transformers: what it writes, loads and computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import ckptmap
from tests.golden.mappings.make_hf import ERAS, disk_state, memory_state
from tests.golden.mappings.tables import ROOT, rows
from tests.mapping.test_goldens import facts
from tests.support.mapping_configs import TINY
from tests.support.mapping_forward import gpt_fast_logits, meta_logits, nanogpt_logits
from tests.support.mapping_state import config_of, entry_of, golden, translated

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]
Forward = Callable[[State, dict[str, Any], "Tensor"], "Tensor"]

TOKENS = torch.arange(24).reshape(2, 12)


@pytest.mark.parametrize("model", TINY)
def test_transformers_still_writes_and_loads_these_names(model: str) -> None:
    disk, config = disk_state(TINY[model])
    assert facts(rows(disk)) == facts(golden(model, "hf"))
    memory = f"hf-memory{ERAS.get(model, '')}"
    if (ROOT / model / f"{memory}.tsv").exists():
        assert facts(rows(memory_state(disk, config, TINY[model].auto))) == facts(
            golden(model, memory)
        )


def random_model(model: str) -> tuple[State, Tensor]:
    """(what a random model of transformers saves, its logits)."""
    source = TINY[model].build()
    with torch.no_grad():
        for tensor in source.parameters():
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
        logits = source(TOKENS).logits
    saved = golden(model, "hf")
    return {key: value for key, value in source.state_dict().items() if key in saved}, logits


@pytest.mark.parametrize(
    ("model", "scheme", "forward"),
    [
        ("llama", "meta", meta_logits),
        ("mistral", "meta", meta_logits),
        ("llama_tied", "meta", meta_logits),
        ("llama_tied", "torchtitan@2025-07", meta_logits),
        ("llama", "gpt-fast", gpt_fast_logits),
        ("gpt2", "nanogpt", nanogpt_logits),
    ],
)
def test_the_other_model_gives_the_same_logits(model: str, scheme: str, forward: Forward) -> None:
    state, logits = random_model(model)
    config = config_of(model)
    target = entry_of(model, scheme).load()
    made = forward(translated(state, config, None, target), config, TOKENS)
    torch.testing.assert_close(made, logits, rtol=1e-4, atol=1e-5)


def test_logits_would_show_rows_in_the_order_of_the_hub() -> None:
    """Phi-3's rows under Llama's names: every shape fits, and the model is another."""
    state, logits = random_model("llama")
    config = config_of("llama")
    made = translated(state, config, None, entry_of("llama", "meta").load())
    for n in range(config["num_hidden_layers"]):
        for name in "qk":
            kept = state[f"model.layers.{n}.self_attn.{name}_proj.weight"]
            made[f"layers.{n}.attention.w{name}.weight"] = kept
    wrong = meta_logits(made, config, TOKENS)
    assert (wrong - logits).abs().max() > 0.1 * logits.abs().max()


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Gemma 3 with images in the forms that transformers 5 has of it, and what it computes."""
    folder = tmp_path_factory.mktemp("gemma3")
    model: Any = TINY["gemma3"].build()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    model.save_pretrained(folder / "disk")
    model.save_pretrained(folder / "plain", save_original_format=False)
    (folder / "memory").mkdir()
    torch.save(model.state_dict(), folder / "memory" / "model.pt")
    model.config.save_pretrained(folder / "memory")
    return folder, computed(model)


def computed(model: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, 5, 28, 28, generator=generator)
    with torch.no_grad():
        seen = model.get_image_features(pixels)
        return {
            "text": model(TOKENS).logits,
            "image": seen.pooler_output if hasattr(seen, "pooler_output") else seen,
        }


@pytest.mark.parametrize("source", ["disk", "plain", "memory"])
@pytest.mark.parametrize(
    ("names", "has"),
    [
        ("hf", "vision_tower.post_layernorm.bias"),
        ("hf-memory@4.50", "vision_tower.vision_model.post_layernorm.bias"),
        ("hf-memory@4.52", "model.vision_tower.vision_model.post_layernorm.bias"),
        ("hf-memory", "model.vision_tower.post_layernorm.bias"),
    ],
)
def test_gemma_3_with_images_in_all_its_names(
    source: str, names: str, has: str, gemma3: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Text, vision tower and projector; where transformers 5 loads the names, it computes the same."""
    folder, expected = gemma3
    place = folder / source / "model.pt" if source == "memory" else folder / source
    ckptmap.convert(place, tmp_path / "out", to="hf", names=names)
    assert ckptmap.verify(tmp_path / "out", place).ok
    assert has in load_file(tmp_path / "out" / "model.safetensors")
    if names != "hf-memory@4.52":  # which no version has on disk
        kind: Any = type(TINY["gemma3"].build())
        found = computed(kind.from_pretrained(tmp_path / "out", dtype=torch.float32).eval())
        assert {key: found[key].equal(expected[key]) for key in expected} == {
            "text": True,
            "image": True,
        }


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_logits_survive_the_way_back(model: str) -> None:
    """hf -> megatron -> hf, loaded into transformers again."""
    state, logits = random_model(model)
    config, target = config_of(model), entry_of(model, "megatron").load()
    there = translated(state, config, None, target)
    back = translated(there, config, target, None)
    again = TINY[model].build()
    again.load_state_dict(back, strict=False)
    with torch.no_grad():
        assert again(TOKENS).logits.equal(logits)
