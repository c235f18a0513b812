"""Names of models in memory: the table of model types against the installed transformers."""

from __future__ import annotations

from ckptmap.mapping.memory_names import SPLIT_ON_DISK, joined_experts, memory_scheme
from tests.support.mapping_configs import TINY


def test_model_types_whose_experts_are_split_on_disk() -> None:
    """Only types whose converters stack experts; a Python class among them is no model type."""
    from transformers import conversion_mapping
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    build = conversion_mapping._build_checkpoint_conversion_mapping
    split = {
        kind
        for kind, steps in build().items()
        for step in steps
        if any(type(op).__name__ == "MergeModulelist" for op in getattr(step, "operations", ()))
        and any(".experts." in name for name in step.target_patterns)
    }
    assert {kind for kind in split if kind.islower()} - SPLIT_ON_DISK == {
        "dots3_note_vision_encoder"
    }
    assert split >= SPLIT_ON_DISK.intersection(CONFIG_MAPPING_NAMES)  # the table is of 5.24


def test_a_model_in_memory_is_told_by_its_keys_and_its_config() -> None:
    state = list(TINY["mixtral"].build().state_dict())
    config = dict(TINY["mixtral"].config)
    found = memory_scheme(state, config)
    assert found is not None and found.title == "mixtral/hf-memory"
    assert memory_scheme(state, None) is not None
    assert memory_scheme(state, {**config, "model_type": "llama"}) is None
    assert joined_experts(state, config) == "model.layers.0.mlp.experts.gate_up_proj"
    assert joined_experts(state, {"model_type": "gpt_oss"}) is None
