"""Lightning-style hooks on a plain dict: load the names of a compiled DDP run into an NF4 model.

PYTHONPATH=examples python examples/integrations/lightning_hooks.py
"""

from __future__ import annotations

from typing import Any

import torch
from small_net import build
from torch import nn
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from ckptmap.integrations.lightning import hooks


class Module:
    """What a LightningModule would do with its two hooks."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.hooks = hooks(model)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hooks.on_save_checkpoint(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hooks.on_load_checkpoint(checkpoint)


def main() -> None:
    trained = torch.compile(build(seed=0), backend="eager")
    checkpoint: dict[str, Any] = {"state_dict": dict(trained.state_dict()), "epoch": 3}
    Module(trained).on_save_checkpoint(checkpoint)
    assert not any("_orig_mod" in name for name in checkpoint["state_dict"])

    # DDP's names come in, and a base in NF4 wants its weights quantized
    checkpoint["state_dict"] = {f"module.{k}": v for k, v in checkpoint["state_dict"].items()}
    model = build(seed=1)
    up = model.layers[0].up
    up.weight = nn.Parameter(to_nf4(up.weight.detach()), requires_grad=False)
    Module(model).on_load_checkpoint(checkpoint)
    model.load_state_dict(checkpoint["state_dict"])

    want = to_nf4(build(seed=0).layers[0].up.weight.detach())
    assert torch.equal(up.weight.quantized_data, want.quantized_data)
    assert torch.equal(model.layers[1].up.weight, build(seed=0).layers[1].up.weight)
    print(checkpoint["state_dict"].report)
    print("the same codes as torchao's to_nf4 of the trained weight")


if __name__ == "__main__":
    main()
