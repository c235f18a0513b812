"""accelerate's `save_state` of runs with odd optimizers, and the runs that go on from what ckptmap made of it.

python -m tests.ranks.accelerate_odd save KIND FOLDER NAME...     two steps, saved; two more: the truth
python -m tests.ranks.accelerate_odd resume KIND FOLDER NAME...   the same two from each output that is there

KIND is ddp or fsdp2. FOLDER/NAME has `saved`, `truth.pt`, and the outputs by their names in RESUMED.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.corpus.writers_accelerate import accelerator, fsdp_plugin
from tests.ranks.resume_odd import Lion, factored
from tests.support.resume_model import Layer, net, train
from tests.support.resume_optimizers import ALL, LOW_BIT, bnb


def signal() -> float:
    """A function that a group holds, as GrokAdamW's `grokking_signal_fns`."""
    return 0.5


class Grok(torch.optim.AdamW):
    """An imitation of GrokAdamW 0.1: its groups hold functions, and a moment of its own is in the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, foreach=False)
        for group in self.param_groups:
            group["grokking_signal_fns"] = [signal]

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for fn in group["grokking_signal_fns"]:
                self._filter(group["params"], fn())
        super().step()

    @torch.no_grad()
    def _filter(self, params: list[Any], decay: float) -> None:
        for param in params:
            if param.grad is not None:
                state = self.state[param]
                if state:
                    ema = state.setdefault("grok_ema", torch.zeros_like(param))
                    ema.lerp_(param.grad, 1 - decay)
                    param.grad.add_(ema)


def lion(model: nn.Module) -> Any:
    return Lion(model.parameters(), {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0})


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    **{name: lambda model, make=make: make(model.parameters()) for name, make in ALL.items()},
    **{name: lambda model, make=make: make(model.parameters()) for name, make in LOW_BIT.items()},
    "lamb32": lambda model: bnb("LAMB")(model.parameters()),
    "lars32": lambda model: bnb("LARS", momentum=0.9)(model.parameters()),
    "bnb32-paged": lambda model: bnb("PagedAdamW32bit")(model.parameters()),
    "transformers-adafactor": factored,
    "lion": lion,
    "grok": lambda model: Grok(model.parameters()),
}


def prepared(kind: str, name: str, seed: int, state: str = "SHARDED_STATE_DICT") -> Any:
    """The accelerator, the model that it wraps, and its optimizer."""
    before = dict(os.environ)
    plugin = None
    if kind == "fsdp2":
        plugin = fsdp_plugin(2, state)
        plugin.auto_wrap_policy = ModuleWrapPolicy({Layer})
    made = accelerator(plugin)
    inner = net(seed)
    model, optimizer = made.prepare(inner, OPTIMIZERS[name](inner))
    for key in set(os.environ) - set(before):
        del os.environ[key]
    return made, model, optimizer


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole, by FQN."""
    return {
        fqn.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p)
        .detach()
        .clone()
        for fqn, p in model.named_parameters()
    }


def save(kind: str, folder: Path, name: str) -> None:
    made, model, optimizer = prepared(kind, name, 0)
    train(model, optimizer.optimizer, 0, 2, dist.get_rank())
    made.save_state(str(folder / "saved"), safe_serialization=False)
    train(model, optimizer.optimizer, 2, 4, dist.get_rank())
    found = weights(model)
    if dist.get_rank() == 0:
        torch.save(found, folder / "truth.pt")


def from_full(kind: str, name: str, source: Path) -> nn.Module:
    """accelerate's FULL_STATE_DICT directory, loaded by accelerate."""
    made, model, optimizer = prepared("fsdp2", name, 1, "FULL_STATE_DICT")
    made.load_state(str(source))
    train(model, optimizer.optimizer, 2, 4, dist.get_rank())
    return model


def by_index(kind: str, name: str, source: Path) -> nn.Module:
    """The optimizer's own load_state_dict, under DDP."""
    _, model, optimizer = prepared("ddp", name, 1)
    with_trainer = source.is_dir()
    state = torch.load(source / "optimizer.pt" if with_trainer else source, weights_only=True)
    if with_trainer:
        from safetensors.torch import load_file

        values = load_file(source / "model.safetensors")
    else:
        values = state["model"]
        state = state["optimizer"]
    missing = model.module.load_state_dict(values, strict=False).missing_keys
    assert set(missing) <= {"head.weight"}, missing
    optimizer.optimizer.load_state_dict(state)
    if name == "grok":  # as the hint of the refusal says
        for group in optimizer.optimizer.param_groups:
            group["grokking_signal_fns"] = [signal]
    train(model, optimizer.optimizer, 2, 4, dist.get_rank())
    return model


RESUMED = {"accelerate-full": from_full, "trainer": by_index, "full.pt": by_index}


def resume(kind: str, folder: Path, name: str) -> None:
    truth = torch.load(folder / "truth.pt", weights_only=True)
    wrong = []
    for output, call in RESUMED.items():
        if not (folder / output).exists():
            continue
        try:
            found = weights(call(kind, name, folder / output))
            other = [fqn for fqn, value in truth.items() if not torch.equal(found[fqn], value)]
            if other:
                wrong.append(f"{output}: other values than the uninterrupted run's: {other}")
        except Exception as error:
            traceback.print_exc(limit=-4)
            wrong.append(f"{output}: {error!r:.300}")
    assert not wrong, "\n".join(wrong)


def main(what: str, kind: str, folder: Path, *names: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # torchao compiles its step by inductor, which takes 10 s: `tests.ranks.resume_exact` has such steps.
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo")
    failed = []
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        try:
            (save if what == "save" else resume)(kind, folder / name, name)
        except Exception as error:
            traceback.print_exc(limit=-4)
            failed.append(f"{kind} {name}: {error!s:.600}")
    dist.barrier()
    dist.destroy_process_group()
    assert not failed, "\n".join(["", *failed])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
