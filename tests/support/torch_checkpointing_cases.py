"""Which saves of torch_checkpointing the tests make: by world size and name.

mesh       how the model lies on the ranks: plain, fsdp2, hsdp, tp (with FSDP2 over it), stages of a pipeline
optimizer  "", or adamw, sgd
form       of the optimizer item: `v1` as the library's own transform makes it, `flat` as torchtitan saves
           it, `index` as `optimizer.state_dict()` returns it
layouts    item -> a layout other than the default
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    mesh: str
    optimizer: str = ""
    form: str = "v1"
    layouts: Mapping[str, str] = field(default_factory=dict)
    is_half: bool = False


CASES: Mapping[int, Mapping[str, Case]] = {
    1: {
        "plain": Case("plain", "adamw"),
        "fsdp2": Case("fsdp2", "sgd", layouts={"model": "safetensors"}),
    },
    2: {
        "plain": Case("plain", "sgd", "index"),
        "fsdp2": Case("fsdp2", "adamw"),
        "flat": Case("fsdp2", "adamw", "flat", {"model": "folder"}, is_half=True),
        "layouts": Case(
            "fsdp2",
            "sgd",
            layouts={
                "model": "safetensors", "optimizer": "folder", "settings": "json", "blob": "raw",
                "lr_scheduler": "shared",
            },
        ),
    },
    4: {
        "fsdp2": Case("fsdp2", "adamw", "flat"),
        "hsdp": Case("hsdp", "adamw", layouts={"model": "safetensors"}),
        "tp": Case("tp", "sgd"),
        "tp_safe": Case("tp", "adamw", "flat", {"model": "safetensors"}),
        "stages": Case("stages", "adamw"),
        "none": Case("hsdp", is_half=True),
    },
}  # fmt: skip
