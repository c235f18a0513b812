"""transformers' Trainer with a CheckpointManager: stopped after 5 steps, it goes on to the same weights.

python examples/integrations/manager_trainer.py runs/manager
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import ckptmap
from ckptmap.integrations.manager import trainer_callback
from ckptmap.integrations.transformers import resume


def tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    ))  # fmt: skip


class StopAt(TrainerCallback):  # type: ignore[misc]
    """Ends training after a step, as a failure would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def trainer(folder: Path, model: Any, *callbacks: Any) -> Any:
    words = torch.randint(0, 64, (32, 8), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=8, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_steps=1, learning_rate=1e-3,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in words]
    return Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks))


def main(folder: Path) -> None:
    whole = trainer(folder, tiny(0))
    whole.train()
    rules: Any = {"every": 2, "keep": 1, "keep_best": ("loss", "min")}
    with ckptmap.CheckpointManager(folder / "runs", **rules) as manager:
        trainer(folder, tiny(0), trainer_callback(manager), StopAt(5)).train()
        latest = manager.latest()
        assert latest is not None and latest.name == "step-4"
        again = trainer(folder, tiny(1), trainer_callback(manager))
        resume(again, latest)
        best = manager.best()
        assert best is not None and manager.steps()[-1] == 8
    assert again.state.global_step == 8
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
    print("resumed at step 4, the same weights after step 8; the best is", best.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
