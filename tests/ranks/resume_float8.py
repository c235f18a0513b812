"""float8 training by torchao, and compiled models, with optimizers of full and of low bits: a run that is
saved, loaded and goes on is the uninterrupted one.

python -m tests.ranks.resume_float8 FOLDER           on all ranks of this start
python -m tests.ranks.resume_float8 FOLDER from N    what N ranks saved, on another number of ranks
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ckptmap
from tests.support.cpu_sharding import fully_shard
from tests.support.resume_model import WORDS, batch, ddp
from tests.support.resume_optimizers import TORCH, inner, same_state, torchao

WIDTH = 48


class Layer(nn.Module):
    """Weights that 2 and 3 ranks cut evenly, as float8 in the all-gather of FSDP2 must be: torchao 0.18 pads
    no uneven shards of it (gloo: `Received data size doesn't match expected size`)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + hidden


class Net(nn.Module):
    """An embedding that three ranks cut unevenly, two layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=True,
        device_id=torch.device("cpu"),
    )  # fmt: skip


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    return model


def float8(model: nn.Module, gathers_float8: bool) -> nn.Module:
    """Return the model with torchao's Float8Linear for the weights of its layers. On a CPU the matmul of
    float8 values is emulated."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers_float8)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name.startswith("layers.")
    )


def compiled(model: nn.Module) -> nn.Module:
    """Return the model with each layer compiled, as torchtitan does: with inductor's graphs, not its kernels."""
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend="aot_eager")
    return model


MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float8-fsdp2": lambda model: fsdp2(float8(model, False)),
    "float8-gathered-fsdp2": lambda model: fsdp2(float8(model, True)),
    "float8-compiled-fsdp2": lambda model: fsdp2(compiled(float8(model, True))),
    "float8-ddp": lambda model: ddp(float8(model, False)),
    "float8-fsdp1": lambda model: fsdp1(float8(model, False)),
    "compiled-fsdp2": lambda model: fsdp2(compiled(model)),
    "compiled-ddp": lambda model: torch.compile(ddp(model), backend="aot_eager"),  # type: ignore[return-value]
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": TORCH["adamw"],
    "ao8": torchao("AdamW8bit"),
    "ao4": torchao("AdamW4bit"),
    "aofp8": torchao("AdamWFp8"),
}
CASES = [
    *((model, "ao8") for model in MODELS),
    ("float8-gathered-fsdp2", "adamw"), ("float8-gathered-fsdp2", "ao4"),
    ("float8-gathered-fsdp2", "aofp8"), ("compiled-fsdp2", "ao4"), ("compiled-fsdp2", "aofp8"),
]  # fmt: skip


def built(model: str, optimizer: str, seed: int) -> tuple[Any, Any]:
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    torch.manual_seed(seed)
    live = MODELS[model](Net())
    return live, OPTIMIZERS[optimizer](live.parameters())


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        words = batch(step, dist.get_rank())
        logits = model(words[:, :-1])
        loss: Any = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        with stance("force_eager"):  # torchao compiles its step by inductor, which takes long
            optimizer.step()
        optimizer.zero_grad()


def stance(name: str) -> Any:
    return torch.compiler.set_stance(name)


def plain(param: Any) -> torch.Tensor:
    """Return this rank's values of a parameter, without torchao's wrapper around them."""
    local = param.to_local() if hasattr(param, "to_local") else param
    values: torch.Tensor = getattr(local, "_tensor", local)
    return values.detach()


def goes_on(model: str, optimizer: str, folder: Path) -> None:
    live, steps = built(model, optimizer, 0)
    train(live, steps, 0, 2)
    ckptmap.save(folder, live, steps, step=2).wait()
    saved = [plain(param).clone() for param in live.parameters()]
    again, theirs = built(model, optimizer, 1)
    if "ddp" in model:
        train(again, theirs, 0, 1)  # a DDP that has run has other buckets
    kinds = [type(param.to_local()) for param in again.parameters() if hasattr(param, "to_local")]
    report = ckptmap.load(folder, again, theirs, exact=True)
    assert not report.changes, report.changes
    found = [plain(param) for param in again.parameters()]
    assert all(map(torch.equal, found, saved)), "other weights than were saved"
    after = [type(param.to_local()) for param in again.parameters() if hasattr(param, "to_local")]
    assert after == kinds, f"{after}, was {kinds}"
    assert not same_state(steps, theirs), same_state(steps, theirs)
    train(live, steps, 2, 4)
    train(again, theirs, 2, 4)
    pairs = zip(live.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(plain(a), plain(b)) for a, b in pairs), "other weights after two steps"
    assert not same_state(steps, theirs), same_state(steps, theirs)


def goes_elsewhere(model: str, optimizer: str, folder: Path) -> None:
    """Weights are the saved ones, and training goes on."""
    if "fsdp1" in model and "ao" in optimizer:
        return  # its moments are decoded on the way to other flat parameters, which is told
    live, steps = built(model, optimizer, 1)
    report = ckptmap.load(folder, live, steps)
    left = [change for change in report.changes if "recoded" not in change]
    assert not left, left
    assert any("world size" in reason for reason in report.inexact), report.inexact
    with ckptmap.open(folder) as ckpt:
        for name, param in live.named_parameters():
            name = name.replace("_orig_mod.", "").replace("module.", "")
            whole = param.full_tensor() if hasattr(param, "full_tensor") else param
            values = getattr(whole, "_tensor", whole)
            assert torch.equal(values, ckpt[name].read()), name
    train(live, steps, 2, 3)
    assert all(inner(param)[0].isfinite().all() for param in live.parameters() if param.numel())


def main(folder: Path, *saved_by: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    call, by = goes_on, dist.get_world_size()
    if saved_by:
        call, by = goes_elsewhere, int(saved_by[1])
    failed = []
    for model, optimizer in CASES:
        try:
            call(model, optimizer, folder / f"{by}-{model}-{optimizer}")
        except Exception as error:  # all cases are told of at once
            traceback.print_exc(limit=3)
            failed.append(f"{model} {optimizer}: {error!r:.300}")
    dist.destroy_process_group()
    assert not failed, "\n".join(["", *failed])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
