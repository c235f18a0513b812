"""Mistakes that pass silently in other tools give one line here, on the shapes of real models."""

from __future__ import annotations

import pytest

from ckptmap.errors import PlanError
from ckptmap.mapping.catalog import find
from ckptmap.mapping.detect import choose
from ckptmap.mapping.scheme_to_scheme import translate
from tests.support.mapping_state import (
    State,
    config_of,
    entry_of,
    hub_state,
    infos,
    state_of,
    translated,
)

ERAS = [
    *(("llama", f"torchtitan@{era}") for era in ("2026-04a", "2026-04b")),
    *(("llama", f"torchtitan-fused@{era}") for era in ("2026-04a", "2026-04b")),
    *(("qwen3", f"torchtitan@{era}") for era in ("2025-07", "2026-04a", "2026-04b")),
    *(("qwen3_moe", f"torchtitan@{era}") for era in ("2025-07", "2026-04a", "2026-04b")),
    *(("qwen3_moe", f"torchtitan@{era}") for era in ("2026-06", "2026-07")),
    *(("deepseek_v3", f"torchtitan@{era}") for era in ("2025-07", "2026-04b")),
    *(("deepseek_v3", f"torchtitan@{era}") for era in ("2026-06", "2026-07")),
    *(("gpt_oss", f"torchtitan@{era}") for era in ("2025-07", "2026-04a", "2026-04b")),
    *(("gpt_oss", f"torchtitan@{era}") for era in ("2026-06", "2026-07")),
]


@pytest.mark.parametrize(("model", "era"), ERAS)
def test_wrong_era(model: str, era: str) -> None:
    """Read as another era's, keys are missing; nothing is left out quietly. Where incomplete
    checkpoints are allowed, keys are unmapped, and a plan refuses them."""
    state, config = state_of(model, era), config_of(model)
    others = [other for name, other in ERAS if name == model and other != era]
    assert others
    for taken_for in others:
        wrong = entry_of(model, taken_for).load()
        with pytest.raises(PlanError, match=f"{taken_for}: rule .* is missing, (found 0|expected)"):
            translated(state, config, wrong, None)
        assert translate(infos(state), wrong, None, config, complete=False).unmapped, taken_for


@pytest.mark.parametrize(
    ("model", "scheme", "given"),
    [
        # 12 heads of 10: without head_dim, 60 / 12 = 5, as torchtitan computed until 2026-06.
        ("llama_tied", "meta", {"head_dim": None}),
        ("llama_tied", "torchtune", {"head_dim": 12}),
        ("mistral", "torchtune", {"head_dim": None}),
        ("qwen3", "torchtune", {"head_dim": 8}),
        ("qwen3_moe", "torchtitan@2026-07", {"head_dim": 20}),
        ("gemma2", "torchtune", {"head_dim": None}),
        ("deepseek_v3", "torchtitan@2026-07", {"qk_rope_head_dim": 6}),
        ("deepseek_v3", "megatron", {"v_head_dim": 10}),
        ("falcon_new", "hf", {"num_kv_heads": 12}),
        ("falcon_rw", "hf", {"multi_query": True}),
    ],
)
def test_wrong_head_size(model: str, scheme: str, given: dict[str, object]) -> None:
    name, value = next(iter(given.items()))
    config = {**config_of(model), **given}
    target = entry_of(model, scheme).load()
    source = target if scheme == "hf" else None
    shown = f"{name} {value}" if value else "hidden_size 60"
    with pytest.raises(PlanError, match=f"expected .*{shown}.*found") as caught:
        translated(hub_state(model), config, source, None if scheme == "hf" else target)
    assert caught.value.code == "CKM606"


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        ("llama", "meta"),
        ("llama", "gpt-fast"),
        ("llama", "megatron"),
        ("qwen2", "megatron"),
        ("phi3", "torchtune"),
        ("mixtral", "gpt-fast"),
    ],
)
def test_split_blind_to_grouped_heads(model: str, scheme: str) -> None:
    """12 + 4 + 4 heads taken for 12 + 12 + 12."""
    config = {**config_of(model), "num_key_value_heads": 12}
    with pytest.raises(PlanError, match=r"expected .*num_key_value_heads 12.*found") as caught:
        translated(hub_state(model), config, None, entry_of(model, scheme).load())
    assert caught.value.code == "CKM606"


MOE = [
    ("mixtral", "hf-memory", "model.layers.1.block_sparse_moe.experts.3."),
    ("mixtral", "meta", "model.layers.1.block_sparse_moe.experts.3."),
    ("mixtral", "gpt-fast", "model.layers.1.block_sparse_moe.experts.6."),
    ("mixtral", "megatron", "model.layers.1.block_sparse_moe.experts.3."),
    ("qwen2_moe", "hf-memory", "model.layers.2.mlp.experts.3."),
    ("qwen2_moe", "megatron", "model.layers.2.mlp.experts.6."),
    ("qwen3_moe", "hf-memory", "model.layers.2.mlp.experts.0."),
    ("qwen3_moe", "torchtitan@2026-07", "model.layers.2.mlp.experts.3."),
    ("qwen3_moe", "megatron", "model.layers.2.mlp.experts.3."),
    ("deepseek_v3", "hf-memory", "model.layers.2.mlp.experts.3."),
    ("deepseek_v3", "torchtitan@2025-07", "model.layers.2.mlp.experts.6."),
    ("deepseek_v3", "megatron", "model.layers.2.mlp.experts.3."),
]


@pytest.mark.parametrize(("model", "scheme", "lost"), MOE)
def test_missing_expert(model: str, scheme: str, lost: str) -> None:
    """Elsewhere those that are there are stacked, and the later ones numbered anew."""
    for part in ("all", "first", "last"):
        state = without(hub_state(model), lost, part)
        with pytest.raises(PlanError, match="is missing") as caught:
            translated(state, config_of(model), None, entry_of(model, scheme).load())
        assert caught.value.code == "CKM607", part
        assert "experts" in str(caught.value), part


def without(state: State, lost: str, part: str) -> State:
    """`state` less one expert, or less one of the matrices of one."""
    mine = [key for key in state if key.startswith(lost)]
    assert len(mine) == 3
    gone = {"all": mine, "first": mine[:1], "last": mine[-1:]}[part]
    return {key: tensor for key, tensor in state.items() if key not in gone}


def test_one_expert_too_many() -> None:
    state = dict(hub_state("mixtral"))
    for name in ("w1", "w2", "w3"):
        at = "model.layers.0.block_sparse_moe.experts."
        state[f"{at}7.{name}.weight"] = state[f"{at}6.{name}.weight"]
    target = entry_of("mixtral", "hf-memory").load()
    with pytest.raises(PlanError, match=r"experts\.7|num_local_experts 7"):
        translated(state, config_of("mixtral"), None, target)


def test_gpt2_in_memory_is_not_taken_for_nanogpt() -> None:
    """The same names, and every matrix transposed: shapes tell them apart."""
    state = dict(hub_state("gpt2"))
    state["lm_head.weight"] = state["transformer.wte.weight"]
    ours, theirs = entry_of("gpt2", "hf").load(), entry_of("gpt2", "nanogpt").load()
    config = config_of("gpt2")
    assert choose(infos(state), "hf", None, config).source == ours
    assert choose(infos(state_of("gpt2", "nanogpt")), "hf", None, config).source == theirs
    with pytest.raises(PlanError, match=r"c_attn.*expected .*360.*found") as caught:
        translated(state, config, theirs, None)
    assert caught.value.code == "CKM606"


def test_torchtune_without_a_config_is_of_two_families() -> None:
    keys = list(state_of("phi3", "torchtune"))
    with pytest.raises(PlanError, match="llama/torchtune, phi3/torchtune") as caught:
        choose(keys, "hf")
    assert caught.value.code == "CKM604"


@pytest.mark.parametrize(
    ("model", "given", "scheme", "why"),
    [
        ("llama_bias", {}, "llama/meta", "no place for the biases"),
        ("qwen3", {"attention_bias": True}, "qwen3/megatron", "no place for the biases"),
        ("gemma", {}, "llama/meta", "no norms of 1 . w"),
        ("gemma", {}, "llama/torchtitan", "no norms of 1 . w"),
        ("gemma", {}, "llama/gpt-fast", "no norms of 1 . w"),
        ("gpt_neox", {}, "gpt_neox/megatron", "attention and feed-forward from the same input"),
        ("gpt_neox", {"use_parallel_residual": None}, "gpt_neox/megatron", "from the same input"),
        ("gpt_neox_sequential", {"attention_bias": False}, "gpt_neox/megatron", "on nothing"),
        ("falcon_rw", {}, "falcon/megatron", "Megatron core has no ALiBi"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "phi3/megatron", "LongRoPE"),
        (
            "phi3",
            {"rope_parameters": None, "rope_scaling": {"type": "longrope"}},
            "phi3/megatron",
            "LongRoPE",
        ),
        ("phi3", {"rope_scaling": {"type": "su"}}, "phi3/megatron", "LongRoPE"),
        ("falcon_rw", {"alibi": False}, "falcon/megatron", "layers with parallel attention"),
        ("falcon_new", {"bias": True}, "falcon/megatron", "leave the biases out"),
        ("falcon_new", {"num_ln_in_parallel_attn": 1}, "falcon/megatron", "has two norms"),
    ],
)
def test_what_a_scheme_has_no_place_for_is_refused(
    model: str, given: dict[str, object], scheme: str, why: str
) -> None:
    config = {**config_of(model), **given}
    with pytest.raises(PlanError, match=why) as caught:
        translated(hub_state(model), config, None, find(scheme)[0].load())
    assert caught.value.code == "CKM617"


def test_two_eras_in_one_checkpoint() -> None:
    old, new = "torchtitan@2026-06", "torchtitan@2026-07"
    state = {**state_of("qwen3_moe", old), **state_of("qwen3_moe", new)}
    found = translate(infos(state), entry_of("qwen3_moe", new).load(), None, config_of("qwen3_moe"))
    assert "layers.0.moe.experts.w1_EFD" in found.unmapped


SPARSE = [
    ("qwen3_moe", "megatron", "model.layers.2.mlp.experts.{e}.down_proj.weight"),
    ("qwen3_moe", "torchtitan@2026-07", "model.layers.2.mlp.experts.{e}.gate_proj.weight"),
    ("qwen3_moe", "hf-memory", "model.layers.0.mlp.gate.weight"),
    ("qwen2_moe", "hf-memory", "model.layers.2.mlp.shared_expert_gate.weight"),
    ("qwen2_moe", "megatron", "model.layers.1.mlp.down_proj.weight"),
]


@pytest.mark.parametrize(("model", "scheme", "lost"), SPARSE)
def test_layer_without_a_part_of_its_experts(model: str, scheme: str, lost: str) -> None:
    """A layer may have experts or one feed-forward block, but not the half of one."""
    gone = {lost.replace("{e}", str(e)) for e in range(7)}
    state = {key: tensor for key, tensor in hub_state(model).items() if key not in gone}
    assert len(state) < len(hub_state(model))
    where = lost.replace("{e}", "0").replace(".", r"\.")
    with pytest.raises(PlanError, match=f"{where} is missing, expected n .* to have all keys of"):
        translated(state, config_of(model), None, entry_of(model, scheme).load())


@pytest.mark.parametrize("model", ["qwen2_moe", "qwen3_moe"])
def test_layer_without_experts_and_without_a_feed_forward_block(model: str) -> None:
    lost = "model.layers.1.mlp."
    state = {key: tensor for key, tensor in hub_state(model).items() if not key.startswith(lost)}
    with pytest.raises(PlanError, match=r"layers\.1\..* is missing.*experts or dense"):
        translated(state, config_of(model), None, entry_of(model, "hf-memory").load())


def test_layer_with_experts_and_a_feed_forward_block() -> None:
    state = dict(hub_state("qwen3_moe"))
    for name in ("gate", "up", "down"):
        at = "model.layers.{}.mlp." + name + "_proj.weight"
        state[at.format(0)] = state[at.format(1)]
    with pytest.raises(
        PlanError,
        match="is not expected, expected n 0 to have all keys of experts or dense and no others",
    ):
        translated(state, config_of("qwen3_moe"), None, entry_of("qwen3_moe", "megatron").load())


def test_names_of_a_llama_are_no_llama() -> None:
    """Ernie 4.5 has the keys and shapes of a Llama, and rotary rows in the order of Meta: permuted,
    it would be wrong without a word."""
    asked, why = "llama/meta", r"is for llama, .*model_type 'ernie4_5'"
    keys, config = infos(hub_state("llama")), {**config_of("llama"), "model_type": "ernie4_5"}
    with pytest.raises(PlanError, match=why) as caught:
        choose(keys, "meta", None, config)
    assert caught.value.code == "CKM604" and f"--names {asked}" in str(caught.value)
    assert choose(keys, asked, None, config).text == f"llama/hf -> {asked}"
    assert choose(keys, "hf", None, config).text == "llama/hf -> hf"
    with pytest.raises(PlanError, match=why):
        choose(infos(state_of("llama", "meta")), "hf", None, config)
    found = choose(infos(state_of("llama", "meta")), "hf", asked, config)
    assert found.text == f"{asked} -> hf"


@pytest.mark.parametrize(
    ("model", "scheme"),
    [("bloom", "meta"), ("gpt2", "meta"), ("falcon_new", "nanogpt"), ("deepseek_v3", "torchtune"),
     ("qwen2", "meta"), ("gemma2", "torchtitan")],
)  # fmt: skip
def test_a_scheme_that_the_family_has_not(model: str, scheme: str) -> None:
    """No other family's file is taken in its place, and no prefix is blamed."""
    state, config = hub_state(model), config_of(model)
    with pytest.raises(
        PlanError, match=rf"{model.removesuffix('_new')} has no scheme '{scheme}', only .*hf"
    ) as caught:
        choose(infos(state), scheme, None, config)
    assert caught.value.code == "CKM604"


@pytest.mark.parametrize("model", ["llama", "gemma", "gemma2", "bloom", "falcon_new", "gpt_oss"])
def test_in_memory_names_are_the_hubs_where_no_file_says_otherwise(model: str) -> None:
    found = choose(infos(hub_state(model)), "hf-memory", None, config_of(model))
    assert found.source is not None and found.source.is_hub and found.target is None
