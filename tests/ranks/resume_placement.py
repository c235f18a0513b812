"""Optimizer state whose shape tells nothing of how it is placed: whole on each rank, or cut.

python -m tests.ranks.resume_placement save|same|other FOLDER
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptmap
from tests.support.resume_model import built, inner, train


class ShampooLike(torch.optim.Optimizer):
    """An imitation of optimizers that keep preconditioners: state of all placements for a parameter.

    average  plain, [*param]         whole on each rank
    left     plain, [rows, rows]     the same, of the parameter's shape where that is square
    moment   DTensor, [*param]       cut as the parameter
    row      DTensor, [rows]         cut by rows, as the reduction makes it
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group["lr"])

    @torch.no_grad()
    def _update(self, param: Any, lr: float) -> None:
        grad, state, rows = param.grad, self.state[param], param.shape[0]
        if not state:
            state["average"] = torch.zeros(param.shape)
            state["left"] = torch.zeros(rows, rows)
            state["moment"] = torch.zeros_like(param)
            state["row"] = torch.zeros_like(param).flatten(1).sum(1) if param.dim() > 1 else None
        whole = whole_of(grad).view(rows, -1)
        state["average"].lerp_(whole_of(param), 0.1)
        state["left"].add_(whole @ whole.T)
        state["moment"].lerp_(grad, 0.1)
        scale = float(state["left"].trace() + state["average"].norm()) + 1e-3
        update = state["moment"] / scale
        if state["row"] is not None:
            state["row"].add_(grad.square().flatten(1).sum(1))
            update = update / (state["row"].sqrt() + 1e-3).view(rows, *[1] * (param.dim() - 1))
        param.sub_(update, alpha=lr)


def whole_of(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def form(value: Any) -> tuple[str, str]:
    return type(value).__name__, str(getattr(value, "placements", ""))


def run(seed: int, wrap: str = "fsdp2") -> tuple[Any, ShampooLike]:
    model = built(wrap, "eager", seed)
    return model, ShampooLike(model.parameters())


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        f"{n}.{k}": v
        for n, p in inner(model).named_parameters()
        for k, v in optimizer.state[p].items()
    }


def save(folder: Path) -> None:
    model, optimizer = run(0)
    train(model, optimizer, 0, 3, dist.get_rank())
    ckptmap.save(folder / "out", model, optimizer).wait()
    whole = {k: copy.deepcopy(whole_of(v)) for k, v in state_of(model, optimizer).items()}
    train(model, optimizer, 3, 5, dist.get_rank())
    weights = [whole_of(p) for p in model.parameters()]
    if dist.get_rank() == 0:
        torch.save({"state": whole, "weights": weights}, folder / "truth.pt")


def compare(folder: Path, wrap: str) -> tuple[Any, Any, Any]:
    """The state that was saved, in the forms that the optimizer itself would have made here."""
    truth = torch.load(folder / "truth.pt")
    model, optimizer = run(1, wrap)
    exact = wrap == "fsdp2" and dist.get_world_size() == 2
    report = ckptmap.load(folder / "out", model, optimizer, exact=exact)
    assert report.state is not None and not report.state.initialised, report
    fresh, theirs = run(2, wrap)
    train(fresh, theirs, 0, 1, dist.get_rank())
    made, wanted = state_of(model, optimizer), state_of(fresh, theirs)
    assert {k: form(v) for k, v in made.items()} == {k: form(v) for k, v in wanted.items()}
    for name, value in truth["state"].items():
        assert (value is None) == (made[name] is None), name
        assert value is None or torch.equal(whole_of(made[name]), value), name
    train(model, optimizer, 3, 5, dist.get_rank())
    return truth, model, optimizer


def same(folder: Path) -> None:
    truth, model, _ = compare(folder, "fsdp2")
    for param, wanted in zip(model.parameters(), truth["weights"], strict=True):
        assert torch.equal(whole_of(param), wanted)


def other(folder: Path) -> None:
    compare(folder, "fsdp2")
    compare(folder, "ddp")
    compare(folder, "hsdp")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"save": save, "same": same, "other": other}[sys.argv[1]](Path(sys.argv[2]))
    dist.destroy_process_group()
