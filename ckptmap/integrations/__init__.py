"""Adapters for training frameworks. A framework is imported when a function of its module is called.

ckptmap.integrations.accelerate.install(accelerator)      save_state, load_state
ckptmap.integrations.transformers.callback(...)           a TrainerCallback
ckptmap.integrations.dcp.save_planner(), load_planner()   plain dcp.save and dcp.load
ckptmap.integrations.ddp.prepare_ddp(model)               before DDP with NF4 weights
ckptmap.integrations.lightning.hooks(...)                 on_save_checkpoint, on_load_checkpoint
ckptmap.integrations.manager.trainer_callback(manager)    a CheckpointManager in Trainer, Lightning, torchtitan
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["accelerate", "dcp", "ddp", "lightning", "manager", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ckptmap.integrations' has no attribute {name!r}")
    return importlib.import_module(f"ckptmap.integrations.{name}")
