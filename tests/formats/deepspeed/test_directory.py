"""The directory that holds the step: DeepSpeed's own, Trainer's, accelerate's, and odd ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import ckptmap
from ckptmap.errors import SourceError
from tests.golden import truth
from tests.support.same_tensors import assert_same


def run_of(samples: Path, out: Path, name: str = "z2w2") -> Path:
    """A copy of the run without its truth, which is a file of weights."""
    return shutil.copytree(samples / name, out, ignore=shutil.ignore_patterns("truth.safetensors"))


def assert_is_the_run(path: Path, run: Path) -> None:
    with ckptmap.open(path) as ckpt:
        assert ckpt.index.container in ("deepspeed", "zero-step")
        assert len(ckpt.optimizer) == len(truth.moments(run))
        for name, value in truth.weights(run).items():
            assert_same(ckpt[name].read().to(value.dtype), value, name)


def as_trainer(folder: Path) -> None:
    """What Trainer writes beside the step."""
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3, "epoch": 1.0}))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "own", "torch_dtype": "bfloat16"})
    )
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    for rank in (0, 1):
        torch.save({"cpu": torch.zeros(4, dtype=torch.uint8)}, folder / f"rng_state_{rank}.pth")
    for script in ("zero_to_fp32.py", "zero_to_torch.py"):
        (folder / script).write_text("raise SystemExit('never run')")
    save_file(
        {"embed.weight": torch.zeros(7, 5, dtype=torch.bfloat16)}, folder / "model.safetensors"
    )


def test_a_directory_of_trainer(samples: Path, tmp_path: Path) -> None:
    """Its 16-bit weights are a copy, and are left alone."""
    folder = run_of(samples, tmp_path / "checkpoint-3")
    as_trainer(folder)
    assert_is_the_run(folder, samples / "z2w2")
    with ckptmap.open(folder) as ckpt:
        assert ckpt.extra["trainer_state"] == {"global_step": 3, "epoch": 1.0}
        assert ckpt.extra["scheduler"] == {"last_epoch": 3}
        assert any("left behind" in note and "model.safetensors" in note for note in ckpt.notes)
    ckptmap.convert(folder, tmp_path / "out", to="trainer")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state_1.pth",
            "config.json"} <= names  # fmt: skip
    assert not names & {"zero_to_fp32.py", "zero_to_torch.py", "latest"}


def test_the_step_of_a_trainer_by_its_own_path(samples: Path, tmp_path: Path) -> None:
    """The config of the model lies above it."""
    folder = run_of(samples, tmp_path / "checkpoint-3")
    as_trainer(folder)
    assert_is_the_run(folder / "global_step3", samples / "z2w2")
    ckptmap.convert(folder / "global_step3", tmp_path / "out", to="hf-bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "own"


def test_a_directory_of_accelerate(samples: Path, tmp_path: Path) -> None:
    folder = run_of(samples, tmp_path / "checkpoint_0", "z3w2")
    (folder / "global_step3").rename(folder / "pytorch_model")
    (folder / "latest").write_text("pytorch_model")
    torch.save({"step": 3}, folder / "random_states_0.pkl")
    torch.save({"last_epoch": 2}, folder / "scheduler.bin")
    torch.save({"seen": 5}, folder / "custom_checkpoint_0.pkl")
    assert_is_the_run(folder, samples / "z3w2")
    with ckptmap.open(folder) as ckpt:
        assert ckpt.extra["scheduler"] == {"last_epoch": 2}
        assert ckpt.extra["custom_checkpoint_0"] == {"seen": 5}


def test_latest_decides_among_steps(samples: Path, tmp_path: Path) -> None:
    folder = run_of(samples, tmp_path / "run")
    shutil.copytree(samples / "z2w3" / "global_step3", folder / "global_step2")
    (folder / "latest").write_text("global_step2\n")
    assert_is_the_run(folder, samples / "z2w3")


def test_latest_names_a_step_that_is_not_there(samples: Path, tmp_path: Path) -> None:
    folder = run_of(samples, tmp_path / "run")
    (folder / "latest").write_text("global_step4")
    with pytest.raises(
        SourceError, match="latest names global_step4, which is not there; found global_step3"
    ) as raised:
        ckptmap.open(folder)
    assert raised.value.hint.endswith(f"{folder}/global_step3")
    (folder / "latest").write_text("../other")
    with pytest.raises(SourceError, match=r"latest names no folder in it; found global_step3"):
        ckptmap.open(folder)
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("global_step3")  # as others keep the newest step
    with pytest.raises(SourceError, match=r"holds some: global_step3, latest"):
        ckptmap.open(folder)


def test_one_step_without_latest_is_opened(samples: Path, tmp_path: Path) -> None:
    folder = run_of(samples, tmp_path / "run")
    (folder / "latest").unlink()
    (folder / "zero_to_fp32.py").touch()
    assert_is_the_run(folder, samples / "z2w2")


def test_several_steps_without_latest_are_listed(samples: Path, tmp_path: Path) -> None:
    folder = run_of(samples, tmp_path / "run")
    (folder / "latest").unlink()
    shutil.copytree(folder / "global_step3", folder / "global_step2")
    with pytest.raises(SourceError, match="holds some: global_step2, global_step3"):
        ckptmap.open(folder)


def test_a_universal_checkpoint_beside_the_step_it_was_made_of(
    samples: Path, tmp_path: Path
) -> None:
    folder = run_of(samples, tmp_path / "run")
    shutil.copytree(
        samples / "z1-universal" / "global_step3_universal", folder / "global_step3_universal"
    )
    (folder / "latest_universal").write_text("global_step3_universal")
    with ckptmap.open(folder) as ckpt:
        assert ckpt.world_size == 2
    assert_is_the_run(folder / "global_step3_universal", samples / "z1-universal")


def test_weights_of_trainer_are_opened_where_the_step_was_deleted(
    samples: Path, tmp_path: Path
) -> None:
    """As many repositories on the Hub are: the step is gone, `latest` and the script are not."""
    folder = run_of(samples, tmp_path / "checkpoint-3")
    as_trainer(folder)
    shutil.rmtree(folder / "global_step3")
    with ckptmap.open(folder) as ckpt:
        assert list(ckpt) == ["embed.weight"]


@pytest.mark.parametrize("below", ["", "global_step2"])
def test_what_trainer_itself_wrote(samples: Path, tmp_path: Path, below: str) -> None:
    """In bfloat16 the weights are those of its own model.safetensors, and transformers loads them."""
    source = samples / "trainer" / "checkpoint-2"
    ckptmap.convert(source / below, tmp_path / "out", to="hf-bf16")
    expected, found = (load_file(d / "model.safetensors") for d in (source, tmp_path / "out"))
    assert set(found) == set(expected) - {"lm_head.weight"}
    for name, value in found.items():
        assert_same(value, expected[name], name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_trainer_goes_on_without_deepspeed(samples: Path, tmp_path: Path) -> None:
    """`--to trainer` keeps the optimizer by index, the scheduler, random states and the count of steps."""
    ckptmap.convert(samples / "trainer" / "checkpoint-2", tmp_path / "checkpoint-2", to="trainer")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype=torch.float32)
    ids = torch.arange(6)
    data = [{"input_ids": ids + i, "labels": ids + i} for i in range(11)]
    args = TrainingArguments(
        str(tmp_path / "more"), max_steps=3, per_device_train_batch_size=4, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 3
    steps = {float(state["step"]) for state in trainer.optimizer.state.values()}
    assert steps == {3.0}


def test_the_file_of_the_model_alone_says_where_the_rest_is(samples: Path) -> None:
    step = samples / "z2w2" / "global_step3"
    with ckptmap.open(step / "mp_rank_00_model_states.pt") as ckpt:
        assert ckpt["embed.weight"].dtype == "bfloat16"
        (note,) = (note for note in ckpt.notes if "beside it" in note)
        assert note.endswith(f"give {step}")
