"""The modules that an adapter's config targets, those of its file and those of the base, as peft counts them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from transformers import AutoModelForCausalLM

import ckptmap
from ckptmap.checkpoint.lora.targets import Targets, untargeted
from ckptmap.errors import SourceError
from tests.operations.test_merge import change, merge, rewrite
from tests.support.merge_cases import LINEARS

MODULES = (
    "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.experts.0.up_proj", "h.0.up_proj",
    "up_proj", "model.embed_tokens", "lm_head", "model.layers.0.mlp.group_proj",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "ends": {"target_modules": ["up_proj", "lm_head"]},
    "whole names": {"target_modules": ["model.layers.0.mlp.up_proj"]},
    "a part of a name": {"target_modules": ["p_proj"]},
    "none": {"target_modules": []},
    "pattern": {"target_modules": r".*layers\.\d+\..*up_proj"},
    "pattern of a start": {"target_modules": r"model"},
    "layer": {"target_modules": ["up_proj", "q_proj"], "layers_to_transform": 1},
    "layers": {"target_modules": ["up_proj"], "layers_to_transform": [0]},
    "no layers": {"target_modules": ["up_proj"], "layers_to_transform": []},
    "layers of h": {
        "target_modules": ["up_proj"], "layers_to_transform": [0], "layers_pattern": "h"
    },
    "layers of two": {
        "target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]
    },
    "but some": {"target_modules": ["up_proj"], "exclude_modules": ["0.mlp.up_proj", "up_proj"]},
    "but a pattern": {"target_modules": ["up_proj"], "exclude_modules": r".*\.1\..*"},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_module_is_targeted_as_peft_does(name: str) -> None:
    settings = SETTINGS[name]
    config = LoraConfig(**settings)
    config.target_modules = settings["target_modules"]  # a list stays one
    names, excluded = settings["target_modules"], settings.get("exclude_modules") or ()
    layers, patterns = settings.get("layers_to_transform"), settings.get("layers_pattern") or ()
    targets = Targets(
        tuple(names) if isinstance(names, list) else None,
        names if isinstance(names, str) else None,
        excluded if isinstance(excluded, str) else tuple(excluded),
        (layers,) if isinstance(layers, int) else tuple(layers or ()) or None,
        (patterns,) if isinstance(patterns, str) else tuple(patterns),
    )
    for module in MODULES:
        truth = check_target_module_exists(config, module)
        wanted = bool(truth) and not isinstance(truth, _ExcludedModule)
        assert targets.match(module) == wanted, module


@pytest.mark.parametrize("pattern", ["(a+)+x", ".*.*.*.*.*x", "(", "a" * 2000])
def test_a_costly_pattern_is_not_matched(pattern: str) -> None:
    targets = Targets(pattern=pattern)
    assert targets.costly() == pattern
    assert untargeted(targets, MODULES) == []


STRANGERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "target_modules": (
        {"target_modules": ["q_proj", "down_proj", "x"]}, r"\['q_proj', 'down_proj', 'x'\]", "up_proj"
    ),
    "pattern": ({"target_modules": r".*\.(q|up)_proj"}, r"\(q\|up\)_proj", "down_proj"),
    "layers_to_transform": ({"layers_to_transform": [1]}, r"layers_to_transform \[1\]", r"layers\.0"),
    "exclude_modules": ({"exclude_modules": ["q_proj"]}, r"exclude_modules \('q_proj',\)", "q_proj"),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGERS)
def test_matrices_of_modules_that_are_not_targeted(name: str, folder: Path) -> None:
    """peft loads the rest and leaves them out: the merge of all of them is another model."""
    config, stated, held = STRANGERS[name]
    change(folder / "adapter", **config)
    said = rf"adapter_config\.json: states .*{stated}.*, but .* holds .*{held}.*lora_A\.weight and "
    with pytest.raises(SourceError, match=said) as caught:
        merge(folder / "base", folder / "adapter", folder / "out")
    assert caught.value.code == "CKM320" and "--leave" in (caught.value.hint or "")


def test_left_out_they_are_merged_as_peft_does(folder: Path) -> None:
    change(folder / "adapter", target_modules=["q_proj", "down_proj"])
    leave = [f"model.layers.{layer}.mlp.up_proj" for layer in range(2)]
    ckptmap.merge(folder / "base", folder / "adapter", folder / "out", "hf-fp32", leave=leave)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    truth = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload().state_dict()
    with ckptmap.open(folder / "out") as ckpt:
        assert all((ckpt[fqn].read() - truth[fqn]).abs().max() < 1e-5 for fqn in ckpt)


def notes(folder: Path) -> list[str]:
    report = merge(folder / "base", folder / "adapter", folder / "out")
    return [note for note in report.notes if "adapter_config.json" in note]


def test_an_adapter_of_peft_gets_no_note(folder: Path) -> None:
    assert notes(folder) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"target_modules": [*LINEARS, "o_proj"]},
            r"target_modules names model\.layers\.0\.self_attn\.o_proj and 1 more, of which the file holds no",
        ),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names lm_head, of which the file holds nothing"),
        ({"alpha_pattern": {"o_proj": 4}}, "alpha_pattern: 'o_proj' matches no module"),
        ({"rank_pattern": {"k_proj": 4}}, "rank_pattern: 'k_proj' matches no module"),
        ({"target_modules": r"encoder\..*"}, r"target_modules 'encoder.* matches no module"),
        ({"target_modules": "(a+)+x"}, r"not compared with the file: a costly pattern"),
    ],
    ids=["targets", "wholes", "alpha", "rank", "other names", "costly"],
)  # fmt: skip
def test_what_the_config_names_and_the_file_lacks_is_told(
    config: dict[str, Any], said: str, folder: Path
) -> None:
    change(folder / "adapter", **config)
    (note,) = notes(folder)
    assert re.search(said, note), note


@pytest.mark.parametrize(
    "value",
    [{"target_modules": 3}, {"layers_to_transform": ["1"]}, {"modules_to_save": 2**63}],
    ids=str,
)
def test_settings_of_another_type(value: dict[str, Any], folder: Path) -> None:
    change(folder / "adapter", **value)
    with pytest.raises(SourceError, match=next(iter(value))) as caught:
        merge(folder / "base", folder / "adapter", folder / "out")
    assert caught.value.code == "CKM320"


def test_matrices_that_are_gone_are_told(folder: Path) -> None:
    def gone(tensors: dict[str, Any]) -> None:
        for key in [key for key in tensors if "layers.1.mlp.up_proj" in key]:
            del tensors[key]

    rewrite(folder / "adapter", gone)
    (note,) = notes(folder)
    assert "target_modules names model.layers.1.mlp.up_proj, of which the file holds no" in note
