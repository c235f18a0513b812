"""What transformers' Trainer saves of a model that peft has wrapped: an adapter, and the run's optimizer, scheduler and
step beside it. Of such a directory the adapter alone was read: `resume` said that it has no step, and `load` no state."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.integrations.transformers import resume
from ckptmap.live.optimizer.unwrap import unwrapped
from ckptmap.operations.list_steps import list_steps
from tests.integrations.test_integrations import trainer
from tests.support.mapping_configs import TINY

STEPS = 4


def adapted(seed: int, alpha: int = 8, **options: Any) -> Any:
    """One base, and an adapter of random values that the seed decides, its B too."""
    torch.manual_seed(7)
    base = TINY["llama"].build()
    torch.manual_seed(seed)
    wanted = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, **options}
    return get_peft_model(base, LoraConfig(lora_alpha=alpha, init_lora_weights=False, **wanted))


class StopAt(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == STEPS - 1


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def saved(folder: Path, **options: Any) -> Any:
    """A whole run; another that ended in step 3, of which step 2 was saved, is at folder/checkpoint-2."""
    whole = trainer(adapted(0, **options), folder / "whole", STEPS, save_strategy="no")
    whole.train()
    trainer(adapted(0, **options), folder, STEPS, save_steps=2, callbacks=[StopAt()]).train()
    assert (folder / "checkpoint-2" / "adapter_model.safetensors").is_file()
    return whole


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}])
def test_resume_is_the_run_that_never_stopped(options: dict[str, Any], tmp_path: Path) -> None:
    whole = saved(tmp_path, **options)
    again = trainer(adapted(1, **options), tmp_path / "again", STEPS, save_strategy="no")
    done = resume(again, tmp_path / "checkpoint-2")
    assert not done.report.missing and not done.report.unexpected
    assert done.report.state is not None and not done.report.state.initialised
    want, found = values(whole.model), values(again.model)
    assert want.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in want.items())


def test_a_manager_restores_it(tmp_path: Path) -> None:
    """In the order of the live optimizer; `load` has no order, and names the manager."""
    saved(tmp_path)
    manager = ckptmap.CheckpointManager(tmp_path)
    assert manager.latest() == tmp_path / "checkpoint-2"
    assert "incomplete" not in str(list_steps(tmp_path))
    other = trainer(adapted(1), tmp_path / "other", 1, save_strategy="no")
    model, optimizer = other.model, other.create_optimizer()
    path = tmp_path / "checkpoint-2"
    with pytest.raises(LoadError, match="nothing in the checkpoint tells") as refused:
        ckptmap.load(path, model, optimizer)
    hint = str(refused.value.hint).rpartition(": ")[2]
    assert hint == f"ckptmap.CheckpointManager({str(tmp_path)!r}).restore(model, optimizer)"
    report = eval(hint, {"ckptmap": ckptmap, "model": model, "optimizer": optimizer})
    assert report.extra["trainer_state"]["global_step"] == 2
    raw = torch.load(path / "optimizer.pt", weights_only=True)
    numbers = itertools.chain.from_iterable(group["params"] for group in raw["param_groups"])
    params = [p for group in unwrapped(optimizer).param_groups for p in group["params"]]  # type: ignore[attr-defined]
    assert params
    for number, param in zip(numbers, params, strict=True):
        state = unwrapped(optimizer).state[param]  # type: ignore[attr-defined]
        assert torch.equal(state["exp_avg"], raw["state"][number]["exp_avg"])


def test_another_adapter_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    other = trainer(adapted(1, alpha=16), tmp_path / "other", STEPS, save_strategy="no")
    with pytest.raises(LoadError, match="lora_alpha: was 8, is 16") as refused:
        resume(other, tmp_path / "checkpoint-2")
    assert refused.value.code == "CKM515"
    with pytest.raises(LoadError, match="lora_alpha: was 8, is 16"):
        ckptmap.CheckpointManager(tmp_path).restore(other.model, other.create_optimizer())
