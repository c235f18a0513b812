"""transformers' Trainer under FSDP1 or FSDP2 with a CheckpointManager: stopped in the middle of an epoch, with
gradient accumulation and evaluation, it goes on bit for bit, with `exact`.

python -m tests.ranks.trainer_fsdp FOLDER VERSION

accelerate enters its FSDP code only from an accelerator's distributed type: it is told so while Trainer is built, and
gets its CPU device back afterwards, as in `tests.corpus.writers_accelerate`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Trainer, TrainingArguments

import ckptmap
from ckptmap.integrations.manager import trainer_callback
from ckptmap.integrations.transformers import resume
from tests.ranks.trainer_manager import StopAt, tiny


def trainer(folder: Path, seed: int, version: int, *callbacks: Any) -> Any:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    for key in [key for key in os.environ if key.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[key]
    words = torch.randint(0, 32, (20, 6), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in words]
    config = {
        "version": version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT", "sync_module_states": False,
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, logging_steps=1, learning_rate=1e-2, max_steps=6,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2, fsdp=True, fsdp_config=config,
    )  # fmt: skip
    shared = PartialState()._shared_state
    shared["distributed_type"] = DistributedType.MULTI_GPU
    made = Trainer(
        tiny(seed), arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=[*callbacks]
    )
    for state in (made.accelerator.state._shared_state, shared):
        state["device"] = torch.device("cpu")
    return made


def weights(of: Any, version: int) -> dict[str, torch.Tensor]:
    model = of.model_wrapped
    is_wrapped = isinstance(model, FullyShardedDataParallel)
    assert is_wrapped == (version == 1)
    if is_wrapped:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: param.detach().clone() for name, param in model.named_parameters()}
    params = dict(model.named_parameters())  # those of the root stay whole after a forward
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in params.items()}
    return {name: param.detach().clone() for name, param in whole.items()}


def main(folder: Path, version: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    whole = trainer(folder, 0, version)
    whole.train()
    truth = weights(whole, version)
    with ckptmap.CheckpointManager(folder / "runs", keep=2) as manager:
        trainer(folder, 0, version, trainer_callback(manager), StopAt(4)).train()
    dist.barrier()
    latest = manager.latest()
    assert latest is not None and latest.name == "step-4"
    again = trainer(folder, 1, version)
    report = resume(again, latest, load_options={"exact": True}).report
    assert report.inexact == () and again.state.global_step == 6, report
    found = weights(again, version)
    assert all(torch.equal(truth[name], found[name]) for name in truth)
    losses = [e["eval_loss"] for e in whole.state.log_history if "eval_loss" in e]
    assert losses == [e["eval_loss"] for e in again.state.log_history if "eval_loss" in e]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
