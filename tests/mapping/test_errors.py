"""The silent failures that were found in other engines (facts on mappings, 1.2 and 1.3): each is an
error here, before a byte is written, that names the rule, the key, the shapes and the config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptmap
from ckptmap.errors import CkptmapError, PlanError
from ckptmap.mapping.mapping_file import parse_scheme
from ckptmap.mapping.translate_state_dict import translate_names
from tests.mapping.test_convert import write
from tests.support.mapping_state import State, config_of, hub_state, state_of

Change = Callable[[State], State]


def refused(
    tmp_path: Path, model: str, state: State, names: str, **changed: object
) -> CkptmapError:
    """What the command line would say of a conversion that is refused; nothing is there after."""
    folder, out = tmp_path / "in", tmp_path / "out"
    write(folder, {key: value.contiguous() for key, value in state.items()}, model)
    config = {**config_of(model), **changed}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CkptmapError, match=r".") as caught:
        ckptmap.convert(folder, out, to="full", names=names)
    assert not out.exists()
    return caught.value


def test_all_keys_prefixed(tmp_path: Path) -> None:
    """transformers loads such a file, every weight random, and warns. `_orig_mod` would be taken
    off; of a prefix that nobody knows, the error says that it is one."""
    state = {f"student.{key}": value for key, value in hub_state("mixtral").items()}
    error = refused(tmp_path, "mixtral", state, "hf-memory")
    assert error.code == "CKM604"
    assert f"all {len(state)} keys begin with 'student.'" in error.message
    assert error.hint == "add --strip-prefix student"


def test_a_known_wrapper_is_no_prefix(tmp_path: Path) -> None:
    state = {f"_orig_mod.{key}": value for key, value in hub_state("mixtral").items()}
    write(tmp_path / "in", state, "mixtral")
    ckptmap.convert(tmp_path / "in", tmp_path / "out.pt", to="full", names="hf-memory")
    with ckptmap.open(tmp_path / "out.pt") as found:
        assert found.keys() == state_of("mixtral", "hf-memory").keys()


def test_two_sources_for_one_target() -> None:
    """transformers: one of them wins, nothing is said."""
    found = parse_scheme(
        'schema = 1\nfamily = "f"\nscheme = "x"\n'
        '[[rule]]\nhf = "moe.gate | block_sparse_moe.gate"\nx = "router"\n',
        "x.toml",
    )
    from ckptmap.mapping.scheme_to_scheme import translate
    from ckptmap.tensors import TensorInfo

    infos = {
        "moe.gate": TensorInfo((2,), "float32"),
        "block_sparse_moe.gate": TensorInfo((2,), "float32"),
    }
    with pytest.raises(PlanError, match=r"router would be made twice: of moe\.gate by rule 1 .*"
                       r"and of block_sparse_moe\.gate by rule 1") as caught:  # fmt: skip
        translate(infos, None, found, None)
    assert caught.value.code == "CKM608"


def test_two_rules_for_one_key() -> None:
    """transformers: the first of the list wins."""
    rules = '[[rule]]\nhf = "{a}"\nx = "{b}"\n'
    text = 'schema = 1\nfamily = "f"\nscheme = "x"\n'
    text += rules.replace("{a}", "attn.qkv").replace("{b}", "attn.q")
    text += rules.replace("{a}", "attn.qkv").replace("{b}", "attn.fused")
    with pytest.raises(PlanError, match=r"rule 1 .* and rule 2 .* both match the key attn\.qkv"):
        parse_scheme(text, "x.toml")


@pytest.mark.parametrize("lost", [1, 3], ids=["in the middle", "the last"])
def test_a_whole_expert_missing(lost: int, tmp_path: Path) -> None:
    """transformers' converter stacks those that are there, and numbers them anew."""
    mark = f"model.layers.1.block_sparse_moe.experts.{lost}."
    state = {key: value for key, value in hub_state("mixtral").items() if not key.startswith(mark)}
    error = refused(tmp_path, "mixtral", state, "hf-memory")
    assert error.code == "CKM607"
    assert f"{mark}w1.weight is missing" in error.message
    assert "num_local_experts" in error.message


def test_a_whole_expert_missing_and_no_config() -> None:
    """Without a config the other layers tell how many there are."""
    mark = "model.layers.1.block_sparse_moe.experts.3."
    state = {key: value for key, value in hub_state("mixtral").items() if not key.startswith(mark)}
    with pytest.raises(PlanError, match=r"experts\.3\.w1\.weight is missing") as caught:
        translate_names(state, "mixtral/hf-memory", source="mixtral/hf")
    assert caught.value.code in ("CKM607",)


def test_a_split_blind_to_grouped_heads(tmp_path: Path) -> None:
    """`Chunk(3)` cuts 12 + 4 + 4 heads into equal thirds."""
    error = refused(tmp_path, "phi3", hub_state("phi3"), "torchtune", num_key_value_heads=12)
    assert error.code == "CKM606"
    for part in (
        "rule ",
        "qkv_proj",
        "expected [360, 120]",
        "num_key_value_heads 12",
        "found [200, 120]",
    ):
        assert part in error.message, part


def test_names_that_are_mapped_already() -> None:
    """A reverse rule that applies twice makes `encoder.encoder.`; whole keys cannot."""
    state = state_of("llama", "meta")
    again = translate_names(state, "meta", config_of("llama"))
    assert again.keys() == state.keys()
    assert all(again[key] is state[key] for key in state)  # there and back: nothing is moved
    hub = translate_names(hub_state("llama"), "hf", config_of("llama"))
    assert all(hub[key] is value for key, value in hub_state("llama").items())


def test_a_head_size_that_is_not_hidden_over_heads(tmp_path: Path) -> None:
    """Another's converter takes hidden over heads for the head size; here it is the config's 10, and a config
    that says otherwise does not fit."""
    error = refused(tmp_path, "llama", hub_state("llama"), "meta", head_dim=5)
    assert error.code == "CKM606"
    assert "_proj" in error.message and "head_dim 5" in error.message


def test_names_on_disk_of_another_family(tmp_path: Path) -> None:
    """No rule leads from one family to another: the plan would rename nothing."""
    error = refused(tmp_path, "llama", hub_state("llama"), "gpt2/hf")
    assert error.code == "CKM604"
    assert "the keys are those of llama/hf, and gpt2/hf names other models (gpt2)" in error.message
    assert error.hint.endswith("--names hf") or "names='hf'" in error.hint
    assert ckptmap.plan(tmp_path / "in", "full", names="llama/hf").steps.fqns


def test_the_wrong_era(tmp_path: Path) -> None:
    """Names of 2025-07 taken for those of today."""
    state = state_of("llama", "torchtitan@2025-07")
    write(tmp_path / "in", state, "llama")
    with pytest.raises(
        PlanError, match=r"qkv_linear\.wq\.weight is missing, found 0 of 2"
    ) as caught:
        ckptmap.plan(tmp_path / "in", "full", names="hf", names_from="llama/torchtitan@2026-04a")
    assert caught.value.code == "CKM607"
    assert ckptmap.plan(tmp_path / "in", "full", names="hf").fidelities()  # by fingerprint


def test_a_scheme_that_nobody_knows(tmp_path: Path) -> None:
    error = refused(tmp_path, "llama", hub_state("llama"), "mata")
    assert error.code == "CKM603"
    assert "did you mean meta" in error.hint and "mappings list" in error.hint
    with pytest.raises(PlanError, match="--names-from 'mata' is not a known scheme") as caught:
        ckptmap.plan(tmp_path / "in", "full", names="hf", names_from="mata")
    assert caught.value.code == "CKM603" and "did you mean meta" in caught.value.hint


def test_a_key_that_is_left_over(tmp_path: Path) -> None:
    """Megatron-Bridge warns and skips."""
    state = {**hub_state("llama"), "model.layers.1.self_attn.gate.weight": torch.ones(3)}
    error = refused(tmp_path, "llama", state, "meta")
    assert (
        "model.layers.1.self_attn.gate.weight: no rule of llama/hf -> llama/meta" in error.message
    )
    assert "--drop" in error.hint


def test_a_key_that_is_missing(tmp_path: Path) -> None:
    """torchtitan's `to_hf` goes on."""
    state = dict(hub_state("llama"))
    del state["model.layers.1.mlp.down_proj.weight"]
    error = refused(tmp_path, "llama", state, "meta")
    assert error.code == "CKM607"
    assert "model.layers.1.mlp.down_proj.weight is missing, found 1 of 2" in error.message


def test_parts_of_different_dtypes(tmp_path: Path) -> None:
    """torch.cat would promote them."""
    state = dict(hub_state("llama"))
    key = "model.layers.0.self_attn.v_proj.weight"
    state[key] = state[key].double()
    error = refused(tmp_path, "llama", state, "gpt-fast")
    assert error.code == "CKM606"
    assert f"{key} is float64" in error.message and "expected one dtype" in error.message


def test_a_config_of_another_depth(tmp_path: Path) -> None:
    error = refused(tmp_path, "llama", hub_state("llama"), "meta", num_hidden_layers=3)
    assert error.code == "CKM607"
    assert "model.layers.2." in error.message and "num_hidden_layers 3" in error.message
    (tmp_path / "fewer").mkdir()
    error = refused(tmp_path / "fewer", "llama", hub_state("llama"), "meta", num_hidden_layers=1)
    assert error.code == "CKM607"
    assert "is not expected, expected n below 1" in error.message


def test_no_config_where_the_shapes_do_not_tell(tmp_path: Path) -> None:
    write(tmp_path / "in", hub_state("llama"), "llama")
    (tmp_path / "in" / "config.json").unlink()
    with pytest.raises(PlanError, match=r"needs .*num_attention_heads") as caught:
        ckptmap.plan(tmp_path / "in", "full", names="llama/meta")
    assert caught.value.code == "CKM605"
    assert "--config-from" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a JSON object, got an array"),
        ("{", "cannot be read as JSON"),
        ("\xff", "cannot be read as JSON"),
    ],
)
def test_a_config_that_is_none(text: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "in", hub_state("llama"), "llama")
    (tmp_path / "in" / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(PlanError, match=message) as caught:
        ckptmap.plan(tmp_path / "in", "full", names="meta")
    assert caught.value.code == "CKM605"


def test_a_live_tensor_that_cannot_be_rearranged() -> None:
    """A subclass's `as_strided` would show its payload, or fail deep inside."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = torch.nn.Linear(120, 120, bias=False)
    quantize_(linear, Int8WeightOnlyConfig())
    state = {**hub_state("llama")}
    key = "model.layers.0.self_attn.q_proj.weight"
    state[key] = linear.weight
    with pytest.raises(PlanError, match=f"{key} is a .*Tensor, which hides its elements") as caught:
        translate_names(state, "meta", config_of("llama"))
    assert caught.value.code == "CKM610"
    state = {"lm_head.weight": linear.weight[:102]}
    assert (
        translate_names(state, "torchtune", source="llama/hf", partial=True)["output.weight"]
        is state["lm_head.weight"]
    )


def test_in_memory_unknown_keys_are_an_error() -> None:
    state = {**hub_state("llama"), "model.extra": torch.ones(1)}
    with pytest.raises(PlanError, match=r"no rule matches model\.extra") as caught:
        translate_names(state, "meta", config_of("llama"))
    assert caught.value.code == "CKM609"


def test_a_part_of_a_state_dict() -> None:
    """An adapter, or one rank's tensors: allowed if asked for, each set still whole."""
    part = {k: v for k, v in hub_state("llama").items() if ".layers.1.self_attn.q_proj" in k}
    with pytest.raises(PlanError, match="is missing"):
        translate_names(part, "meta", config_of("llama"), source="llama/hf")
    found = translate_names(part, "meta", config_of("llama"), source="llama/hf", partial=True)
    assert found.keys() == {"layers.1.attention.wq.weight"}


def test_what_is_no_config_in_memory() -> None:
    with pytest.raises(PlanError, match="config is a int") as caught:
        translate_names(hub_state("llama"), "meta", 3)
    assert caught.value.code == "CKM605"
