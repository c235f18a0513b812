"""NF4 weights under DistributedDataParallel: `prepare_ddp(model)` before the model is wrapped."""

from __future__ import annotations

from ckptmap.live.quantized.ddp_replicas import compare_nf4, prepare_ddp

__all__ = ["compare_nf4", "prepare_ddp"]
