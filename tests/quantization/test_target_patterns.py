"""Patterns of a config.json, which a file states: those that could keep Python's matcher busy for hours are left out."""

from __future__ import annotations

import pytest

from ckptmap.quantization.compressed_tensors.config_json import ConfigGroups, is_matched_soon

GROUPS = {
    "group_0": {"targets": [r"re:.*self_attn.*", r"re:model\.layers\.\d+\.mlp\.(gate|up|down)_proj$"]},
    "group_1": {"targets": [r"re:((a+))+$", r"re:.*.*.*.*.*.*x", "re:(", "lm_head"]},
}  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$", r"((a+))+$", r"(a|aa)*b", r"(.*)*", r".*.*.*.*.*x", r"(?:x{1,9}){1,99}", r"(a*){2}",
        r"(a+)+?$", r"(?:(a+)){5,}", r"a\\)+", "a" * 1025,
    ],
)  # fmt: skip
def test_patterns_that_go_back_for_ever(pattern: str) -> None:
    assert not is_matched_soon(pattern)


@pytest.mark.parametrize(
    "pattern", [r".*self_attn.*", r"layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj$", r"a\)+"]
)
def test_patterns_of_real_configs(pattern: str) -> None:
    assert is_matched_soon(pattern)


def test_groups_are_found_beside_hostile_patterns() -> None:
    groups = ConfigGroups({"config_groups": GROUPS})
    assert groups.of("model.layers.3.self_attn.q_proj") == [GROUPS["group_0"]]
    assert groups.of("model.layers.12.mlp.up_proj") == [GROUPS["group_0"]]
    assert groups.of("lm_head") == [GROUPS["group_1"]]
    assert groups.of("a" * 200 + "b") == list(GROUPS.values())  # none names it: both may
