"""`ckptmap.convert` applies the shipped mapping files to real files; the results are the goldens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import PlanError
from tests.golden.mappings.tables import ROOT, rows
from tests.mapping.test_goldens import CASES, assert_hub, dropped, facts
from tests.support.mapping_configs import TINY
from tests.support.mapping_state import State, config_of, golden, hub_state, state_of

# Of each family its richest schemes; the others are shown in memory by test_goldens.
CHOSEN = [
    ("llama", "meta"),
    ("llama", "gguf"),
    ("llama_tied", "torchtune"),
    ("mistral_square", "gpt-fast"),
    ("gemma", "megatron"),
    ("qwen2", "megatron"),
    ("qwen3_tied", "torchtitan@2026-04b"),
    ("gemma2", "torchtune"),
    ("gemma2", "gguf"),
    ("gemma3_text", "megatron"),
    ("gemma3", "hf-memory@4.50"),
    ("gemma3", "hf-memory@5.0"),
    ("phi3", "torchtune"),
    ("phi3", "megatron"),
    ("gpt2", "nanogpt"),
    ("gpt_neox", "hf-memory"),
    ("gpt_neox_sequential", "megatron"),
    ("falcon_new", "megatron"),
    ("mixtral", "gpt-fast"),
    ("mixtral", "hf-memory"),
    ("qwen2_moe", "megatron"),
    ("qwen3_moe", "torchtitan@2025-07"),
    ("deepseek_v3", "hf-memory"),
    ("deepseek_v3_mtp", "torchtitan@2026-07"),
    ("gpt_oss", "torchtitan@2026-07"),
    ("gpt_oss", "megatron"),
    ("llama4", "hf-modules"),
    ("llama4_text", "hf-modules"),
]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of each tiny model as it is published: safetensors and config.json."""
    root = tmp_path_factory.mktemp("published")
    for model in TINY:
        write(root / model, hub_state(model), model)
    return root


def write(folder: Path, state: State, model: str) -> None:
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(ROOT / model / "config.json", folder / "config.json")


def test_chosen_are_of_every_scheme_and_family() -> None:
    assert {scheme.partition("@")[0] for _, scheme in CHOSEN} >= {
        scheme.partition("@")[0] for _, scheme in CASES if "fused" not in scheme
    }
    alone = {"bloom"}  # it has no scheme beside the hub's
    families = {tiny.family for tiny in TINY.values()} - alone
    assert {TINY[model].family for model, _ in CHOSEN} >= families - {"mistral"}


@pytest.mark.parametrize(("model", "scheme"), CHOSEN)
def test_there_and_back_on_files(model: str, scheme: str, published: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there.pt", tmp_path / "back"
    ckptmap.convert(published / model, there, to="full", names=scheme)
    state = torch.load(there, weights_only=True)
    assert facts(rows(state)) == facts(golden(model, scheme))
    ckptmap.convert(
        there, back, to="hf", names="hf", config_from=str(published / model / "config.json")
    )
    assert_hub(load_file(back / "model.safetensors"), model, without=dropped(model, scheme))


@pytest.mark.parametrize("model", ["falcon_new", "falcon_rw", "bloom", "gpt2"])
def test_hub_names_are_checked_on_files(model: str, published: Path, tmp_path: Path) -> None:
    ckptmap.convert(published / model, tmp_path / "out", to="hf", names="auto")
    assert_hub(load_file(tmp_path / "out" / "model.safetensors"), model)


def test_from_one_scheme_to_another_on_shards(tmp_path: Path, published: Path) -> None:
    """torchtitan's names in a DCP directory of 3 ranks, to torchtune's in one file."""
    sharded, whole = tmp_path / "dcp", tmp_path / "tune.pt"
    ckptmap.convert(
        published / "qwen3", sharded, to="fsdp2", world_size=3, names="torchtitan@2025-07"
    )
    config = str(published / "qwen3" / "config.json")
    ckptmap.convert(sharded, whole, to="full", names="torchtune", config_from=config)
    state = torch.load(whole, weights_only=True)
    assert facts(rows(state)) == facts(golden("qwen3", "torchtune"))


def test_every_dtype_is_moved_as_it_is(tmp_path: Path) -> None:
    """Bits that mean nothing, NaNs among them: a permutation must not look at values."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8):
        at = tmp_path / str(dtype).removeprefix("torch.")
        at.mkdir()
        bits = {key: as_bits(value, dtype) for key, value in hub_state("llama").items()}
        write(at / "hf", bits, "llama")
        ckptmap.convert(at / "hf", at / "meta.pt", to="full", names="meta")
        ckptmap.convert(
            at / "meta.pt", at / "back", to="hf", names="hf", config_from=str(at / "hf")
        )
        back = load_file(at / "back" / "model.safetensors")
        assert {key: value.dtype for key, value in back.items()} == dict.fromkeys(bits, dtype)
        for key, value in bits.items():
            assert back[key].view(torch.uint8).equal(value.view(torch.uint8)), (dtype, key)


def as_bits(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As many elements of a dtype, their bits counted up."""
    nbytes = value.numel() * dtype.itemsize
    counted = torch.arange(nbytes).mul(37).remainder(251).to(torch.uint8)
    return counted.view(dtype).reshape(value.shape)


def test_plan_says_the_scheme_and_what_is_rearranged(published: Path) -> None:
    plan = ckptmap.plan(published / "llama", to="full", names="meta")
    text = str(plan)
    assert "llama/hf -> llama/meta" in text
    assert "exact" in text


@pytest.mark.parametrize(
    ("model", "scheme", "names", "message"),
    [
        ("llama", "torchtitan@2026-04a", "hf", ""),
        ("phi3", "torchtune", "hf", "could be of llama/torchtune, phi3/torchtune"),
        ("phi3", "megatron", "hf", "could be of llama/megatron, phi3/megatron"),
    ],
)
def test_source_by_its_fingerprint(
    model: str, scheme: str, names: str, message: str, published: Path, tmp_path: Path
) -> None:
    """Without a config: sizes that no shape tells are asked for, and so is the family."""
    torch.save(state_of(model, scheme), tmp_path / "there.pt")
    with pytest.raises(PlanError, match=message or "head_dim"):
        ckptmap.convert(tmp_path / "there.pt", tmp_path / "out", to="hf", names=names)
    assert not (tmp_path / "out").exists()
    ckptmap.convert(
        tmp_path / "there.pt",
        tmp_path / "out",
        to="hf",
        names=names,
        config_from=str(published / model),
    )
    assert_hub(load_file(tmp_path / "out" / "model.safetensors"), model)


def test_missing_expert_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    state = dict(hub_state("mixtral"))
    del state["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    write(tmp_path / "hf", state, "mixtral")
    with pytest.raises(PlanError, match=r"experts\.3\.w2\.weight is missing"):
        ckptmap.convert(tmp_path / "hf", tmp_path / "out.pt", to="full", names="gpt-fast")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_unknown_key_is_refused(tmp_path: Path) -> None:
    state = {**hub_state("llama"), "model.layers.0.self_attn.q_proj.lora": torch.ones(2)}
    write(tmp_path / "hf", state, "llama")
    with pytest.raises(PlanError, match=r"q_proj\.lora"):
        ckptmap.convert(tmp_path / "hf", tmp_path / "out.pt", to="full", names="meta")


def test_config_beside_the_source_of_another_size(tmp_path: Path) -> None:
    write(tmp_path / "hf", hub_state("llama"), "llama")
    config = (tmp_path / "hf" / "config.json").read_text()
    assert config_of("llama")["num_key_value_heads"] == 4
    wrong = config.replace('"num_key_value_heads": 4', '"num_key_value_heads": 12')
    (tmp_path / "hf" / "config.json").write_text(wrong)
    with pytest.raises(PlanError, match="num_key_value_heads 12"):
        ckptmap.convert(tmp_path / "hf", tmp_path / "out.pt", to="full", names="gpt-fast")


@pytest.mark.parametrize(
    ("model", "scheme"), [("qwen2_tied", "megatron"), ("qwen3_tied", "torchtune")]
)
@pytest.mark.parametrize("equal", [True, False])
def test_tied_output_that_is_stored_too(
    model: str, scheme: str, equal: bool, tmp_path: Path
) -> None:
    """It is compared in the run, and nothing is published where it differs."""
    state = dict(hub_state(model))
    head = state["model.embed_tokens.weight"].clone()
    head[7, 11] += 0 if equal else 1
    write(tmp_path / "hf", {**state, "lm_head.weight": head}, model)
    if not equal:
        with pytest.raises(ckptmap.CkptmapError, match=r"tied|differ"):
            ckptmap.convert(tmp_path / "hf", tmp_path / "out.pt", to="full", names=scheme)
        assert not (tmp_path / "out.pt").exists()
        return
    ckptmap.convert(tmp_path / "hf", tmp_path / "out.pt", to="full", names=scheme)
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert facts(rows(made)) == facts(golden(model, scheme))


def test_extra_state_of_megatron_is_no_weight(published: Path, tmp_path: Path) -> None:
    """Its modules write one entry each: nothing, bytes, or a tensor of bytes."""
    at = "decoder.layers.1."
    state = {
        **state_of("qwen2", "megatron"),
        at + "self_attention.linear_qkv._extra_state": None,
        at + "mlp.linear_fc1._extra_state": torch.ones(9, dtype=torch.uint8),
        "output_layer._extra_state": b"",
    }
    torch.save(state, tmp_path / "there.pt")
    config = str(published / "qwen2")
    plan = ckptmap.plan(tmp_path / "there.pt", to="hf", names="hf", config_from=config)
    assert "no weight" in str(plan)
    ckptmap.convert(
        tmp_path / "there.pt", tmp_path / "out", to="hf", names="hf", config_from=config
    )
    assert_hub(load_file(tmp_path / "out" / "model.safetensors"), "qwen2")


def test_gpt2_with_its_output_matrix_in_a_pickle(published: Path, tmp_path: Path) -> None:
    """What `torch.save(model.state_dict())` has, and nanoGPT's names: told apart by shapes."""
    state = hub_state("gpt2")
    state = {**state, "lm_head.weight": state["transformer.wte.weight"]}
    torch.save(state, tmp_path / "there.pt")
    ckptmap.convert(
        tmp_path / "there.pt",
        tmp_path / "out.pt",
        to="full",
        names="megatron",
        config_from=str(published / "gpt2"),
    )
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert facts(rows(made)) == facts(golden("gpt2", "megatron"))
