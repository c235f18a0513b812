"""The integrations: their examples run unchanged, and each is compared with the framework alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback

import ckptmap
from ckptmap.errors import CkptmapError
from ckptmap.integrations.accelerate import install
from ckptmap.integrations.lightning import hooks
from ckptmap.integrations.transformers import callback, export, resume
from ckptmap.live.load.continuation import NO_STREAMS
from ckptmap.live.optimizer.unwrap import unwrapped
from tests.corpus.ranks import ROOT, run_alone, run_ranks
from tests.support.mapping_configs import TINY
from tests.support.resume_model import net, train

EXAMPLES = {
    "accelerate_fsdp2": "plain names, and a step of 0.001",
    "dcp_planners": "outputs differ by 0.0",
}
ALONE = {
    "lightning_hooks": "the same codes as torchao's to_nf4",
    "transformers_trainer": "resumed at step 3, exported after steps 4 and 6",
}


def places() -> str:
    folders = [ROOT, ROOT / "examples", ROOT / "examples" / "integrations"]
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_on_two_ranks(name: str, tmp_path: Path) -> None:
    outputs = run_ranks(name, 2, [str(tmp_path / "out")], env={"PYTHONPATH": places()})
    assert EXAMPLES[name] in outputs[0].stdout, outputs[0].stdout


@pytest.mark.parametrize("name", ALONE)
def test_example_alone(name: str, tmp_path: Path) -> None:
    done = run_alone(name, [str(tmp_path / "out")], timeout=240, env={"PYTHONPATH": places()})
    assert ALONE[name] in done.stdout, done.stdout


# ------------------------------------------------------------------ torch.distributed.checkpoint


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planners") / "saved"
    run_ranks("tests.ranks.integrations_dcp", 2, ["save", str(path)], timeout=240)
    return path


@pytest.mark.parametrize("world", [1, 3, 4])
def test_dcp_reshards_nf4_and_low_bit_state(world: int, planned: Path) -> None:
    """Codes and moments, in place, on other numbers of ranks (and, when saved, on the same); 3
    cannot cut NF4 and is dense."""
    run_ranks("tests.ranks.integrations_dcp", world, ["load", str(planned)], timeout=240)


def test_what_the_planner_saves_is_a_checkpoint_like_ours(planned: Path) -> None:
    with ckptmap.open(planned) as ckpt:
        assert ckpt["base.weight"].encoding == "nf4"
        assert ckpt.optimizer["up.weight"]["exp_avg"].encoding == "adam8bit"
        mixed: Any = ckpt.optimizer["odd.weight"]["exp_avg"]
        assert mixed.encoding == "adam8bit" or mixed.dtype == "float32"
        assert ckpt.extra["step"] == 7


# ------------------------------------------------------------------ accelerate


def prepared(seed: int) -> tuple[Any, Any, Any, Any]:
    made = Accelerator(cpu=True)
    made.free_memory()
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (1 + seed))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return (made, *made.prepare(model, optimizer, scheduler))


def test_accelerate_loads_what_it_saved(tmp_path: Path) -> None:
    """Scheduler and random states stay accelerate's own."""
    made, model, optimizer, scheduler = prepared(0)
    train(model, optimizer, 0, 2)
    scheduler.step()
    made.save_state(str(tmp_path / "out"))
    drawn = torch.rand(3)
    again, other, theirs, their_scheduler = prepared(1)
    with install(again) as handle:
        again.load_state(str(tmp_path / "out"))
    assert torch.equal(torch.rand(3), drawn)
    assert their_scheduler.state_dict()["last_epoch"] == scheduler.state_dict()["last_epoch"]
    assert "model" in handle.reports and not handle.reports["model"].missing
    assert train(other, theirs, 2, 4) == train(model, optimizer, 2, 4)


def test_accelerate_loads_what_somebody_else_saved(tmp_path: Path) -> None:
    """A compiled run's ckptmap.save, and a bare torch.save of DDP's names."""
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 0, 2)
    ckptmap.save(tmp_path / "ours", torch.compile(model), optimizer).wait()
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    (tmp_path / "bare").mkdir()
    torch.save(state, tmp_path / "bare" / "pytorch_model.bin")
    for folder in ("ours", "bare"):
        made, other, _, _ = prepared(1)
        with install(made):
            made.load_state(str(tmp_path / folder))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two), folder


def test_accelerate_saves_plain_names(tmp_path: Path) -> None:
    made, model, _, _ = prepared(0)
    made._models[0] = torch.compile(model, backend="eager")
    with install(made):
        made.save_state(str(tmp_path / "out"), safe_serialization=False)
    names = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert set(names) == set(net(0).state_dict())


def test_accelerate_is_itself_again() -> None:
    made, *_ = prepared(0)
    handle = install(made)
    assert "load_state" in made.__dict__ and len(made._load_model_state_pre_hook) == 1
    handle.remove()
    assert "load_state" not in made.__dict__ and not made._load_model_state_pre_hook
    assert not made._save_model_state_pre_hook


def two(seed: int, swapped: bool = False) -> tuple[Any, list[Any], list[Any]]:
    """Two models of different words; `swapped`: the optimizers in the other order."""
    made = Accelerator(cpu=True)
    made.free_memory()
    models: list[Any] = [net(seed), net(seed + 1)]
    models[1].layers[0] = torch.nn.Identity()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    prepared_ = made.prepare(*models, *(reversed(optimizers) if swapped else optimizers))
    return made, list(prepared_[:2]), list(prepared_[2:])


@pytest.mark.parametrize("swapped", [False, True])
def test_accelerate_with_two_models(swapped: bool, tmp_path: Path) -> None:
    """Files are told by number, an optimizer by whose parameters it has."""
    made, models, optimizers = two(0, swapped)
    pairs = list(zip(models, reversed(optimizers) if swapped else optimizers, strict=True))
    for model, optimizer in pairs:
        train(model, optimizer, 0, 2)
    made.save_state(str(tmp_path / "out"))
    want = [train(model, optimizer, 2, 4) for model, optimizer in pairs]
    again, others, theirs = two(5, swapped)
    with install(again) as handle:
        again.load_state(str(tmp_path / "out"))
    assert set(handle.reports) == {"model", "model_1"}
    assert all(not report.missing for report in handle.reports.values())
    pairs = list(zip(others, reversed(theirs) if swapped else theirs, strict=True))
    assert [train(model, optimizer, 2, 4) for model, optimizer in pairs] == want


def test_accelerate_with_several_models_on_two_ranks(tmp_path: Path) -> None:
    """FSDP2, sharded: one directory a model."""
    env = {"PYTHONPATH": places()}
    run_ranks("tests.ranks.accelerate_several", 2, [str(tmp_path)], timeout=240, env=env)


def test_accelerate_with_other_models_is_refused(tmp_path: Path) -> None:
    made, model, *_ = prepared(0)
    made.save_state(str(tmp_path / "out"))
    made._models.append(net(1))
    with install(made), pytest.raises(CkptmapError, match=r"has models \[0\], expected 2"):
        made.load_state(str(tmp_path / "out"))
    made._models[:] = [model, model]
    with install(made), pytest.raises(CkptmapError, match=r"has parameters of models \[0, 1\]"):
        made.load_state(str(tmp_path / "out"))


# ------------------------------------------------------------------ transformers


def trainer(model: Any, folder: Path, steps: int, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    callbacks = options.pop("callbacks", [])
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no", **options,
    )  # fmt: skip
    words = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in words]
    return Trainer(model, arguments, train_dataset=data, callbacks=callbacks)


def test_trainer_resumes_from_another_trainers_checkpoint(tmp_path: Path) -> None:
    """Weights, moments, scheduler and step, without resume_from_checkpoint; state by index is in
    the live optimizer's order."""
    first = trainer(TINY["llama"].build(), tmp_path / "a", 2, save_steps=2, weight_decay=0.1)
    first.train()
    seen: dict[str, Any] = {}

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = unwrapped(kwargs["optimizer"])
            seen["state"] = {
                name: optimizer.state[p]["exp_avg"].clone()
                for name, p in kwargs["model"].named_parameters()
            }
            seen["step"] = state.global_step

    ours = callback(resume_from=tmp_path / "a" / "checkpoint-2")
    model = TINY["llama"].build()
    second = trainer(
        model, tmp_path / "b", 3, save_strategy="no", weight_decay=0.1, callbacks=[ours, Look()]
    )
    second.train()
    assert seen["step"] == 2 and second.state.global_step == 3
    optimizer = unwrapped(first.optimizer)
    for name, param in first.model.named_parameters():
        assert torch.equal(seen["state"][name], optimizer.state[param]["exp_avg"]), name
    assert ours.report is not None and not ours.report.missing
    assert any("the data begins anew" in reason for reason in ours.report.inexact)


def recorded(folder: Path, *callbacks: Any, **options: Any) -> tuple[Any, list[Any], list[float]]:
    """A trainer of 7 steps, almost two epochs; the words and the epoch of each step that it takes."""
    made = trainer(TINY["llama"].build(), folder, 7, callbacks=list(callbacks), **options)
    words: list[Any] = []
    epochs: list[float] = []
    step = made.training_step

    class Epochs(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            epochs.append(state.epoch)

    def training_step(model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        words.append(inputs["input_ids"].clone())
        return step(model, inputs, *rest, **more)

    made.training_step = training_step
    made.add_callback(Epochs())
    return made, words, epochs


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[Any]]:
    """Runs saved after 3 and 4 steps, of which 4 are an epoch, by Trainer and by ckptmap."""
    folder = tmp_path_factory.mktemp("interrupted")

    class Save(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step, optimizer = state.global_step, unwrapped(kwargs["optimizer"])
            if step in (3, 4):
                path, scheduler = folder / f"ours-{step}", kwargs["lr_scheduler"]
                ckptmap.save(path, kwargs["model"], optimizer, scheduler, step=step).wait()

    made, words, _ = recorded(folder, Save(), save_steps=1)
    made.train()
    return folder, made.model.state_dict(), words


@pytest.mark.parametrize("step", [3, 4])
@pytest.mark.parametrize("source", ["ours", "checkpoint"])
def test_resume_skips_what_was_seen(
    source: str, step: int, interrupted: tuple[Path, Any, list[Any]], tmp_path: Path
) -> None:
    """In the middle of an epoch and between two: the other steps' words, and the same bits."""
    folder, want, words = interrupted
    torch.manual_seed(1)
    made, again, epochs = recorded(tmp_path, save_strategy="no")
    torch.nn.init.zeros_(made.model.lm_head.weight)
    done = resume(made, folder / f"{source}-{step}")
    assert not done.report.missing and done.output.global_step == 7
    assert epochs == [number / 4 for number in range(step + 1, 8)]
    assert len(again) == 7 - step
    assert all(torch.equal(a, b) for a, b in zip(again, words[step:], strict=True))
    for name, value in made.model.state_dict().items():
        assert torch.equal(value, want[name]), name
    assert "_load_rng_state" not in vars(made)
    if source == "checkpoint":
        assert done.report.streams == "restored by Trainer"
        assert done.report.inexact == (NO_SETTINGS,)


NO_SETTINGS = "the checkpoint records no settings: ckptmap.save did not write it"


def test_resume_tells_where_trainer_has_no_streams_of_as_many_ranks(
    interrupted: tuple[Path, Any, list[Any]], tmp_path: Path
) -> None:
    source = shutil.copytree(interrupted[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    (source / "rng_state.pth").rename(
        source / "rng_state_0.pth"
    )  # as one of several ranks writes it
    made, *_ = recorded(tmp_path, save_strategy="no")
    report = resume(made, source).report
    assert report.streams == "left as they are"
    assert report.inexact == (NO_SETTINGS, NO_STREAMS)


def test_resume_needs_a_step(tmp_path: Path) -> None:
    model = TINY["llama"].build()
    ckptmap.save(tmp_path / "out", model).wait()
    with pytest.raises(CkptmapError, match="does not say at which step") as refused:
        resume(trainer(model, tmp_path / "run", 1), tmp_path / "out")
    assert refused.value.code == "CKM517"


# ------------------------------------------------------------------ the rest


def test_lightning_takes_optimizer_state_as_it_is() -> None:
    """The hooks change the weights alone."""
    checkpoint: dict[str, Any] = {
        "state_dict": {f"model.{k}": v for k, v in net(0).state_dict().items()},
        "optimizer_states": [{"state": {}, "param_groups": []}],
    }

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = net(1)

    outer = Outer()
    hooks(outer).on_load_checkpoint(checkpoint)
    outer.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(outer.model.embed.weight, net(0).embed.weight)
    assert checkpoint["optimizer_states"] == [{"state": {}, "param_groups": []}]


def test_lightning_refuses_what_does_not_fit() -> None:
    with pytest.raises(CkptmapError, match="unexpected: more"):
        hooks(net(0)).on_load_checkpoint(
            {"state_dict": net(1).state_dict() | {"more": torch.ones(1)}}
        )


def test_export_leaves_nothing_behind(tmp_path: Path) -> None:
    export(net(0), tmp_path / "out", "hf-nf4")
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert "nf4" in ckpt.encodings
    with pytest.raises(CkptmapError, match="out"):
        export(net(0), tmp_path / "out", "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_accelerate_saves_tied_weights(tmp_path: Path) -> None:
    """As it does alone: one of the names goes, and `load_state` ties them again."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(made := net(0), torch.optim.AdamW(made.parameters()))
    install(accelerator)
    train(model, optimizer, 0, 1)
    accelerator.save_state(str(tmp_path / "out"))
    before = [param.detach().clone() for param in model.parameters()]
    train(model, optimizer, 1, 2)
    accelerator.load_state(str(tmp_path / "out"))
    pairs = zip(before, model.parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in pairs)
    assert (
        accelerator.unwrap_model(model).head.weight is accelerator.unwrap_model(model).embed.weight
    )
