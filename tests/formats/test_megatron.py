"""Megatron-LM's checkpoints of several ranks become one model, or are refused with their rank named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

import ckptmap
from ckptmap.errors import CkptmapError, PlanError, RunError, SourceError
from tests.formats.test_meta import assert_holds
from tests.golden.mappings.tables import ROOT as MAPPINGS
from tests.golden.mappings.tables import read, rows
from tests.golden.parallel.make_megatron import MODELS, ROOT
from tests.mapping.test_goldens import facts
from tests.support.mapping_configs import TINY
from tests.support.mapping_state import hub_state, state_of
from tests.support.parallel_writers import (
    Grid,
    State,
    megatron_args,
    megatron_rank,
    stacked,
    write_megatron,
    write_torch_dist,
)

SMALL = Grid(2, (1, 1))


def config_of(model: str) -> str:
    return str(MAPPINGS / model / "config.json")


def whole(model: str) -> State:
    return state_of(model, "megatron")


# ------------------------------------------------------------------------- as it should be


@pytest.mark.parametrize("model", MODELS)
def test_files_are_cut_as_megatron_cuts(model: str) -> None:
    for rank, stage in SMALL.ranks:
        own = rows(megatron_rank(whole(model), SMALL, rank, stage, local=True))
        assert facts(own) == facts(read(ROOT / f"megatron-{model}" / f"rank{rank}stage{stage}.tsv"))


@pytest.mark.parametrize("model", MODELS)
def test_ranks_and_stages_are_joined(model: str, tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "in" / "iter_0000100", whole(model), SMALL)
    tied = "output_layer.weight" not in whole(model)
    head = {"output_layer.weight": whole(model)["embedding.word_embeddings.weight"]} if tied else {}
    assert_holds(path, {**whole(model), **head})
    ckptmap.convert(
        tmp_path / "in", tmp_path / "out", to="hf", names="hf", config_from=config_of(model)
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = hub_state(model)
    assert found.keys() == expected.keys()
    assert all(found[key].equal(value) for key, value in expected.items())


@pytest.mark.parametrize("grid", [Grid(1, (2,)), Grid(1, (1, 1)), Grid(2, (2,)), Grid(4, (2,))])
def test_other_numbers_of_ranks(grid: Grid, tmp_path: Path) -> None:
    state = whole("llama")
    path = write_megatron(tmp_path / "in", state, grid, local=True)
    with ckptmap.open(path) as ckpt:
        assert ckpt.world_size == grid.tensor * len(grid.layers)
        norm = state["decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"]
        assert ckpt["decoder.layers.1.input_layernorm.weight"].read().equal(norm)
        fc1 = ckpt["decoder.layers.1.mlp.linear_fc1.weight"]
        assert fc1[40:70].equal(state["decoder.layers.1.mlp.linear_fc1.weight"][40:70])


def test_a_tool_writes_all_files_from_one_process(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "in", whole("llama"), SMALL)
    change(path, lambda state: setattr(state["args"], "rank", 0))
    with ckptmap.open(path) as ckpt:
        assert set(ckpt) == set(whole("llama"))


def test_iteration_scheduler_and_arguments_are_extra(tmp_path: Path) -> None:
    with ckptmap.open(write_megatron(tmp_path / "in", whole("llama"), SMALL)) as ckpt:
        assert ckpt.extra["iteration"] == 100
        assert ckpt.extra["opt_param_scheduler"] == {"max_lr": 0.1, "num_steps": 3200}
        plain = vars(megatron_args(SMALL, 2)).copy()
        for name in ("params_dtype", "model_type"):  # objects of classes
            del plain[name]
        assert ckpt.extra["args"] == plain
        assert not ckpt.refused
        notes = "; ".join(ckpt.notes)
    assert "left behind: rng_state" in notes
    assert "2 _extra_state of FP8 scales" in notes


@pytest.mark.parametrize("multiple", [128, 256, 1024])
def test_a_vocabulary_that_is_filled_up_further(multiple: int, tmp_path: Path) -> None:
    """Megatron-LM fills it up to a multiple of 128 times the tensor-parallel ranks."""
    state = {
        key: torch.cat([value, value.new_zeros(multiple - len(value), value.shape[1])])
        if key in ("embedding.word_embeddings.weight", "output_layer.weight")
        else value
        for key, value in whole("llama").items()
    }
    path = write_megatron(tmp_path / "in", state, Grid(2, (2,)))
    out = tmp_path / "out"
    ckptmap.convert(path, out, to="hf", names="hf", config_from=config_of("llama"))
    found = load_file(out / "model.safetensors")
    assert all(found[key].equal(value) for key, value in hub_state("llama").items())


def test_the_model_in_transformers_is_the_same(tmp_path: Path) -> None:
    """HF -> Megatron's files on 2 ranks of 2 stages -> HF: equal logits."""
    from transformers import AutoModelForCausalLM

    source = TINY["qwen3"].build()
    source.save_pretrained(tmp_path / "hf")
    ckptmap.convert(tmp_path / "hf", tmp_path / "whole.pt", to="full", names="megatron")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    write_megatron(tmp_path / "megatron", state, SMALL)
    config = str(tmp_path / "hf" / "config.json")
    ckptmap.convert(
        tmp_path / "megatron", tmp_path / "back", to="hf", names="hf", config_from=config
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert model(tokens).logits.equal(source(tokens).logits)


# ------------------------------------------------------------------------- the optimizer


@pytest.mark.parametrize("kind", ["inside", "distributed", "torch_dist", "chained"])
def test_the_optimizer_is_refused_or_dropped(kind: str, tmp_path: Path) -> None:
    state, path, moment = whole("llama"), tmp_path / "in", torch.zeros(3)
    if kind == "inside":
        beside = {"optimizer": {"state": {0: {"exp_avg": moment}}, "param_groups": []}}
        write_megatron(path, state, Grid(2, (2,)), optimizer=beside)
    elif kind == "distributed":
        write_megatron(path, state, Grid(2, (2,)))
        for rank in ("mp_rank_00", "mp_rank_01"):
            torch.save({0: moment}, path / rank / "distrib_optim.pt")
    else:
        prefix = "chained_0." if kind == "chained" else ""
        key = f"{prefix}optimizer.state.exp_avg.output_layer.weight"
        write_torch_dist(path, {**state, key: moment})
    with pytest.raises(PlanError, match=r"Megatron-LM's optimizer.*not read") as found:
        ckptmap.convert(path, tmp_path / "out.pt", to="full")
    assert found.value.code == "CKM202"
    ckptmap.convert(path, tmp_path / "out.pt", to="full", optimizer="drop")
    assert_holds(tmp_path / "out.pt", state)


# ------------------------------------------------------------------------- torch_dist


@pytest.mark.parametrize("model", MODELS)
def test_stacked_layers_are_taken_apart(model: str, tmp_path: Path) -> None:
    state = whole(model)
    assert facts(rows(stacked(state))) == facts(read(ROOT / f"megatron-{model}" / "torch_dist.tsv"))
    path = write_torch_dist(tmp_path / "in", state)
    assert_holds(path, state)
    out = tmp_path / "out"
    ckptmap.convert(path, out, to="hf", names="hf", config_from=config_of(model))
    found = load_file(out / "model.safetensors")
    assert all(found[key].equal(value) for key, value in hub_state(model).items())
    with ckptmap.open(path) as ckpt:
        assert ckpt.extra["args"]["num_layers"] == 2
        assert any("2 _extra_state" in note for note in ckpt.notes)


def test_layers_that_are_numbered_and_wrapped(tmp_path: Path) -> None:
    """A key that numbers its layers is no stack; NeMo's keys begin with `module.`."""
    layer = "self_attention.linear_qkv.weight"
    state = {
        f"decoder.layers.{layer}": torch.rand(2, 6, 3),
        "decoder.final_layernorm.weight": torch.rand(3),
    }
    wrapped = {f"module.{key}": value for key, value in state.items()}
    assert_holds(
        write_torch_dist(tmp_path / "wrapped", wrapped),
        {
            "decoder.layers.0.self_attention.linear_qkv.weight": state[f"decoder.layers.{layer}"][
                0
            ],
            "decoder.layers.1.self_attention.linear_qkv.weight": state[f"decoder.layers.{layer}"][
                1
            ],
            "decoder.final_layernorm.weight": state["decoder.final_layernorm.weight"],
        },
    )
    path = write_torch_dist(tmp_path / "numbered", {})
    numbered = {f"decoder.layers.{n}.{layer}": torch.rand(6, 3) for n in (0, 1)}
    save(numbered, checkpoint_id=path, no_dist=True)
    assert_holds(path, numbered)


@pytest.mark.parametrize("prefix", ["language_model.", "model.", "vision_model.encoder."])
def test_stacks_of_a_model_within_another(prefix: str, tmp_path: Path) -> None:
    """Megatron core's LLaVA holds a language model and a vision model; others name their model."""
    stack, number = torch.rand(2, 6, 3), f"{prefix}decoder.layers"
    state = {f"{number}.mlp.linear_fc1.weight": stack, f"{prefix}norm.weight": torch.rand(3)}
    expected = {f"{number}.{n}.mlp.linear_fc1.weight": stack[n] for n in (0, 1)}
    norm = {f"{prefix}norm.weight": state[f"{prefix}norm.weight"]}
    assert_holds(write_torch_dist(tmp_path / "in", state), {**expected, **norm})


def test_another_backend_is_refused(tmp_path: Path) -> None:
    path = write_torch_dist(tmp_path / "in", whole("llama"))
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(SourceError, match="expected 'torch_dist', found 'zarr'"):
        ckptmap.open(path)


@pytest.mark.parametrize("missing", ["common.pt", "metadata.json"])
def test_a_part_of_torch_dist_is_no_plain_dcp(missing: str, tmp_path: Path) -> None:
    """As plain DCP its stacked layers would be converted as they are."""
    path = write_torch_dist(tmp_path / "in", whole("llama"))
    (path / missing).unlink()
    with pytest.raises(SourceError, match=f"but no {missing}") as caught:
        ckptmap.open(path)
    assert caught.value.code == "CKM110"


def test_common_pt_of_another_kind(tmp_path: Path) -> None:
    path = write_torch_dist(tmp_path / "in", whole("llama"))
    torch.save([1], path / "common.pt")
    with pytest.raises(SourceError, match=r"common\.pt: expected a dict, found list"):
        ckptmap.open(path)


def test_a_folder_in_place_of_common_pt(tmp_path: Path) -> None:
    path = write_torch_dist(tmp_path / "in", whole("llama"))
    (path / "common.pt").unlink()
    (path / "common.pt").mkdir()
    with pytest.raises(SourceError, match=r"common\.pt: cannot be read: Is a directory"):
        ckptmap.open(path)


def test_a_tensor_of_a_subclass_is_not_left_behind(tmp_path: Path) -> None:
    from torchao.quantization import to_nf4

    key, dense = "decoder.layers.0.mlp.linear_fc2.weight", torch.randn(64, 64)
    path = write_torch_dist(tmp_path / "in", {})
    save({key: to_nf4(dense, 64, 1)}, checkpoint_id=path, no_dist=True)
    with ckptmap.open(path) as ckpt:
        assert ckpt[key].encoding == "nf4" and (ckpt[key].read() - dense).abs().max() < 1


def test_plain_dcp_beside_a_metadata_json_of_another_kind(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text(json.dumps({"step": 3}))
    with ckptmap.open(tmp_path) as ckpt:
        assert ckpt.index.container == "dcp" and list(ckpt) == ["w"]


# ------------------------------------------------------------------------- as it should not be


def change(folder: Path, how: Callable[[dict[str, Any]], object], *names: str) -> None:
    for name in names or [entry.name for entry in folder.iterdir()]:
        file = folder / name / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        how(state)
        torch.save(state, file)


def model(how: Callable[[dict[str, Tensor]], object], *names: str) -> Callable[[Path], object]:
    return partial(_change_model, how=how, names=names)


def _change_model(
    folder: Path, how: Callable[[dict[str, Tensor]], object], names: tuple[str, ...]
) -> None:
    change(folder, lambda state: how(state["model"]), *names)


def _lose(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name / "model_optim_rng.pt").unlink()
        (folder / name).rmdir()


def _exchange(one: Path, two: Path) -> None:
    aside = one.rename(one.with_name("aside"))
    two.rename(one)
    aside.rename(two)


def _one_stage_more(folder: Path) -> None:
    for rank in ("mp_rank_00", "mp_rank_01"):
        shutil.copytree(folder / f"{rank}_000", folder / f"{rank}_002")


def _legacy(file: Path) -> None:
    state = torch.load(file, weights_only=False)
    torch.save(state, file, _use_new_zipfile_serialization=False)


LAST = "mp_rank_01_001"
NORM = "decoder.final_layernorm.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a rank lost": (
        lambda d: _lose(d, LAST), "CKM110",
        r"tensor-parallel rank 1 of pipeline stage 1 is missing, expected 2 ranks of 2 stages",
    ),
    "a stage lost": (
        lambda d: _lose(d, "mp_rank_00_001", LAST), "CKM110", r"rank 0 of pipeline stage 1 is missing",
    ),
    "a file lost": (
        lambda d: (d / LAST / "model_optim_rng.pt").unlink(), "CKM110", r"001 has no model_optim_rng",
    ),
    "ranks of another save": (
        _one_stage_more,
        "CKM110", r"expected 2 ranks of 2 stages, found 6 in all",
    ),
    "of two iterations": (
        lambda d: change(d, lambda s: s.update(iteration=200), LAST),
        "CKM110", r"is of iteration 100, but mp_rank_01_001 is of 200",
    ),
    "of another depth": (
        lambda d: change(d, lambda s: setattr(s["args"], "num_layers", 3)),
        "CKM110", r"expected 3 layers by the saved arguments, found 2 in 2 stages",
    ),
    "a tensor lost": (
        model(lambda s: s.pop(FC2), LAST), "CKM110", r"only one of .* and .* holds .*linear_fc2\.weight",
    ),
    "norms that differ": (
        model(lambda s: s[NORM].add_(1), LAST), "CKM310", r"final_layernorm\.weight: the replica",
    ),
    "files of two ranks exchanged": (
        lambda d: _exchange(d / "mp_rank_00_000", d / "mp_rank_01_000"),
        "CKM110", r"mp_rank_00_000 was saved by rank 1, but mp_rank_01_000 by rank 0",
    ),
    "files of two stages exchanged": (
        lambda d: _exchange(d / "mp_rank_00_000", d / "mp_rank_00_001"),
        "CKM110", r"mp_rank_00_000 was saved by rank 2, but mp_rank_0\d_00\d by rank [01]",
    ),
    "other sizes": (
        model(lambda s: s.update({FC2: torch.zeros(120, 7)}), LAST),
        "CKM113", r"linear_fc2\.weight: rank 0 holds float32\[120, 28\], rank 1 float32\[120, 7\]",
    ),
    "no tensor on one rank": (
        model(lambda s: s.update({FC2: (1, 2)}), LAST),
        "CKM113", r"linear_fc2\.weight: is a tensor on 1 of 2 ranks, but not in mp_rank_01_001",
    ),
    "neither gated nor not": (
        model(lambda s: s.update({FC2: torch.zeros(120, 27)})), "CKM118", r"linear_fc1\.weight: 2 ranks",
    ),
    "experts that are cut": (
        model(lambda s: s.update({"decoder.layers.0.mlp.router.weight": torch.zeros(4, 120)})),
        "CKM118", r"mlp\.router\.weight: 2 ranks hold float32\[4, 120\] each",
    ),
    "expert parallel": (
        lambda d: change(d, lambda s: setattr(s["args"], "expert_model_parallel_size", 2)),
        "CKM118", r"its experts are spread over ranks",
    ),
    "on two stages": (
        model(lambda s: s.update({NORM: torch.zeros(120)})), "CKM118", r"is on two pipeline stages",
    ),
    "an interleaved pipeline": (
        lambda d: change(d, lambda s: s.update(model0=s.pop("model"))),
        "CKM118", r"holds model0, a part of an interleaved",
    ),
    "a list": (
        lambda d: torch.save([1], d / LAST / "model_optim_rng.pt"), "CKM206", r"expected a dict 'model' of",
    ),
    "before torch 1.6": (
        lambda d: _legacy(d / "mp_rank_00_000" / "model_optim_rng.pt"), "CKM117", r"before torch 1\.6",
    ),
    "before Megatron core": (
        lambda d: change(d, lambda s: s.update(model={"language_model": s.pop("model")})),
        "CKM111", r"holds a model from before Megatron core",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_set_is_refused(fault: str, tmp_path: Path) -> None:
    make, code, message = FAULTS[fault]
    folder = write_megatron(tmp_path / "in", whole("llama"), SMALL)
    make(folder)
    with pytest.raises(CkptmapError, match=message) as caught:
        ckptmap.convert(folder, tmp_path / "out.pt", to="full")
    assert caught.value.code == code
    assert not (tmp_path / "out.pt").exists()


def test_a_tied_copy_that_differs_is_refused(tmp_path: Path) -> None:
    folder = write_megatron(tmp_path / "in", whole("llama_tied"), SMALL)
    change(folder, lambda s: s["model"]["output_layer.weight"].add_(1), "mp_rank_00_001")
    with pytest.raises((PlanError, RunError), match=r"CKM208|tied|differ") as caught:
        ckptmap.convert(
            folder, tmp_path / "out", to="hf", names="hf", config_from=config_of("llama_tied")
        )
    assert re.fullmatch(r"CKM(208|310)", caught.value.code)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("at", ["mp_rank_00_000", "mp_rank_00_000/model_optim_rng.pt"])
def test_one_rank_of_many_is_refused(at: str, tmp_path: Path) -> None:
    folder = write_megatron(tmp_path / "in", whole("llama"), SMALL)
    with pytest.raises(
        SourceError, match="holds a part of the model, as the file of one rank of 4"
    ) as caught:
        ckptmap.open(folder / at)
    assert str(folder) in caught.value.hint
