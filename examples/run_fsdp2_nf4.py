"""Run an NF4 checkpoint under FSDP2, and compare its logits with torchao's own quantization.

    torchrun --nproc-per-node 2 examples/run_fsdp2_nf4.py demo/nf4 demo/reference.pt

The model is built without memory, sharded, and filled by `ckptmap.load`: each rank reads its own
shards, and no rank ever holds a dense quantized weight.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from pathlib import Path

import torch
from tiny_llama import CONFIG, build, mesh, ranks, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.quantization import to_nf4

import ckptmap


def sharded(checkpoint: str) -> tuple[nn.Module, str]:
    model = build("meta").requires_grad_(False)
    # The one buffer that no checkpoint holds: it is computed from the configuration.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=CONFIG)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    report = ckptmap.load(checkpoint, model)
    return model, str(report)


def reference(path: str) -> nn.Module:
    """Return the logits of one process without ckptmap: torchao quantizes every linear layer but the head."""
    model = build("meta").requires_grad_(False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=CONFIG)
    model.load_state_dict(torch.load(path, weights_only=True), assign=True)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = module.weight.detach()
            scaler_block = math.gcd(256, weight.numel() // 64)
            module.weight = nn.Parameter(to_nf4(weight, 64, scaler_block), requires_grad=False)
    return model


def local_nbytes(model: nn.Module) -> int:
    """Return the bytes of the parameters on this rank; NF4 counts as stored."""
    total = 0
    for parameter in model.parameters():
        local = parameter.to_local()
        names = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else ()
        parts = [getattr(local, name) for name in names] or [local]
        total += sum(part.numel() * part.element_size() for part in parts)
    return total


def main() -> None:
    warnings.simplefilter("ignore")
    checkpoint, original = sys.argv[1:3]
    with ranks() as rank, torch.no_grad():
        model, report = sharded(checkpoint)
        kind = type(model.model.layers[0].mlp.up_proj.weight.to_local()).__name__
        nbytes = local_nbytes(model)
        mine = model(input_ids=tokens()).logits
        if rank:
            return
        theirs = reference(original)(input_ids=tokens()).logits
        result = {
            "report": report,
            "kind": kind,
            "local_nbytes": nbytes,
            "logits": list(mine.shape),
            "equal": torch.equal(mine, theirs),
            "max_difference": (mine - theirs).abs().max().item(),
        }
        Path(checkpoint).with_name("result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo may abort a process that ends while its models still refer to a group
