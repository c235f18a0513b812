"""transformers' Trainer under DDP with a CheckpointManager: stopped in the middle of an epoch, it goes on bit for
bit, also with `exact`. Each rank logs its own time of evaluation, which no other rank has.

python -m tests.ranks.trainer_manager FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import ckptmap
from ckptmap.integrations.manager import trainer_callback
from ckptmap.integrations.transformers import resume


class StopAt(TrainerCallback):  # type: ignore[misc]
    """Ends training after a step, as a failure would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = (
            control.should_training_stop or state.global_step == self.step
        )


def tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        attention_dropout=0.1,
    ))  # fmt: skip


def trainer(folder: Path, seed: int, *callbacks: Any, **options: Any) -> Any:
    words = torch.randint(0, 32, (20, 6), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in words]
    chosen: dict[str, Any] = {
        "max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder), report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, logging_steps=1, learning_rate=1e-2, **{**chosen, **options},
    )  # fmt: skip
    model = tiny(seed)
    return Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=[*callbacks]
    )


def weights(of: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in of.model.named_parameters()}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    whole = trainer(folder, 0)
    whole.train()
    with ckptmap.CheckpointManager(folder / "runs", keep=2) as manager:
        trainer(folder, 0, trainer_callback(manager), StopAt(4)).train()
    dist.barrier()
    latest = manager.latest()
    assert latest is not None and latest.name == "step-4"
    again = trainer(folder, 1)
    report = resume(again, latest, load_options={"exact": True}).report
    assert report.inexact == () and again.state.global_step == 6, report
    steps = [entry["step"] for entry in again.state.log_history if "eval_loss" in entry]
    assert steps == [2, 4, 6], again.state.log_history
    truth, found = weights(whole), weights(again)
    assert all(torch.equal(truth[name], found[name]) for name in truth)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
