"""A model that peft has wrapped, cut by FSDP2: base and adapter loaded into it, and compared.

python -m tests.ranks.resume_peft FOLDER      of `write`; on any number of ranks
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model

import ckptmap
from tests.ranks.fsdp2 import whole
from tests.support.cpu_sharding import fully_shard
from tests.support.live_model import same
from tests.support.merge_cases import LINEARS, llama, saved

CONFIG: dict[str, Any] = {
    "r": 8, "lora_alpha": 16, "target_modules": LINEARS, "modules_to_save": ["lm_head"],
}  # fmt: skip
SOURCES = ("base", "nf4")


def write(folder: Path) -> None:
    """`base` by transformers, `adapter` by peft, `nf4`: the base converted."""
    saved(folder, llama(torch.bfloat16), **CONFIG)
    ckptmap.convert(folder / "base", folder / "nf4", "hf-nf4", no_encode=["lm_head*", "*embed*"])


def wrapped(**config: Any) -> Any:
    """The model before anything is loaded: other values, another adapter."""
    model = llama(torch.bfloat16)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    return get_peft_model(model, LoraConfig(**{**CONFIG, **config})).eval()


def by_peft(folder: Path, source: str) -> Any:
    """The base loaded first, as it is told everywhere, then the adapter by peft itself."""
    model = llama(torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    ckptmap.load(folder / source, model)
    return PeftModel.from_pretrained(model, str(folder / "adapter"), is_trainable=True).eval()


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: whole(tensor).detach() for name, tensor in model.state_dict().items()}


def differing(model: Any, truth: Any) -> list[str]:
    found, want = values(model), values(truth)
    assert found.keys() == want.keys()
    return [name for name, tensor in found.items() if not same(tensor, want[name])]


def sharded() -> Any:
    model = wrapped()
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def main(folder: Path) -> None:
    words = torch.arange(24).view(1, 24)
    for source in SOURCES:
        truth, model = by_peft(folder, source), sharded()
        base = ckptmap.load(folder / source, model)
        assert all(".lora_" in name for name in base.left) and len(base.left) == 12, base
        adapter = ckptmap.load(folder / "adapter", model)
        assert len(adapter.loaded) == 13 and not adapter.missing, adapter
        wrong = differing(model, truth)
        assert not wrong, (source, wrong)
        with torch.no_grad():
            assert torch.allclose(model(words).logits, truth(words).logits, atol=1e-2)
        if source == "nf4":
            local = model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
            assert type(local.to_local()).__name__ == "NF4Tensor" and base.encoded


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
