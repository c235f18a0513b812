"""`save(only=...)` over a recorded base: small files, and `load` takes both."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ckptmap
from ckptmap.errors import ArgumentError, CkptmapError, LoadError, PlanError, RunError
from tests.corpus.ranks import run_ranks
from tests.support.files import flip_byte_of


def llama(seed: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    ))  # fmt: skip


def adapted(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(7)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    return wrapped, torch.optim.AdamW(trained, lr=0.01)


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        words = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A base that transformers wrote, a LoRA of peft on it, saved after two steps; the next losses."""
    folder = tmp_path_factory.mktemp("only")
    llama(0).save_pretrained(folder / "base")
    model = llama(1)
    ckptmap.load(folder / "base", model)
    model, optimizer = adapted(model)
    train(model, optimizer, 0, 2)
    ckptmap.save(folder / "step-2", model, optimizer, step=2, only="trainable").wait()
    return folder, train(model, optimizer, 2, 4)


def nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_a_lora_run_saves_its_lora(run: tuple[Path, list[float]]) -> None:
    folder, losses = run
    with ckptmap.open(folder / "step-2") as ckpt:
        assert ckpt and all(".lora_" in fqn for fqn in ckpt)
        assert f"the others are those of {folder / 'base'}" in ckpt.notes[-1]
        weights = sum(info.nbytes for info in ckpt.infos().values())
    assert weights < 0.1 * nbytes(folder / "base")
    model, optimizer = adapted(llama(3))
    report = ckptmap.load(folder / "step-2", model, optimizer, exact=True)
    assert report.inexact == () and report.missing == report.left == ()
    assert train(model, optimizer, 2, 4) == losses


def test_the_next_save_records_the_same_base(run: tuple[Path, list[float]], tmp_path: Path) -> None:
    """Also one of a base that was moved: its new place is recorded, and the digest stays."""
    folder, _ = run
    shutil.copytree(folder / "base", tmp_path / "moved")
    model, optimizer = adapted(llama(3))
    ckptmap.load(folder / "step-2", model, optimizer, base=tmp_path / "moved")
    ckptmap.save(tmp_path / "step-3", model, optimizer, only=["*.lora_*"]).wait()
    records = []
    for path in (folder / "step-2", tmp_path / "step-3"):
        with ckptmap.open(path) as ckpt:
            settings: Any = ckpt.extra["ckptmap"]
            records.append(settings["base"][""])
    assert records[0]["digest"] == records[1]["digest"] and len(records[0]["digest"]) > 30
    assert records[1]["path"] == str(tmp_path / "moved")


def test_another_base_is_refused(run: tuple[Path, list[float]], tmp_path: Path) -> None:
    """One of the same headers with other values, one that is gone, one with a flipped byte."""
    folder, _ = run
    llama(5).save_pretrained(tmp_path / "other")
    model, _ = adapted(llama(3))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(LoadError, match=r"is not the base of .*expected files:\w+, got files:\w+"):
        ckptmap.load(folder / "step-2", model, base=tmp_path / "other")
    with pytest.raises(LoadError, match="its base cannot be opened") as gone:
        ckptmap.load(folder / "step-2", model, base=tmp_path / "gone")
    assert gone.value.code == "CKM521" and "base=PATH" in gone.value.hint
    shutil.copytree(folder / "base", tmp_path / "flipped")
    flip_byte_of(tmp_path / "flipped", "model.norm.weight")
    with pytest.raises(LoadError, match="is not the base of"):
        ckptmap.load(folder / "step-2", model, base=tmp_path / "flipped")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ArgumentError, match="records 0 bases"):
        ckptmap.load(folder / "base", llama(3), base=tmp_path / "other")


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    made[0].requires_grad_(False)
    return made


def test_a_base_that_nobody_knows(tmp_path: Path) -> None:
    """Weights that `load` did not load; a base that was written anew since."""
    model = net(0)
    with pytest.raises(ArgumentError, match=r"no one checkpoint is known.*0\.weight, 0\.bias"):
        ckptmap.save(tmp_path / "c", model, only="trainable")
    with pytest.raises(ArgumentError, match=r"only='\*\.lora': no tensor"):
        ckptmap.save(tmp_path / "c", model, only="*.lora")
    with pytest.raises(ArgumentError, match=r"only=\[\]: names no weight"):
        ckptmap.save(tmp_path / "c", model, only=[])
    with pytest.raises(ArgumentError, match="base: expected only= with it"):
        ckptmap.save(tmp_path / "c", model, base=tmp_path / "base")
    ckptmap.save(tmp_path / "base", model).wait()
    ckptmap.load(tmp_path / "base", model)
    ckptmap.save(tmp_path / "base", net(1), overwrite=True).wait()
    with pytest.raises(RunError, match="changed while it was read"):
        ckptmap.save(tmp_path / "c", model, only="trainable")
    assert not (tmp_path / "c").exists()


def test_buffers_and_several_models(tmp_path: Path) -> None:
    """Buffers are saved with what is trained. Each of several models has a base of its own."""
    for seed in (0, 1):
        ckptmap.save(tmp_path / f"base{seed}", net(seed)).wait()
    models = {"a": net(5), "b": net(6)}
    for seed, model in enumerate(models.values()):
        ckptmap.load(tmp_path / f"base{seed}", model)
        model(torch.randn(8, 4))
        with torch.no_grad():
            model[2].bias.fill_(seed + 3)  # type: ignore[index, union-attr, operator]
    ckptmap.save(tmp_path / "c", models, only="trainable").wait()
    with ckptmap.open(tmp_path / "c") as ckpt:
        assert "a.1.running_mean" in ckpt and "a.0.weight" not in ckpt
    again = {"a": net(8), "b": net(9)}
    ckptmap.load(tmp_path / "c", again)
    for name, model in models.items():
        theirs = again[name].state_dict()
        assert all(torch.equal(one, theirs[key]) for key, one in model.state_dict().items())


def test_a_given_base(tmp_path: Path) -> None:
    """A model that something else has loaded: its base is named, and recorded with its digest."""
    model = net(0)
    ckptmap.save(tmp_path / "base", model).wait()
    with ckptmap.CheckpointManager(tmp_path / "runs") as manager:
        manager.save(1, model, only="trainable", base=tmp_path / "base")
    again = net(2)
    report = ckptmap.CheckpointManager(tmp_path / "runs").restore(again)
    assert report is not None and report.step == 1
    assert torch.equal(again[0].weight, model[0].weight)  # type: ignore[index, arg-type]
    other = net(3)
    dropped = ckptmap.load(tmp_path / "runs/step-1", other, drop=["0.*"], strict=False)
    assert dropped.missing == ("0.weight", "0.bias")
    assert torch.equal(other[0].weight, net(3)[0].weight)  # type: ignore[index, arg-type]
    ckptmap.save(tmp_path / "other", nn.ModuleDict({"0": nn.Linear(4, 3)})).wait()
    for wrong in (tmp_path / "other", tmp_path / "runs/step-1"):
        with pytest.raises(
            ArgumentError, match=r"has not 2 of the 2 weights .*: 0\.weight, 0\.bias"
        ):
            ckptmap.save(tmp_path / "c", model, only="trainable", base=wrong)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(CkptmapError, match="its base cannot be opened"):
        ckptmap.CheckpointManager(tmp_path / "runs").restore(again)


def trained(frozen: int, folder: Path, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """A model that is loaded from a folder, and makes one step with one layer frozen, and then its last
    layer."""
    model: Any = net(seed)
    model[0].requires_grad_(frozen != 0)
    model[2].requires_grad_(frozen != 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckptmap.load(folder, model)
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[2].requires_grad_(False)
    return model, optimizer


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[key]) for key, value in one.state_dict().items())


def test_what_was_trained_and_is_frozen_now(tmp_path: Path) -> None:
    """No base has its values: it was stepped in this run, or in that of the checkpoint that was loaded."""
    ckptmap.save(tmp_path / "base", net(0)).wait()
    model, optimizer = trained(0, tmp_path / "base", seed=1)
    notes = ckptmap.save(tmp_path / "a", model, optimizer, only="1.*").wait()
    assert any("only= does not name them: 2 weights: 2.weight, 2.bias" in note for note in notes)
    (note,) = ckptmap.save(tmp_path / "d", net(0), only="0.*", base=tmp_path / "base").wait()
    assert (
        note
        == "4 that require gradients are not saved, as only= asks: 1.weight, 1.bias, 2.weight, 2.bias"
    )
    second, _ = trained(2, tmp_path / "a", seed=2)
    ckptmap.save(tmp_path / "b", second, only="trainable").wait()
    for path, saved in (("a", model), ("b", second)):
        again = net(3)
        ckptmap.load(tmp_path / path, again)
        assert same(saved, again), path


def test_a_weight_and_its_bias_of_two_checkpoints(tmp_path: Path) -> None:
    """The base that has the bias alone is not taken for that of the weight."""
    alone = nn.ModuleDict({"0": nn.Module()})
    alone["0"].register_parameter("bias", nn.Parameter(torch.ones(4)))
    ckptmap.save(tmp_path / "bias", alone).wait()
    model = net(1)
    ckptmap.load(tmp_path / "bias", model, strict=False)
    with pytest.raises(ArgumentError, match=r"known that 1 of the other weights.*: 0\.weight"):
        ckptmap.save(tmp_path / "c", model, only="trainable")


def test_other_names_are_those_of_the_base_too(tmp_path: Path) -> None:
    """A prefix or a pattern of `load` changes the names of the part and of its base, and a save after it
    records both changes. One that neither has is refused."""
    ckptmap.save(tmp_path / "base", net(0)).wait()
    model, _ = trained(0, tmp_path / "base", seed=1)
    ckptmap.save(tmp_path / "a", model, only="trainable").wait()
    inside = nn.ModuleDict({"student": net(2)})
    with pytest.raises(LoadError, match="keys do not match the model") as no:
        ckptmap.load(tmp_path / "a", inside)
    assert "load it with add_prefix='student'" in no.value.hint
    with pytest.raises(PlanError, match="matches no name"):
        ckptmap.load(tmp_path / "a", inside, add_prefix="student", rename="7.{x}=8.{x}")
    ckptmap.load(tmp_path / "a", inside, add_prefix="student")
    assert same(model, inside["student"])

    for name, param in inside.named_parameters():
        param.requires_grad_(name == "student.2.bias")
    ckptmap.save(tmp_path / "b", inside, only="trainable").wait()
    with ckptmap.open(tmp_path / "b") as ckpt:
        assert "student.0.weight" not in ckpt
    again = net(3)
    ckptmap.load(tmp_path / "b", again, strip_prefix="student")
    assert same(model, again)
    only_of_the_base = nn.ModuleDict({"first": again[0], "1": again[1], "2": again[2]})
    ckptmap.load(tmp_path / "a", only_of_the_base, rename="0.{x}=first.{x}")
    assert same(model, again)


def test_a_base_below_a_root(tmp_path: Path) -> None:
    """It is opened by the root again, by a save that compares with it and by `load`."""
    whole = {name: net(seed).state_dict() for seed, name in enumerate(("student", "teacher"))}
    torch.save(whole, tmp_path / "both.pt")
    model = nn.ModuleDict({"inner": net(5)})
    with ckptmap.open(tmp_path / "both.pt", root="student", add_prefix="inner") as base:
        ckptmap.load(base, model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.requires_grad_(name == "inner.2.bias").add_(param.requires_grad)
    ckptmap.save(tmp_path / "a", model, only="trainable").wait()
    with ckptmap.open(tmp_path / "a") as ckpt:
        assert "inner.2.bias" in ckpt and "inner.0.weight" not in ckpt
    again = net(6)
    ckptmap.load(tmp_path / "a", again, strip_prefix="inner")
    assert same(model["inner"], again)


@pytest.mark.parametrize("together", [True, False])
def test_one_of_several_models_over_a_base(together: bool, tmp_path: Path) -> None:
    models = {"a": net(0), "b": net(1)}
    if together:
        ckptmap.save(tmp_path / "base", models).wait()
        ckptmap.load(tmp_path / "base", models)
    for name, model in {} if together else models.items():
        ckptmap.save(tmp_path / f"base-{name}", model).wait()
        ckptmap.load(tmp_path / f"base-{name}", model)
    for model in models.values():
        for name, param in model.named_parameters():
            param.requires_grad_(name == "2.bias")
    ckptmap.save(tmp_path / "c", models, only="trainable").wait()
    for name, model in models.items():
        again, inside = net(5), nn.ModuleDict({"x": net(6)})
        with ckptmap.open(tmp_path / "c", root=name) as ckpt:
            ckptmap.load(ckpt, again)
            assert same(model, again) and "0.weight" not in ckpt
            ckptmap.load(ckpt, inside, add_prefix="x")
            assert same(model, inside["x"])


def test_a_tree_of_runs_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is found from the checkpoint's own directory where nothing is at its recorded path any more,
    and a manager keeps it; a relative path is recorded as an absolute one."""
    (tmp_path / "tree").mkdir()
    monkeypatch.chdir(tmp_path / "tree")
    model = net(1)
    with ckptmap.CheckpointManager("runs", keep=1) as manager:
        manager.save(1, net(0))
        manager.wait()
        ckptmap.load("runs/step-1", model)
        manager.save(2, model, only="trainable")
    monkeypatch.chdir(tmp_path)
    assert ckptmap.load(tmp_path / "tree/runs/step-2", net(2)).missing == ()
    (tmp_path / "tree").rename(tmp_path / "elsewhere")
    again = net(3)
    with ckptmap.CheckpointManager("elsewhere/runs", keep=1) as manager:
        manager.restore(again)
        assert same(model, again)
        for step in (3, 4):
            manager.save(step, again, only="trainable")
        manager.wait()
        assert manager.steps() == [1, 4]
    last = net(5)
    ckptmap.load("elsewhere/runs/step-4", last)
    assert same(model, last)
    shutil.copytree("elsewhere/runs/step-4", tmp_path / "alone")
    shutil.rmtree("elsewhere")
    with pytest.raises(LoadError, match="its base cannot be opened"):
        ckptmap.load(tmp_path / "alone", last)


def test_a_base_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    """By a save over it, or by the rules of a manager, as long as a checkpoint needs it."""
    with ckptmap.CheckpointManager(tmp_path, keep=1) as manager:
        manager.save(1, net(0))
    model = net(1)
    with ckptmap.CheckpointManager(tmp_path, keep=1) as manager:
        manager.restore(model)
        with pytest.raises(ArgumentError, match="is the base of the weights that are left out"):
            manager.save(1, model, only="trainable")
        for step in (2, 3):
            manager.save(step, model, only="trainable")
        manager.wait()
        assert manager.steps() == [1, 3]
        again = net(2)
        manager.restore(again)
        assert same(model, again)
        manager.save(4, model)
        manager.wait()
        assert manager.steps() == [4]


def test_ranks(tmp_path: Path) -> None:
    """Two ranks save the trained layer of an FSDP2 model, and load it: tests/ranks/only_trained.py; one
    process loads it, too."""
    run_ranks("tests.ranks.only_trained", 2, [str(tmp_path)], timeout=240)
    again = net(4)
    report = ckptmap.load(tmp_path / "c", again)
    assert report.missing == ()
    assert torch.equal(again[0].weight, net(0)[0].weight)  # type: ignore[index, arg-type]


def test_a_pattern_that_names_nothing_is_refused(tmp_path: Path) -> None:
    model = net(0)
    ckptmap.save(tmp_path / "base", model).wait()
    ckptmap.load(tmp_path / "base", model)
    for only in ("2.wieght", ["0.*", "2.wieght"], ["trainable", "2.wieght"]):
        with pytest.raises(ArgumentError, match=r"only='2\.wieght': no tensor .*'2\.weight'"):
            ckptmap.save(tmp_path / "c", model, only=only)
    assert not (tmp_path / "c").exists()
    ckptmap.save(tmp_path / "c", model, only="{1..2}.*").wait()  # a range, as `inspect` prints it
    with ckptmap.open(tmp_path / "c") as ckpt:
        assert {name[0] for name in ckpt} == {"1", "2"}
