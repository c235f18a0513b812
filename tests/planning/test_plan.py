"""Plans: what they choose, what they leave behind and why; saved plans run again exactly."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.errors import PlanError, RunError, SourceError
from ckptmap.planning.layout_builder import LayoutBuilder
from ckptmap.planning.saved_plan import replan
from tests.corpus import CASES, Corpus
from tests.support.same_tensors import assert_same


@pytest.fixture(scope="module")
def linears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF-like directory whose matrices all fit NF4."""
    folder = tmp_path_factory.mktemp("linears")
    torch.manual_seed(0)
    tensors = {f"layers.{i}.{name}.weight": torch.randn(64, 64) for i in range(3) for name in "ab"}
    tensors |= {"embed_tokens.weight": torch.randn(10, 64), "norm.weight": torch.ones(64)}
    tensors |= {"odd.weight": torch.randn(3, 5), "steps": torch.tensor(7)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def targets(plan: ckptmap.Plan) -> dict[str, str]:
    return {step.fqn: step.target for step in plan.steps}


def test_nf4_takes_linears_and_says_what_it_leaves(linears: Path) -> None:
    found = targets(ckptmap.plan(linears, "fsdp2-nf4", world_size=2))
    assert {fqn for fqn, target in found.items() if target == "nf4(float32)"} == {
        f"layers.{i}.{name}.weight" for i in range(3) for name in "ab"
    }
    assert found["embed_tokens.weight"] == "float32"


def test_encode_and_no_encode_choose_by_glob(linears: Path) -> None:
    found = targets(ckptmap.plan(linears, "full-nf4", no_encode=("layers.0.*",)))
    assert found["layers.0.a.weight"] == "float32"
    assert found["layers.1.a.weight"] == "nf4(float32)"
    found = targets(ckptmap.plan(linears, "full-nf4", encode=("embed*",)))
    assert [fqn for fqn, target in found.items() if "nf4" in target] == ["embed_tokens.weight"]


def test_forcing_what_cannot_be_encoded_is_refused(linears: Path) -> None:
    with pytest.raises(PlanError, match=r"odd\.weight: cannot be nf4"):
        ckptmap.plan(linears, "full-nf4", encode=("odd.*",))


def test_a_shape_that_cannot_be_encoded_is_said_and_refused_if_strict(tmp_path: Path) -> None:
    """15 elements fill no block of 64. A norm is left by its name, and is nothing to be strict of."""
    save_file({"layers.0.odd.weight": torch.ones(3, 5), "layers.0.even.weight": torch.ones(8, 8),
               "norm.weight": torch.ones(7)}, tmp_path / "a.safetensors")  # fmt: skip
    reason = "layers.0.odd.weight: cannot be nf4: 15 elements are not a multiple of the block 64"
    plan = ckptmap.plan(tmp_path / "a.safetensors", "full-nf4")
    assert plan.notes == (f"stays as it is: {reason}",) and not plan.unresolved
    strict = ckptmap.plan(tmp_path / "a.safetensors", "full-nf4", strict=True)
    assert [f"{item.key}: {item.reason}" for item in strict.unresolved] == [reason]
    command = ["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "out.pt"), "--strict"]
    assert main([*command, "--to", "full-nf4"]) == 2 and not (tmp_path / "out.pt").exists()
    assert main([*command, "--to", "full-nf4", "--no-encode", "*.odd.*"]) == 0
    assert not ckptmap.plan(tmp_path / "a.safetensors", "full-bf16", strict=True).unresolved
    tiles = ckptmap.plan(tmp_path / "a.safetensors", "full-fp8", strict=True)
    said = "layers.0.even.weight: is not made fp8 by default in shape [8, 8]"
    assert f"stays as it is: {said}" in tiles.notes and len(tiles.unresolved) == 2


@pytest.mark.parametrize("what", ["include", "encode", "no_encode", "exclude"])
def test_a_glob_that_matches_nothing_is_refused(what: str, linears: Path) -> None:
    asked = {what: ("*.wieght", "*")} if what == "include" else {what: ("*.wieght",)}
    with pytest.raises(
        PlanError, match=rf"--{what.replace('_', '-')} '\*.wieght': nothing in"
    ) as at:
        ckptmap.plan(linears, "full-nf4", **asked)
    assert at.value.code == "CKM206"
    assert "did you mean '*.weight', which matches 9?" in at.value.hint


def test_a_form_that_transformers_does_not_load_points_to_one_that_it_does(linears: Path) -> None:
    config = linears.parent / "config.json"
    config.write_text("{}")
    notes = {
        to: [note for note in ckptmap.plan(linears, to, config_from=str(config)).notes
             if "transformers" in note]
        for to in ("hf-nf4", "hf-bnb-nf4", "hf-int8", "hf", "full-nf4")
    }  # fmt: skip
    (said,) = notes.pop("hf-nf4")
    assert "does not load nf4" in said and "--to hf-bnb-nf4" in said
    assert not any(notes.values())
    wrapped = ckptmap.plan(linears, "hf", config_from=str(config), wrap=("ddp",)).notes
    assert any("transformers would not find module." in note for note in wrapped)
    assert not any("would not find" in note for note in ckptmap.plan(linears, "ddp").notes)


@pytest.mark.parametrize("limit", [5_000_000_000, 20_000])
def test_transformers_refuses_what_it_would_initialise_at_random(
    limit: int, corpus: Corpus, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    source = corpus["hf_bf16"].path
    ckptmap.convert(source, tmp_path / "out", to="hf-nf4", max_shard_nbytes=limit)
    names = [file.name for file in (tmp_path / "out").glob("*.safetensors")]
    assert len(names) == (1 if limit > 20_000 else 4)
    assert all(name.startswith("ckptmap") for name in names)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_include_exclude_and_drop_are_named(linears: Path) -> None:
    plan = ckptmap.plan(linears, "hf", include=("layers.*",), exclude=("*.b.weight",))
    assert set(targets(plan)) == {f"layers.{i}.a.weight" for i in range(3)}
    assert plan.dropped["layers.0.b.weight"] == "--exclude *.b.weight"
    assert plan.dropped["steps"] == "not in --include"
    with pytest.raises(PlanError, match="no tensor is left to convert of 10"):
        ckptmap.plan(linears, "hf", include=("nothing.*",))


@pytest.mark.parametrize(
    ("to", "text"),
    [("fsdp2-nf5", "did you mean --to fsdp2-nf4"), ("fsdp3", "setups: hf, full"), ("", "setups:")],
)
def test_unknown_setup_names_the_nearest(linears: Path, to: str, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        ckptmap.plan(linears, to)


def test_world_size_must_make_sense(linears: Path) -> None:
    for asked in (0, 100_000_000):
        with pytest.raises(PlanError, match=f"world-size {asked}: expected 1 to 131072"):
            ckptmap.plan(linears, "fsdp2", world_size=asked)
    with pytest.raises(PlanError, match="setup hf is not cut over ranks"):
        ckptmap.plan(linears, "hf", world_size=4)


def test_saved_plan_runs_exactly_and_only_on_the_same_source(linears: Path, tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(linears, source)
    plan = ckptmap.plan(source, "full-bf16", exclude=("steps",))
    plan.save(tmp_path / "plan.json")
    again = replan(tmp_path / "plan.json")
    assert again.digest == plan.digest
    assert again.to_json() == plan.to_json()
    again.execute(tmp_path / "out.pt")
    assert "steps" not in torch.load(tmp_path / "out.pt", weights_only=True)
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(PlanError, match="is not what was planned on"):
        replan(tmp_path / "plan.json")
    saved = plan.to_json()
    for damaged in ({}, [], saved | {"options": None}, saved | {"source": {"path": None}}):
        (tmp_path / "plan.json").write_text(json.dumps(damaged))
        with pytest.raises(PlanError, match="is not a saved plan"):
            replan(tmp_path / "plan.json")


def test_source_that_changes_after_planning_publishes_nothing(
    linears: Path, tmp_path: Path
) -> None:
    source = tmp_path / "src"
    shutil.copytree(linears, source)
    plan = ckptmap.plan(source, "full")
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(RunError, match="was written anew since its headers were read"):
        plan.execute(tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_plan_digest_does_not_depend_on_where_the_source_lies(
    linears: Path, tmp_path: Path
) -> None:
    shutil.copytree(linears, tmp_path / "elsewhere", copy_function=shutil.copy2)
    one, two = (
        ckptmap.plan(p, "fsdp2-nf4", world_size=2) for p in (linears, tmp_path / "elsewhere")
    )
    assert one.digest == two.digest
    assert ckptmap.plan(linears, "fsdp2-nf4", world_size=4).digest != one.digest


def test_plan_json_is_complete(linears: Path) -> None:
    document = json.loads(json.dumps(ckptmap.plan(linears, "hf-bf16").to_json()))
    assert document["schema"] == 1
    assert document["totals"]["tensors"] == 10
    assert document["totals"]["fidelity"] == {"bytes": 1, "cast": 9}
    assert {step["fqn"] for step in document["steps"]} == set(ckptmap.open(linears))


def test_names_that_change_are_said_with_the_keys_of_the_source(
    corpus: Corpus, tmp_path: Path
) -> None:
    case = corpus["torch_compiled_layers"]
    plan = ckptmap.plan(case.path, "hf")
    stored = torch.load(case.path, weights_only=True)
    assert plan.to_json()["from"] == {
        case.spec.clean(key): (key,) for key in stored if case.spec.clean(key) != key
    }
    lines = [line for line in str(plan).splitlines() if line.startswith("from:")]
    assert lines == ["from: layers.*._orig_mod.{name} -> layers.*.{name}  36x"]
    assert "from:" not in str(ckptmap.plan(corpus["torch_plain"].path, "hf"))
    fused = ckptmap.plan(corpus["hf_bf16"].path, "full", names="megatron")
    one = fused.to_json()["from"]["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert one == tuple(f"model.layers.0.self_attn.{c}_proj.weight" for c in "qkv")
    assert "self_attn.q_proj.weight + ... (3 in all) -> decoder" in str(fused)


def test_ties_are_listed_whether_the_target_knows_them_or_not(corpus: Corpus) -> None:
    case = corpus["torch_tied"]
    first, second = next(iter(case.spec.tied))
    assert ckptmap.plan(case.path, "full").tied == {second: first}
    for to in ("fsdp2", "hf"):
        plan = ckptmap.plan(case.path, to)
        assert not plan.tied
        assert f"tied, written under each name: {second}: {first}" in plan.notes
    alone = ckptmap.plan(case.path, "fsdp2", exclude=(second,))
    assert not any("tied" in note for note in alone.notes)


def test_wrap_and_names_like(linears: Path, tmp_path: Path, corpus: Corpus) -> None:
    ckptmap.convert(linears, tmp_path / "wrapped.pt", to="full", wrap=("ddp", "compile"))
    keys = torch.load(tmp_path / "wrapped.pt", weights_only=True).keys()
    assert all(key.startswith("module._orig_mod.") for key in keys)
    like = corpus["torch_compiled_layers"]
    ckptmap.convert(
        corpus["torch_plain"].path, tmp_path / "like.pt", to="full", names_like=str(like.path)
    )
    stored = torch.load(like.path, weights_only=True)
    assert set(torch.load(tmp_path / "like.pt", weights_only=True)) == set(stored)
    with pytest.raises(PlanError, match="unknown wrapper 'fsdp9'"):
        ckptmap.plan(linears, "full", wrap=("fsdp9",))


def test_optimizer_by_fqn_is_carried_with_its_groups(corpus: Corpus, tmp_path: Path) -> None:
    name = next(n for n, s in CASES.items() if s.optimizer == "fqn" and s.container == "dcp")
    case = corpus[name]
    for to, dst in (("full", tmp_path / "o.pt"), ("fsdp2", tmp_path / "o")):
        ckptmap.convert(case.path, dst, to=to, drop=case.spec.opaque)
        assert ckptmap.verify(dst, against=case.path).ok
        with ckptmap.open(dst) as ckpt:
            assert set(ckpt.optimizer) == set(case.optimizer)
            for fqn, states in case.optimizer.items():
                for state, value in states.items():
                    assert_same(ckpt.optimizer[fqn][state].read(), value, f"{fqn} {state}")
    loaded = torch.load(tmp_path / "o.pt", weights_only=True)
    assert set(loaded) >= {"model", "optimizer"}
    assert set(loaded["optimizer"]["state"]) == set(case.optimizer)


def test_optimizer_by_index_is_refused_unless_dropped(corpus: Corpus) -> None:
    case = corpus["dcp_single_raw_optimizer"]
    plan = ckptmap.plan(case.path, "full")
    with pytest.raises(PlanError, match=r"keyed by parameter index.*--param-order FILE"):
        plan.require_resolved()
    ckptmap.plan(case.path, "full", optimizer="drop").require_resolved()


def test_extra_is_kept_or_named_as_left_behind(corpus: Corpus, tmp_path: Path) -> None:
    case = corpus["torch_nested"]
    plan = ckptmap.plan(case.path, "hf", drop=case.spec.opaque, optimizer="drop")
    for key in case.spec.extra:
        reasons = {why for name, why in plan.dropped.items() if name.split(".")[0] == key}
        assert reasons == {"hf has no place for what is not a weight"}
    ckptmap.convert(
        case.path, tmp_path / "o.pt", to="full", drop=case.spec.opaque, optimizer="drop"
    )
    with ckptmap.open(tmp_path / "o.pt") as ckpt:
        assert ckpt.extra == dict(case.spec.extra)


def declared(folder: Path, tied: bool, equal: bool) -> Path:
    """A directory whose config.json says whether the embeddings are tied."""
    folder.mkdir()
    embed = torch.randn(8, 4)
    head = embed.clone() if equal else embed + 1
    save_file(
        {"model.embed_tokens.weight": embed, "lm_head.weight": head}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    return folder


def test_declared_tie_is_written_once_if_it_holds(tmp_path: Path) -> None:
    plan = ckptmap.plan(declared(tmp_path / "tied", True, True), "hf")
    assert plan.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    plan.execute(tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"model.embed_tokens.weight"}
    ckptmap.convert(declared(tmp_path / "untied", False, True), tmp_path / "both", to="hf")
    assert len(load_file(tmp_path / "both" / "model.safetensors")) == 2


def test_declared_tie_that_does_not_hold_is_refused(tmp_path: Path) -> None:
    source = declared(tmp_path / "src", True, False)
    says = r"lm_head\.weight.*tied to model\.embed_tokens.*; the model's config ties the two"
    with pytest.raises(ckptmap.CkptmapError, match=says):
        ckptmap.convert(source, tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


FOREIGN: dict[str, dict[str, Any]] = {
    "block-scaled fp8": {
        "w.weight": torch.zeros(4, 4, dtype=torch.float8_e5m2), "w.weight_scale_inv": torch.ones(1, 1),
    },
    "GPTQ or AWQ": {
        "w.qweight": torch.zeros(4, 4, dtype=torch.int32), "w.scales": torch.ones(1, 4).half(),
        "w.qzeros": torch.zeros(1, 1, dtype=torch.int32),
    },
    "foreign quantized": {
        "w.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn), "w.scale_weight": torch.ones(1),
    },
}  # fmt: skip


@pytest.mark.parametrize("scheme", FOREIGN)
def test_foreign_quantization_moves_as_bytes_and_is_never_cast(scheme: str, tmp_path: Path) -> None:
    source = tmp_path / "q.safetensors"
    save_file({**FOREIGN[scheme], "norm.weight": torch.ones(4)}, source)
    ckptmap.plan(source, "full").require_resolved()
    plan = ckptmap.plan(source, "full-bf16")
    assert {item.key for item in plan.unresolved} == set(FOREIGN[scheme])
    with pytest.raises(PlanError, match=f"is part of a {scheme} tensor"):
        plan.execute(tmp_path / "o.pt")
    kept = ckptmap.plan(source, "full-bf16", no_encode=("w.*",))
    kept.require_resolved()
    assert kept.fidelities() == {"bytes": len(FOREIGN[scheme]), "cast": 1}


def test_root_chooses_among_several_models(tmp_path: Path) -> None:
    torch.save({"gen": {"w": torch.ones(2)}, "disc": {"w": torch.zeros(2)}}, tmp_path / "gan.pt")
    with pytest.raises(SourceError, match="several dicts could be the weights: gen, disc"):
        ckptmap.open(tmp_path / "gan.pt")
    with ckptmap.open(tmp_path / "gan.pt", root="disc") as ckpt:
        assert_same(ckpt["w"].read(), torch.zeros(2), "w")
    with ckptmap.open(tmp_path / "gan.pt", root="") as ckpt:
        assert set(ckpt) == {"gen.w", "disc.w"}
    with pytest.raises(SourceError, match="no tensors under root 'nope'"):
        ckptmap.open(tmp_path / "gan.pt", root="nope")


@pytest.mark.parametrize("to", ["hf", "full", "fsdp2"])
@pytest.mark.parametrize("container", ["torch", "dcp", "hf"])
def test_the_quick_way_through_a_plan_is_the_general_one(
    container: str, to: str, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = corpus[next(name for name, case in CASES.items() if case.container == container)].path
    options: dict[str, Any] = {"world_size": 3} if to == "fsdp2" else {}
    taken: list[int] = []
    plain = LayoutBuilder.plain

    def counted(draft: LayoutBuilder, role: str, fqns: Sequence[str], *rest: Any) -> None:
        taken.append(len(fqns))
        plain(draft, role, fqns, *rest)

    monkeypatch.setattr(LayoutBuilder, "plain", counted)
    quick = ckptmap.plan(path, to, optimizer="drop", **options)
    monkeypatch.setattr(LayoutBuilder, "extent", lambda *args: None)
    monkeypatch.setattr(Checkpoint, "columns", lambda self: None)
    general = ckptmap.plan(path, to, optimizer="drop", **options)
    assert max(taken) > 1, "no tensors went the quick way together"
    assert quick.digest == general.digest
    assert list(quick.steps) == list(general.steps)


def test_a_scheme_that_takes_nothing_is_said(tmp_path: Path) -> None:
    """GPT-2's Conv1D is none of bitsandbytes' linear layers."""
    tensors = {"h.0.attn.c_attn.weight": torch.randn(64, 192), "wte.weight": torch.randn(128, 64)}
    save_file(tensors, tmp_path / "model.safetensors")
    said = "no weight becomes bnb-nf4 by default, all stay as they are"
    made = ckptmap.plan(tmp_path / "model.safetensors", "full-bnb-nf4")
    assert any(said in note for note in made.notes)
    strict = ckptmap.plan(tmp_path / "model.safetensors", "full-bnb-nf4", strict=True)
    assert [said in item.reason for item in strict.unresolved] == [True]
    taken = {"layers.0.q_proj.weight": torch.randn(64, 64), **tensors}
    save_file(taken, tmp_path / "taken.safetensors")
    for strictly in (False, True):
        made = ckptmap.plan(tmp_path / "taken.safetensors", "full-bnb-nf4", strict=strictly)
        assert not any(said in note for note in made.notes) and not made.unresolved


def test_a_scheme_whose_weights_were_all_left_out_does_not_speak_of_the_default(
    tmp_path: Path,
) -> None:
    save_file({"layers.0.q_proj.weight": torch.randn(64, 64)}, tmp_path / "model.safetensors")
    options: list[tuple[dict[str, str], str]] = [
        ({"no_encode": "*"}, "by --no-encode,"),
        ({"encode": "*", "no_encode": "*"}, "by --encode and --no-encode,"),
    ]
    for given, said in options:
        made = ckptmap.plan(tmp_path / "model.safetensors", "full-nf4", **given)
        assert any(f"no weight becomes nf4 {said}" in note for note in made.notes)
