"""Wrapper segments are stripped by segment, with a bijection check."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmap.errors import PlanError, SourceError
from ckptmap.mapping.wrappers import ANYWHERE, describe_wrappers, strip_wrappers, wrap_prefix


@pytest.mark.parametrize(
    ("keys", "plain", "patterns"),
    [
        (["module.a.w", "module.b"], ["a.w", "b"], ("module.",)),
        (["_orig_mod.a.w"], ["a.w"], ("_orig_mod.",)),
        (
            ["_orig_mod.module.layers.0._orig_mod.w", "_orig_mod.module.layers.11._orig_mod.w"],
            ["layers.0.w", "layers.11.w"],
            ("_orig_mod.module.layers.N._orig_mod.",),
        ),
        (["module._orig_mod.a", "module._orig_mod.b"], ["a", "b"], ("module._orig_mod.",)),
        (["module.module.a", "module.module.b"], ["a", "b"], ("module.module.",)),
        (
            ["_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.w"],
            ["layers.0.w"],
            ("_fsdp_wrapped_module.layers.N._fsdp_wrapped_module._checkpoint_wrapped_module.",),
        ),
        (["n_averaged", "module.a"], ["n_averaged", "module.a"], ()),
        (["block.module.w", "_orig_mod.head.w"], ["block.module.w", "head.w"], ("_orig_mod.",)),
        (["module"], ["module"], ()),
        (["my_orig_mod.w", "module_list.w"], ["my_orig_mod.w", "module_list.w"], ()),
    ],
)
def test_strips_by_segment(keys: list[str], plain: list[str], patterns: tuple[str, ...]) -> None:
    names = strip_wrappers(keys)
    assert list(names) == keys
    assert list(names.values()) == plain
    assert describe_wrappers(names) == patterns


def test_collision_is_refused() -> None:
    with pytest.raises(SourceError, match=r"'a\.w' and '_orig_mod\.a\.w' are both 'a\.w'"):
        strip_wrappers(["a.w", "_orig_mod.a.w"])


def test_key_of_wrappers_only_is_refused() -> None:
    with pytest.raises(SourceError, match="_orig_mod"):
        strip_wrappers(["_orig_mod"])


SEGMENT = st.one_of(
    st.sampled_from(["module", "layers", "0", "w"]), st.sampled_from(sorted(ANYWHERE))
)


@given(st.lists(st.lists(SEGMENT, min_size=1, max_size=5).map(".".join), unique=True, max_size=6))
def test_never_merges_keys(keys: list[str]) -> None:
    try:
        names = strip_wrappers(keys)
    except SourceError:
        return
    assert len(set(names.values())) == len(keys)
    assert not any(set(fqn.split(".")) & ANYWHERE for fqn in names.values())


def test_wrap_prefix() -> None:
    assert wrap_prefix(["ddp", "compile"]) == "module._orig_mod."
    assert wrap_prefix([]) == ""
    with pytest.raises(PlanError, match="unknown wrapper 'dpp'"):
        wrap_prefix(["dpp"])
