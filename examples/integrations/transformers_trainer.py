"""transformers' Trainer: resume from a checkpoint of another setup, export every few steps.

python examples/integrations/transformers_trainer.py runs/trainer
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ckptmap
from ckptmap.integrations.transformers import callback


def tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    ))  # fmt: skip


def data() -> list[dict[str, Any]]:
    words = torch.randint(0, 64, (32, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in words]


def trainer(model: Any, folder: Path, steps: int, *callbacks: Any) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
        learning_rate=1e-3,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=data(), callbacks=list(callbacks))


def main(folder: Path) -> None:
    # a run of another kind: no Trainer, compiled, its own loop
    model = tiny(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(**{k: v[None] for k, v in data()[0].items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ckptmap.save(folder / "first", torch.compile(model, backend="eager"), optimizer, step=3).wait()

    ours = callback(
        resume_from=folder / "first", export_dir=folder / "export", export_to="hf-bf16", every=2
    )
    run = trainer(tiny(1), folder / "run", 6, ours)
    run.train()
    assert ours.report is not None and not ours.report.missing
    assert run.state.global_step == 6, run.state.global_step
    assert sorted(path.name for path in (folder / "export").iterdir()) == ["step-4", "step-6"]
    exported = LlamaForCausalLM.from_pretrained(folder / "export" / "step-6")
    for (name, one), two in zip(
        exported.state_dict().items(), run.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one.to(torch.bfloat16), two.to(torch.bfloat16)), name
    print(ours.report)
    print("resumed at step 3, exported after steps 4 and 6")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
