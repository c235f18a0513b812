"""Names of wrappers are stripped segment by segment, and no two keys become one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptmap
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


def test_no_option_mends_a_collision_and_none_is_named(tmp_path: Path) -> None:
    """It is found when the file is opened, before any option of a plan is asked."""
    state = {"_orig_mod.a.weight": torch.ones(2), "a.weight": torch.zeros(2)}
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(SourceError, match=r"are both 'a\.weight'") as refused:
        ckptmap.plan(tmp_path / "model.pt", "hf", exclude=("a.weight",))
    assert refused.value.code == "CKM114" and "--" not in refused.value.hint
    del state["a.weight"]
    torch.save(state, tmp_path / "model.pt")
    assert list(ckptmap.open(tmp_path / "model.pt")) == ["a.weight"]


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


def test_the_segment_of_lightning() -> None:
    """Fabric's own class holds the module by it; so did Lightning before 2.0, and DeepSpeed's files of it."""
    fabric = pytest.importorskip("lightning_fabric.wrappers")
    wrapped = fabric._FabricModule(torch.nn.Linear(2, 1), None)
    names = [name for name, _ in wrapped.named_parameters()]
    assert names == ["_forward_module.weight", "_forward_module.bias"]
    assert list(strip_wrappers([f"module.{name}" for name in names]).values()) == ["weight", "bias"]
