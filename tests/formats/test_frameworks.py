"""Directories that training frameworks write open whole, weights and optimizer moments bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict

import ckptmap
from ckptmap.errors import CkptmapError, PlanError, RunError, SourceError
from tests.corpus.case import Case
from tests.corpus.ranks import run_alone, run_ranks
from tests.corpus.writers_directories import SAMPLES, sample
from tests.support.same_tensors import assert_same

NAMES = [n for n in SAMPLES if not n.startswith("dcp_hf") and "two_models" not in n]
BY_INDEX = {"accelerate_w1"}
"""safetensors forgets the model's order and no config is there: which index is which is unknown."""
INNER = {"verl_w2": "actor", "titan_w2": "step-2"}
FRAMEWORK = {name: name for name in ("accelerate", "lightning", "trainer", "verl")} | {
    "titan": "fsdp2"
}


def inner(case: Case) -> Path:
    """The framework's directory itself, below its run's directory."""
    step = "checkpoint-2" if case.name.startswith("trainer") else ""
    return case.path / INNER.get(case.name, step)


@pytest.fixture
def copied(framework_directories: Path, tmp_path: Path) -> Any:
    """A copy to be damaged."""

    def copy(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(inner(sample(framework_directories, name)), target)
        return target

    return copy


# ------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_moments(name: str, framework_directories: Path) -> None:
    case = sample(framework_directories, name)
    with ckptmap.open(case.path) as ckpt:
        assert set(ckpt) == set(case.truth)
        for fqn, expected in case.truth.items():
            assert_same(ckpt[fqn].read(), expected, fqn)
        assert ckpt.world_size == case.world_size
        assert ckpt.index.container == FRAMEWORK[name.split("_")[0]].replace("fsdp2", "dcp")
        if name not in BY_INDEX:
            assert_same_moments(ckpt, case)


def assert_same_moments(ckpt: ckptmap.Checkpoint, case: Case) -> None:
    assert set(ckpt.optimizer) == set(case.optimizer)
    for fqn, states in case.optimizer.items():
        assert set(ckpt.optimizer[fqn]) == set(states)
        for state, expected in states.items():
            assert_same(ckpt.optimizer[fqn][state].read(), expected, f"{fqn} {state}")


@pytest.mark.parametrize("name", [n for n in NAMES if n not in BY_INDEX])
@pytest.mark.parametrize("to", ["fsdp2", "full"])
def test_converts_with_its_optimizer(
    name: str, to: str, framework_directories: Path, tmp_path: Path
) -> None:
    case = sample(framework_directories, name)
    out = tmp_path / "out"
    ckptmap.convert(inner(case), out, to=to)
    with ckptmap.open(out) as ckpt:
        for fqn, expected in case.truth.items():
            assert_same(ckpt[fqn].read(), expected, fqn)
        assert_same_moments(ckpt, case)
    ckptmap.verify(out)


@pytest.mark.parametrize("name", ["accelerate_w1", "trainer_fsdp_full_w2", "verl_w2"])
def test_converts_to_hf(name: str, framework_directories: Path, tmp_path: Path) -> None:
    case = sample(framework_directories, name)
    ckptmap.convert(inner(case), tmp_path / "out", to="hf")
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert set(ckpt) == set(case.truth)
        for fqn, expected in case.truth.items():
            assert_same(ckpt[fqn].read(), expected, fqn)


@pytest.mark.parametrize("name", ["trainer_w1", "verl_w2"])
def test_config_is_found_where_the_framework_puts_it(
    name: str, framework_directories: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    case = sample(framework_directories, name)
    ckptmap.convert(case.path, tmp_path / "out", to="hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for fqn, value in model.state_dict().items():
        assert_same(value, case.truth[fqn], fqn)


# ------------------------------------------------------------------------------- the rest


def test_accelerates_scheduler_and_custom_checkpoints_are_extra(
    framework_directories: Path,
) -> None:
    for name in ("accelerate_w1", "accelerate_bin_w2", "accelerate_fsdp2_w2"):
        case = sample(framework_directories, name)
        with ckptmap.open(case.path) as ckpt:
            state = torch.load(case.path / "scheduler.bin", weights_only=True)
            assert ckpt.extra["scheduler"] == state
            assert ckpt.extra["scheduler_1"]["last_epoch"] == 9
            assert ckpt.extra["custom_checkpoint_0"] == {"seen": 41, "at": (3, None)}
            (window,) = ckpt.other.values()
            assert_same(window.read(), torch.arange(5.0), "window")
            ranks = range(case.world_size)
            left = ", ".join(f"random_states_{rank}.pkl" for rank in ranks)
            assert ckpt.notes == [f"left behind: {left}"]
            assert ckpt.refused == []


def test_trainers_state_and_scheduler_are_extra(
    framework_directories: Path, tmp_path: Path
) -> None:
    path = inner(sample(framework_directories, "trainer_ddp_w2"))
    with ckptmap.open(path) as ckpt:
        state = json.loads((path / "trainer_state.json").read_text())
        assert state["global_step"] == 2
        assert ckpt.extra["trainer_state"] == state
        assert ckpt.extra["scheduler"] == torch.load(path / "scheduler.pt", weights_only=True)
        assert ckpt.notes == ["left behind: rng_state_0.pth, rng_state_1.pth, training_args.bin"]
    ckptmap.convert(path, tmp_path / "out.pt", to="full")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    assert saved["extra"]["trainer_state"] == state
    plan = ckptmap.plan(path, "hf")
    assert {"optimizer", "scheduler", "trainer_state"} <= set(plan.dropped)


def test_what_verl_keeps_beside(framework_directories: Path) -> None:
    path = inner(sample(framework_directories, "verl_w2"))
    with ckptmap.open(path) as ckpt:
        saved = torch.load(path / "extra_state_world_size_2_rank_0.pt", weights_only=False)
        assert ckpt.extra["extra_state"] == {"lr_scheduler": saved["lr_scheduler"]}
        assert ckpt.extra["fsdp_config"] == {"FSDP_version": 2, "world_size": 2}
        note = "left behind: rng of extra_state_world_size_2_rank_0.pt and 1 more"
        assert ckpt.notes == [note]


def test_what_lightning_keeps_beside(copied: Any, tmp_path: Path) -> None:
    """What its one-file form has at the top lies in meta.pt where the model is sharded."""
    path = copied("lightning_w2")
    saved = torch.load(path / "meta.pt", weights_only=True)
    seen = saved.pop("seen")
    ckptmap.convert(path, tmp_path / "out.pt", to="full")
    written = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same(written["extra"].pop("seen"), seen, "seen")
    assert written["extra"] == saved
    torch.save({**saved, "hyper_parameters": {"of": Sampler()}}, path / "meta.pt")
    with ckptmap.open(path) as ckpt:
        assert ckpt.extra["global_step"] == 2 and "hyper_parameters" not in ckpt.extra
        assert ckpt.notes == ["left behind: hyper_parameters of meta.pt"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_optimizers_of_lightning_are_nobodys_one(tmp_path: Path) -> None:
    """They go along as they are: neither is taken for the state of all weights."""
    from torch.distributed.checkpoint.state_dict_saver import save

    groups = [{"lr": 0.1, "params": ["w"]}]
    state = {"state": {"w": {"momentum_buffer": torch.ones(3)}}, "param_groups": groups}
    shards = {"net": {"w": torch.zeros(3)}, "optimizer_0": state, "optimizer_1": state}
    save(shards, checkpoint_id=tmp_path / "gan", no_dist=True)
    torch.save({"step": 7}, tmp_path / "gan" / "meta.pt")
    with ckptmap.open(tmp_path / "gan") as ckpt:
        assert list(ckpt) == ["w"] and ckpt.optimizer == {} and ckpt.extra["step"] == 7
        assert [path[0] for path in ckpt.other] == ["optimizer_0", "optimizer_1"]


def test_weights_that_are_there_twice_are_compared(copied: Any, tmp_path: Path) -> None:
    path = copied("trainer_fsdp_full_w2")
    with ckptmap.open(path) as ckpt:
        twice = [note for note in ckpt.notes if "twice" in note]
        assert twice == [
            "the weights are there twice: pytorch_model_fsdp.bin is used, and 21 tensors of "
            "model.safetensors are compared with it"
        ]
    ckptmap.convert(path, tmp_path / "good", to="hf")
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"model\.safetensors"):
        ckptmap.convert(path, tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize(
    ("setup", "kind", "world_size"),
    [
        ("accelerate", "SHARDED_STATE_DICT", 3),
        ("accelerate-full", "FULL_STATE_DICT", None),
    ],
)
def test_accelerate_loads_what_is_written(
    setup: str, kind: str, world_size: int | None, framework_directories: Path, tmp_path: Path
) -> None:
    """load_state of FSDP1 and FSDP2, at two ranks, of a run of one process: custom objects,
    schedulers and the count of steps as well."""
    name = "accelerate_w1" if world_size else "accelerate_bin_w2"
    order = {} if name not in BY_INDEX else {"param_order": accelerates_order()}
    plan = ckptmap.plan(framework_directories / name, setup, world_size=world_size, **order)
    plan.execute(tmp_path / "out")
    assert not plan.dropped and not any("left behind" in note for note in plan.notes)
    said = "random states: rank 0 keeps its own, ranks 1 to 2 begin with fresh ones"
    assert (said in plan.notes) == bool(world_size)
    truth = str(framework_directories / f"{name}.truth")
    args = ["accelerate", str(tmp_path / "out"), truth, kind]
    done = run_ranks("tests.ranks.directories", 2, args)
    assert "fsdp1: 44 weights, 41 states" in done[0].stdout
    assert "fsdp2: 44 weights, 41 states" in done[0].stdout


def accelerates_order() -> list[list[str]]:
    """The parameters of the tiny model, as its optimizer has them."""
    from tests.corpus.models import optimizer_for, tiny

    model = tiny()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer_for(model).param_groups
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


def test_files_go_along_to_the_byte(copied: Any, tmp_path: Path) -> None:
    """Of classes that nobody here calls, too: an older accelerate pickles the sampler itself."""
    from accelerate.data_loader import SeedableRandomSampler

    path = copied("accelerate_bin_w2")
    torch.save(SeedableRandomSampler(range(8), data_seed=5), path / "sampler_1.bin")
    torch.save({"_num_yielded": 3, "seen": {1, 2}}, path / "dl_state_dict.bin")
    torch.save({"shadow": torch.ones(700, 1024), "of": Sampler()}, path / "custom_checkpoint_1.pkl")
    for to in ("accelerate", "accelerate-full"):
        ckptmap.convert(path, tmp_path / to, to=to)
        along = {file.name for file in (tmp_path / to).iterdir() if file.is_file()}
        along -= {"pytorch_model_fsdp.bin", "optimizer.bin", "ckptmap.manifest.json"}
        assert along == {
            "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl", "dl_state_dict.bin",
            "random_states_0.pkl", "random_states_1.pkl", "sampler_1.bin", "scheduler.bin",
            "scheduler_1.bin",
        }  # fmt: skip
        for name in along:
            assert (tmp_path / to / name).read_bytes() == (path / name).read_bytes(), name
    assert ckptmap.verify(tmp_path / "accelerate", against=path).ok
    notes = ckptmap.plan(path, "accelerate", world_size=1).notes
    assert any("dl_state_dict: counts what each of 2 ranks had drawn" in note for note in notes)
    with (tmp_path / "accelerate" / "custom_checkpoint_1.pkl").open("r+b") as stream:
        stream.seek(2_000_000)
        stream.write(b"\1")
    problems = ckptmap.verify(tmp_path / "accelerate").problems
    assert problems == ("custom_checkpoint_1.pkl: is not the file that was carried over",)
    plan = ckptmap.plan(path, "accelerate", drop=("custom_checkpoint_1", "scheduler*"))
    assert {"custom_checkpoint_1.pkl", "scheduler.bin"}.isdisjoint(plan.carried)
    (tmp_path / "secret").write_text("x")
    (path / "random_states_1.pkl").unlink()
    (path / "random_states_1.pkl").symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError, match=r"random_states_1\.pkl' leads out of the directory"):
        ckptmap.plan(path, "accelerate")


def test_extra_values_of_others_become_accelerates_files(
    framework_directories: Path, tmp_path: Path
) -> None:
    """By way of one torch.save file, tensors among them; and a Trainer's scheduler."""
    path = framework_directories / "accelerate_bin_w2"
    ckptmap.convert(path, tmp_path / "one.pt", to="full")
    ckptmap.convert(tmp_path / "one.pt", tmp_path / "out", to="accelerate", world_size=3)
    for name in ("custom_checkpoint_0.pkl", "scheduler.bin", "scheduler_1.bin"):
        mine, theirs = (torch.load(p / name) for p in (tmp_path / "out", path))
        if name.startswith("custom"):
            assert_same(mine.pop("window"), theirs.pop("window"), name)
        assert mine == theirs, name
    step = inner(sample(framework_directories, "trainer_ddp_w2"))
    ckptmap.convert(step, tmp_path / "from", to="accelerate")
    assert (tmp_path / "from" / "scheduler.bin").read_bytes() == (
        step / "scheduler.pt"
    ).read_bytes()


def test_trainers_files_go_along(framework_directories: Path, tmp_path: Path) -> None:
    step = inner(sample(framework_directories, "trainer_ddp_w2"))
    report = ckptmap.convert(step, tmp_path / "out", to="trainer")
    assert not report.dropped and not any("left behind" in note for note in report.notes)
    for name in ("rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "training_args.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (step / name).read_bytes(), name


def test_the_full_form_has_accelerates_names_and_keys(
    framework_directories: Path, tmp_path: Path
) -> None:
    """As its own files: the same names, and in them the same keys in the same dicts."""
    own = shutil.copytree(framework_directories / "accelerate_full_w2", tmp_path / "fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0).state_dict()
    torch.save(scaler, own / "scaler.pt")  # an fp16 run cannot be resumed without it
    for to in ("accelerate-full", "accelerate"):
        ckptmap.convert(own, tmp_path / to, to=to)
        assert torch.load(tmp_path / to / "scaler.pt", weights_only=True) == scaler
    (tmp_path / "accelerate-full").rename(tmp_path / "out")
    for name in ("pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin"):
        mine, theirs = (torch.load(p / name, weights_only=True) for p in (tmp_path / "out", own))
        assert set(mine) == set(theirs)
        if name == "optimizer.bin":
            assert mine["param_groups"] == theirs["param_groups"]
            assert set(mine["state"]) == set(theirs["state"])
    assert ckptmap.verify(tmp_path / "out", against=own).ok


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of a Trainer without a break; checkpoint-2 is there as well."""
    out = tmp_path_factory.mktemp("trainer") / "whole"
    live("run", out)
    return out


def test_trainer_goes_on_from_what_is_written(whole_run: Path, tmp_path: Path) -> None:
    """By way of an FSDP2 directory of three ranks; the next losses are those of the whole run."""
    whole, again = whole_run, tmp_path / "again"
    ckptmap.convert(whole / "checkpoint-2", tmp_path / "dcp", to="fsdp2", world_size=3)
    ckptmap.convert(
        tmp_path / "dcp",
        tmp_path / "trainer",
        to="trainer",
        config_from=str(whole / "checkpoint-2"),
    )
    live("resume", again, tmp_path / "trainer")
    expected = json.loads((whole / "losses.json").read_text())
    found = json.loads((again / "losses.json").read_text())
    assert [entry["step"] for entry in expected] == [1, 2, 3, 4]
    assert found == expected
    with ckptmap.open(whole / "checkpoint-4") as one, ckptmap.open(again / "checkpoint-4") as two:
        for fqn in one:
            assert_same(two[fqn].read(), one[fqn].read(), fqn)


def test_trainer_goes_on_from_other_groups(whole_run: Path, tmp_path: Path) -> None:
    """Its loader counts parameters: another loop's groups and order are put right before."""
    whole, again = whole_run, tmp_path / "again"
    step = whole / "checkpoint-2"
    live("regroup", step, tmp_path / "other.pt")
    plan = ckptmap.plan(tmp_path / "other.pt", "trainer", config_from=str(step))
    note = "optimizer: parameters put into the 2 groups and the order of trainer"
    assert note in plan.notes
    plan.execute(tmp_path / "trainer")
    mine, theirs = (
        torch.load(p / "optimizer.pt", weights_only=True) for p in (tmp_path / "trainer", step)
    )
    for one, other in zip(mine["param_groups"], theirs["param_groups"], strict=True):
        assert {k: v for k, v in one.items() if k != "param_names"} == other
    for index, state in theirs["state"].items():
        for name, value in state.items():
            assert_same(mine["state"][index][name], value, f"{index} {name}")
    live("resume", again, tmp_path / "trainer")
    assert (again / "losses.json").read_text() == (whole / "losses.json").read_text()


def other_groups(folder: Path, path: Path, **options: Any) -> Path:
    """A Trainer's weights, trained on in one group of another loop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(inner(sample(folder, "trainer_w1")))
    optimizer = torch.optim.AdamW(model.named_parameters(), **options)
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    torch.save({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}, path)
    return path


def test_one_group_becomes_two(framework_directories: Path, tmp_path: Path) -> None:
    """Each with the hyper-parameters of the one."""
    src = other_groups(framework_directories, tmp_path / "src.pt", lr=0.25, weight_decay=0.0)
    config = str(inner(sample(framework_directories, "trainer_w1")))
    ckptmap.convert(src, tmp_path / "out", to="trainer", config_from=config)
    groups = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["param_groups"]
    assert [group["lr"] for group in groups] == [0.25, 0.25]
    assert all("norm" in name for name in groups[1]["param_names"])
    assert len(groups[1]["param_names"]) == 5 and len(groups[0]["param_names"]) == 16
    kept = ckptmap.plan(src, "trainer")
    assert any("no config.json is there" in note for note in kept.notes)


def test_groups_that_trainer_cannot_have(framework_directories: Path, tmp_path: Path) -> None:
    src = other_groups(framework_directories, tmp_path / "src.pt")
    state = torch.load(src)
    (group,) = state["optimizer"]["param_groups"]
    parts = [{**group, "lr": lr, "params": [], "param_names": []} for lr in (0.1, 0.2)]
    for index, name in zip(group["params"], group["param_names"], strict=True):
        parts[index % 2]["params"].append(index)
        parts[index % 2]["param_names"].append(name)
    state["optimizer"]["param_groups"] = parts
    torch.save(state, src)
    config = str(inner(sample(framework_directories, "trainer_w1")))
    with pytest.raises(
        PlanError, match=r"was trained with lr 0\.[12], .* puts both into one group"
    ) as caught:
        ckptmap.plan(src, "trainer", config_from=config)
    assert caught.value.code == "CKM207"


def live(*args: str | Path) -> None:
    run_alone("tests.ranks.directories", list(map(str, args)))


def test_weights_alone_become_a_new_run(framework_directories: Path, tmp_path: Path) -> None:
    case = sample(framework_directories, "trainer_w1")
    ckptmap.convert(inner(case), tmp_path / "hf", to="hf")
    ckptmap.convert(tmp_path / "hf", tmp_path / "trainer", to="trainer")
    with ckptmap.open(tmp_path / "trainer") as ckpt:
        assert ckpt.setup == "trainer"
        assert ckpt.extra["trainer_state"]["global_step"] == 0
        for fqn, expected in case.truth.items():
            assert_same(ckpt[fqn].read(), expected, fqn)
    assert ckptmap.verify(tmp_path / "trainer").ok


@pytest.mark.parametrize("setup", ["accelerate", "trainer"])
def test_casts_go_into_directories(setup: str, framework_directories: Path, tmp_path: Path) -> None:
    path = inner(sample(framework_directories, "trainer_w1"))
    ckptmap.convert(path, tmp_path / "out", to=f"{setup}-bf16")
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert ckpt.setup == setup
        lazy = ckpt["model.layers.0.mlp.up_proj.weight"]
        assert (lazy.dtype, lazy.shape) == ("bfloat16", (128, 64))
    assert ckptmap.verify(tmp_path / "out").ok


def test_a_root_of_ones_own_is_refused(framework_directories: Path) -> None:
    with pytest.raises(PlanError, match="the setup accelerate has a root of its own"):
        ckptmap.plan(framework_directories / "accelerate_full_w2", "accelerate", root="net")


# ------------------------------------------------------------------------------- parents


def test_moments_beside_shards_of_torch_save(tmp_path: Path) -> None:
    """A tensor larger than a shard stands before its place: the order of shards is no model's."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    model[1].double()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    save_torch_state_dict(
        model.state_dict(), tmp_path, safe_serialization=False, max_shard_size=500
    )
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text("{}")
    with ckptmap.open(tmp_path) as ckpt:
        assert list(ckpt) == ["1.weight", "0.weight", "2.weight"] and ckpt.optimizer_by_index
        assert ckptmap.plan(ckpt, to="fsdp2").unresolved[0].key == "optimizer"
    order = [[name for name, _ in model.named_parameters()]]
    with ckptmap.open(tmp_path, param_order=order) as ckpt:
        for name, parameter in model.named_parameters():
            found = ckpt.optimizer[name]["exp_avg"].read()
            assert torch.equal(found, optimizer.state[parameter]["exp_avg"])


def test_the_only_checkpoint_below_is_opened_and_named(
    framework_directories: Path, tmp_path: Path
) -> None:
    with ckptmap.open(framework_directories / "trainer_w1") as ckpt:
        assert ckpt.path.endswith("checkpoint-2")
        assert ckpt.notes[0] == "opened checkpoint-2, the only checkpoint in the directory"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "global_step_2").symlink_to(framework_directories / "verl_w2")
    with ckptmap.open(tmp_path / "run") as ckpt:
        assert ckpt.notes[0] == "opened global_step_2/actor, the only checkpoint in the directory"


def test_several_checkpoints_below_are_listed(framework_directories: Path, tmp_path: Path) -> None:
    source = framework_directories / "trainer_w1" / "checkpoint-2"
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}").symlink_to(source)
    with pytest.raises(
        SourceError, match=r"is not a checkpoint, but holds some: checkpoint-2, checkpoint-10"
    ) as caught:
        ckptmap.open(tmp_path)
    assert caught.value.code == "CKM111"


def test_several_models_are_refused_with_a_way_on(framework_directories: Path) -> None:
    path = framework_directories / "accelerate_two_models_w1"
    with pytest.raises(
        SourceError, match=r"expected one model, found several, model_1\.safetensors among"
    ) as caught:
        ckptmap.open(path)
    assert caught.value.code == "CKM205"
    way = caught.value.hint.rpartition(": ")[2]
    with ckptmap.open(way) as ckpt:
        assert set(ckpt) == {"weight", "bias"}


# ------------------------------------------------------------------------------- broken sets


class Sampler:
    """Of no class that torch knows, as accelerate's sampler.bin may be."""

    def __init__(self) -> None:
        self.seed = 7


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("/tmp/ckptmap-was-executed",))


def test_foreign_pickles_are_left_behind(copied: Any) -> None:
    path = copied("accelerate_w1")
    torch.save(Sampler(), path / "sampler.bin")
    torch.save({"inner": Sampler(), "epoch": 3}, path / "scheduler.bin")
    (path / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps(Sampler()))
    with ckptmap.open(path) as ckpt:
        left = set(ckpt.notes[0].removeprefix("left behind: ").split(", "))
        assert left == {
            "random_states_0.pkl", "sampler.bin", "inner of scheduler.bin", "custom_checkpoint_0.pkl"
        }  # fmt: skip
        assert set(ckpt.extra) == {"scheduler", "scheduler_1"}
        assert ckpt.extra["scheduler"] == {"epoch": 3}
        assert ckpt.refused == []


def test_a_hostile_scheduler_is_refused(copied: Any) -> None:
    path = copied("accelerate_w1")
    torch.save({"evil": Evil()}, path / "scheduler.bin")
    with pytest.raises(SourceError, match=r"scheduler\.bin.*nothing was run") as caught:
        ckptmap.open(path)
    assert caught.value.code == "CKM106"
    assert not Path("/tmp/ckptmap-was-executed").exists()


def damaged_state(path: Path) -> None:
    (path / "trainer_state.json").write_text("{")


def truncated_scheduler(path: Path) -> None:
    file = path / "scheduler.pt"
    file.write_bytes(file.read_bytes()[:-40])


def empty_scheduler(path: Path) -> None:
    (path / "scheduler.pt").write_bytes(b"")


def two_optimizers(path: Path) -> None:
    shutil.copy(path / "optimizer.bin", path / "optimizer.pt")


def lone_metadata(path: Path) -> None:
    (path / "optimizer.bin").unlink()
    (path / "optimizer_0").mkdir()
    (path / "optimizer_0" / "notes.txt").touch()


@pytest.mark.parametrize(
    ("damage", "says", "code"),
    [
        (damaged_state, r"trainer_state\.json: cannot be read as JSON: line", "CKM103"),
        (truncated_scheduler, r"scheduler\.pt", "CKM104"),
        (empty_scheduler, r"scheduler\.pt: is empty \(0 bytes\): the save did not", "CKM104"),
        (two_optimizers, r"optimizer is stored twice, also as optimizer\.bin", "CKM111"),
        (lone_metadata, r"optimizer_0: expected the optimizer's part .* it holds notes", "CKM111"),
    ],
)
def test_broken_members_are_refused(copied: Any, damage: Any, says: str, code: str) -> None:
    path = copied("trainer_fsdp_full_w2")
    damage(path)
    with pytest.raises(SourceError, match=says) as caught:
        ckptmap.open(path)
    assert caught.value.code == code


def test_a_rank_that_is_missing(copied: Any) -> None:
    path = copied("verl_w2")
    (path / "optim_world_size_2_rank_1.pt").unlink()
    with pytest.raises(SourceError, match="rank 1 of 2 is missing") as caught:
        ckptmap.open(path)
    assert caught.value.code == "CKM110"


def test_roles_of_several_saves(copied: Any) -> None:
    path = copied("verl_w2")
    for rank in (0, 1):
        old = path / f"optim_world_size_2_rank_{rank}.pt"
        old.rename(path / f"optim_world_size_3_rank_{rank}.pt")
    with pytest.raises(
        SourceError, match="expected rank files of one save, found some of 2 and some of 3 ranks"
    ) as caught:
        ckptmap.open(path)
    assert caught.value.code == "CKM110"


def test_the_directory_of_an_adapter_is_not_claimed(copied: Any) -> None:
    path = copied("trainer_w1")
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(CkptmapError, match="adapter without its base weights"):
        ckptmap.open(path)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("LORA", "ckptmap merge BASE"),
        ("LOHA", "merge others with peft: model.merge_and_unload()"),
        ("PREFIX_TUNING", "nothing can be merged: load it beside its base"),
    ],
)
def test_the_next_step_of_an_adapter_is_one_that_works(
    kind: str, step: str, tmp_path: Path
) -> None:
    """It was a command that refuses adapters of other kinds; a soft prompt cannot be merged at all."""
    for folder in (tmp_path / "one", tmp_path / "several" / "default"):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
        torch.save({"w": torch.ones(2)}, folder / "adapter_model.bin")
    for path in (tmp_path / "one", tmp_path / "several"):
        with pytest.raises(CkptmapError, match="base weights") as caught:
            ckptmap.open(path)
        assert step in caught.value.hint
    torch.save({"w": torch.ones(2)}, tmp_path / "base.pt")
    if kind != "LORA":
        with pytest.raises(CkptmapError, match=f"peft_type '{kind}'") as caught:
            ckptmap.merge(tmp_path / "base.pt", tmp_path / "one", tmp_path / "out", to="hf")
        assert step in caught.value.hint


def test_a_plain_hf_directory_is_nobody_elses(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with ckptmap.open(tmp_path) as ckpt:
        assert ckpt.index.container == "hf"


def test_a_changed_copy_is_found_by_diff(framework_directories: Path, copied: Any) -> None:
    """The directory as a whole is what `diff` compares: optimizer state too."""
    path = copied("accelerate_full_w2")
    state = torch.load(path / "optimizer.bin", weights_only=True)
    state["state"]["norm.weight"]["exp_avg"][0] += 1
    torch.save(state, path / "optimizer.bin")
    found = ckptmap.diff(framework_directories / "accelerate_full_w2", path, values=True)
    assert "norm.weight" in str(found)
