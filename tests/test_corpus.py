"""The corpus against the formats' own loaders: what the other tests compare with is known good."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import Device
from tests.corpus import CASES, Case, Corpus, Spec, names
from tests.corpus.case import WRAPPER_SEGMENTS
from tests.corpus.loaders import (
    dcp_blobs,
    differences,
    load,
    load_torch,
    model_part,
    rank_trees,
    raw_bytes,
    same_bits,
    shards,
)
from tests.corpus.models import NF4_NUMBERS, NF4_TENSORS, moments, nf4_parts, trained
from tests.corpus.ranks import RanksError, run_ranks

NEEDS_RANKS = (
    "fsdp1_ranks_w2", "fsdp1_ranks_w4", "fsdp1_ranks_flat_bf16_w2", "fsdp1_ranks_optimizer_w2",
    "fsdp1_ranks_hybrid_w4", "fsdp_tp_ranks_w4",
)  # fmt: skip
"""torch itself reads their files (ShardedTensors, sub-meshes) only with a process group."""
ALONE = names(name=lambda name: name not in NEEDS_RANKS)
DENSE = [name for name in names(encoding="dense") if name in ALONE]
NF4 = names(encoding="nf4")
OPTIMIZER = [name for name in names(optimizer=("fqn", "index")) if name in ALONE]
OTHER_MODEL = ("fsdp_tp_optimizer_dcp_w4",)
"""Of other shapes than the reference run's, its moments filled instead of trained."""
TRAINED = [name for name in names(truth=None) if name not in OTHER_MODEL]
# How the reference run differs from two steps with decay groups: one step, or one group.
PARTS = ("qdata", "scale")
UNGROUPED = {"torch_named_optimizer": 1, "fsdp1_dcp_optimizer_flat_w2": 2}


def clean(spec: Spec, state: Mapping[str, Any]) -> dict[str, Any]:
    """By clean FQN; two keys that become one are a defect of the corpus."""
    out = {spec.clean(key): value for key, value in state.items()}
    assert len(out) == len(state)
    return out


@pytest.mark.parametrize("name", DENSE)
def test_the_formats_own_loader_reads_the_truth(corpus: Corpus, name: str) -> None:
    case = corpus[name]
    got = clean(case.spec, model_part(case.spec, load(case.spec, case.path)))
    assert list(differences(got, case.truth)) == []


@pytest.mark.parametrize("name", DENSE)
def test_stored_names_carry_the_wrappers_that_the_spec_names(corpus: Corpus, name: str) -> None:
    spec = corpus[name].spec
    keys = list(model_part(spec, load(spec, corpus[name].path)))
    assert all(key.startswith(spec.prefix) for key in keys)
    found = {segment for key in keys for segment in key.split(".")} & WRAPPER_SEGMENTS
    assert found | ({"module"} & set(spec.prefix.split("."))) == set(spec.wrappers)


@pytest.mark.parametrize("name", [n for n in names(root=bool, encoding="dense") if n in ALONE])
def test_extra_values_are_those_of_the_spec(corpus: Corpus, name: str) -> None:
    spec = corpus[name].spec
    tree = load(spec, corpus[name].path)
    rest = {k: v for k, v in tree.items() if k not in (spec.root[0], "optimizer")}
    assert {k: v for k, v in rest.items() if k not in spec.opaque} == dict(spec.extra)
    assert set(spec.opaque) <= set(rest)
    assert ("optimizer" in tree) == bool(spec.optimizer)


@pytest.mark.parametrize("name", list(CASES))
def test_no_truth_is_trivial(corpus: Corpus, name: str) -> None:
    """Every tensor varies, and no two agree that the spec does not call tied."""
    case = corpus[name]
    tied = {frozenset(pair) for group in case.spec.tied for pair in combinations(group, 2)}
    for key, value in case.truth.items():
        assert value.numel() < 4 or value.dtype == torch.bool or len(set(_words(value))) > 1, key
    for (a, x), (b, y) in combinations(case.truth.items(), 2):
        if x.numel() > 3 and x.dtype != torch.bool and {a, b} not in tied:
            assert not same_bits(x, y), f"{a} equals {b}"


def _words(value: Tensor) -> list[bytes]:
    raw = raw_bytes(value).numpy().tobytes()
    width = value.element_size()
    return [raw[i : i + width] for i in range(0, min(len(raw), 64 * width), width)]


# ------------------------------------------------------------------------------- training


@pytest.mark.parametrize("name", TRAINED)
def test_gathered_truth_is_that_of_a_single_process_run(corpus: Corpus, name: str) -> None:
    case = corpus[name]
    model, optimizer = trained(name not in UNGROUPED, UNGROUPED.get(name, 2))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(case.truth[key], value, rtol=2e-3, atol=1e-5)
    if case.spec.optimizer:
        want = moments(model, optimizer)
        assert set(case.optimizer) == set(want)
        for key, state in want.items():
            assert set(state) == set(case.optimizer[key]) == {"step", "exp_avg", "exp_avg_sq"}
            for part, value in state.items():
                torch.testing.assert_close(
                    case.optimizer[key][part], value, rtol=2e-3, atol=1e-7, check_dtype=True
                )


@pytest.mark.parametrize("name", names(optimizer=("fqn", "index")))
def test_no_moment_is_trivial(corpus: Corpus, name: str) -> None:
    for key, state in corpus[name].optimizer.items():
        moments = [value for part, value in state.items() if part != "step"]
        assert moments, key
        assert any(bool(value.any()) for value in moments), key


@pytest.mark.parametrize("name", OPTIMIZER)
def test_stored_optimizer_state_is_the_truth(corpus: Corpus, name: str) -> None:
    case = corpus[name]
    stored = load(case.spec, case.path)["optimizer"]["state"]
    order = list(stored) if case.spec.optimizer == "fqn" else _by_index(case)
    got = dict(zip(order, stored.values(), strict=True))
    assert set(got) == set(case.optimizer)
    for key, state in case.optimizer.items():
        assert list(differences(got[key], state)) == [], key


def _by_index(case: Case) -> list[str]:
    """The names that the indices stand for: construction order of the optimizer's groups."""
    every = list(dict(trained()[0].named_parameters()))
    if case.name in UNGROUPED:
        return every
    return [n for n in every if "norm" not in n] + [n for n in every if "norm" in n]


# ------------------------------------------------------------------------------- NF4


@pytest.mark.parametrize("name", NF4)
def test_nf4_parts_on_disk_are_those_of_the_whole_weight(corpus: Corpus, name: str) -> None:
    case = corpus[name]
    stored = _nf4_shards(case)
    assert set(stored) == set(case.truth)
    assert len(case.nf4) >= 7
    for key, pieces in stored.items():
        if key not in case.nf4:
            whole = pieces[0] if case.truth[key].ndim == 0 else torch.cat(pieces)
            assert same_bits(whole, case.truth[key]), key
            continue
        inner = [nf4_parts({key: piece})[key] for piece in pieces]
        for part in NF4_TENSORS:
            cut = part.startswith("quant")
            assert cut or all(same_bits(i[part], inner[0][part]) for i in inner)
            got = torch.cat([i[part] for i in inner]) if cut else inner[0][part]
            assert same_bits(got, case.nf4[key][part]), f"{key}.{part}"
        for part in NF4_NUMBERS:
            assert {i[part] for i in inner} == {case.nf4[key][part]}, f"{key}.{part}"


def _nf4_shards(case: Case) -> dict[str, list[Tensor]]:
    """Each tensor's pieces in order, NF4 or not, as torch and torchao load them."""
    if case.spec.container == "torch":
        return {key: [value] for key, value in rank_or_file(case)[0].items()}
    if case.spec.container == "dcp":
        return dcp_blobs(case.path)
    trees = rank_or_file(case)
    pieces = {}
    for key, value in trees[0].items():
        sharded = hasattr(value, "_local_tensor")
        pieces[key] = shards([tree[key] for tree in trees])[1] if sharded else [value]
    return pieces


def rank_or_file(case: Case) -> list[dict[str, Any]]:
    return [load_torch(case.path)] if case.spec.container == "torch" else rank_trees(case.path)


@pytest.mark.parametrize("name", NF4)
def test_nf4_truth_is_near_the_dense_weight(corpus: Corpus, name: str) -> None:
    """Half of NF4's widest step is 0.15 of a block's largest value, here below 0.5."""
    from tests.corpus.models import tiny_llama, truth
    from tests.corpus.writers_nf4 import RECIPES

    case = corpus[name]
    exact = truth(RECIPES[name]) if name in RECIPES else dict(tiny_llama().state_dict())
    for key in case.nf4:
        error = (case.truth[key].float() - exact[key].float()).abs()
        assert 0 < error.max() < 0.16 * exact[key].float().abs().max(), key


# ------------------------------------------------------------------------------- 8 bits


@pytest.mark.parametrize("name", names(encoding=("int8", "float8")))
def test_8_bit_parts_on_disk_are_torchaos(corpus: Corpus, name: str) -> None:
    case = corpus[name]
    stored = _as_torchao_loads(case)
    assert set(stored) == set(case.stored) and len(case.coded) >= 7
    for key, wanted in case.stored.items():
        if key in case.coded:
            assert type(stored[key]) is type(wanted), key
            assert all(same_bits(getattr(stored[key], n), getattr(wanted, n)) for n in PARTS), key
        else:
            assert same_bits(stored[key], wanted), key


def _as_torchao_loads(case: Case) -> dict[str, Any]:
    if case.spec.container == "dcp":
        return {key: piece for key, (piece,) in dcp_blobs(case.path).items()}
    if case.spec.container == "torch":
        return load_torch(case.path)
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    with safe_open(case.path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        state, rest = unflatten_tensor_state_dict(tensors, file.metadata())
    assert not rest
    return dict(state)


# ------------------------------------------------------------------------------- particulars


def test_tied_names_are_aliases_where_the_format_keeps_them(corpus: Corpus) -> None:
    whole = load_torch(corpus["torch_tied"].path)
    assert whole["embed.weight"].data_ptr() == whole["lm_head.weight"].data_ptr()
    for tree in rank_trees(corpus["fsdp2_ranks_tied_w2"].path):
        locals_ = (tree[key]._local_tensor for key in ("embed.weight", "lm_head.weight"))
        assert len({local.data_ptr() for local in locals_}) == 1


def test_views_are_stored_as_views(corpus: Corpus) -> None:
    state = load_torch(corpus["torch_views"].path)
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == 1
    assert sum(not value.is_contiguous() for value in state.values()) >= 6
    assert corpus["torch_views"].path.stat().st_size < 3 * state["base"].nbytes


def test_four_ranks_leave_an_empty_shard(corpus: Corpus) -> None:
    trees = rank_trees(corpus["fsdp2_ranks_w4"].path)
    rows = [tree["score.weight"]._local_tensor.shape[0] for tree in trees]
    assert rows == [1, 1, 1, 0]
    assert [t["embed.weight"]._local_tensor.shape[0] for t in trees] == [251, 251, 251, 248]


def test_the_saved_over_directory_keeps_stale_files(corpus: Corpus) -> None:
    path = corpus["fsdp2_dcp_stale_w2"].path
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    named = {
        info.relative_path for info in FileSystemReader(path).read_metadata().storage_data.values()
    }
    assert named < {file.name for file in path.glob("*.distcp")}


@pytest.mark.parametrize("name", names(name=lambda name: "shard1" in name))
def test_matrices_are_cut_by_columns(corpus: Corpus, name: str) -> None:
    case = corpus[name]
    if case.spec.container == "ranks":
        local = rank_trees(case.path)[1]["embed.weight"]._local_tensor
        assert list(local.shape) == [1000, 24]
        return
    assert [list(blob.shape) for blob in dcp_blobs(case.path)["embed.weight"]] == [[1000, 24]] * 2


@pytest.mark.parametrize("name", names(container="hf", name=lambda name: name.startswith("hf")))
def test_transformers_loads_its_own(corpus: Corpus, name: str) -> None:
    from transformers import LlamaForCausalLM

    case = corpus[name]
    model = LlamaForCausalLM.from_pretrained(case.path, dtype="auto")
    got = dict(model.state_dict())
    for group in case.spec.tied:
        assert got[group[0]].data_ptr() == got[group[1]].data_ptr()
        assert group[0] not in case.truth
        del got[group[0]]
    assert list(differences(got, case.truth)) == []
    index = case.path / "model.safetensors.index.json"
    assert index.exists() == ("sharded" in name)
    if index.exists():
        assert len(set(json.loads(index.read_text())["weight_map"].values())) > 2


# ------------------------------------------------------------------------------- the tools


def test_a_failed_rank_is_reported_and_the_others_are_ended() -> None:
    with pytest.raises(RanksError, match=r"(?s)2 ranks: failed.*rank 1.*died on purpose"):
        run_ranks("tests.corpus.ranks_sample", 2, ["fail"], timeout=60)


def test_ranks_out_of_time_are_ended() -> None:
    with pytest.raises(RanksError, match=r"not done after 0.5 s\n\[rank 0\] exit code -9"):
        run_ranks("tests.corpus.ranks_sample", 2, ["hang"], timeout=0.5)


def test_ranks_join_one_group_and_give_their_output() -> None:
    outputs = run_ranks("tests.corpus.ranks_sample", 2, ["sum"], timeout=60)
    assert [(o.rank, o.returncode, o.stdout) for o in outputs] == [(0, 0, "3\n"), (1, 0, "3\n")]


def test_device_fixture_runs_where_it_says(device: Device) -> None:
    with device.mode():
        value = torch.ones(2, 3, device=device.name) * 2
        assert value.device.type == device.name
        assert value.cpu().shape == (2, 3)
        assert device.fake == (type(value).__name__ == "FakeTensor")
