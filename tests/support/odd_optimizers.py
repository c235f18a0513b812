"""Optimizers that keep what they like: entries that begin late or end, dicts, lists, None, keys of their own.

They are ours, written for the tests; each stands for something that optimizers of others do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Odd(torch.optim.Optimizer):
    """Counts its steps; subclasses change one entry each."""

    def __init__(self, params: Iterable[Tensor], **group: Any) -> None:
        super().__init__(params, {"lr": 1e-2, **group})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["n"] = state.get("n", 0) + 1
                    param.sub_(param.grad * group["lr"] * self.update(param, state))

    def update(self, param: Tensor, state: dict[str, Any]) -> Any:
        return 1.0


class Nested(Odd):
    """A dict, lists of dicts, tuples, of plain values."""

    def update(self, param: Tensor, state: dict[str, Any]) -> Any:
        if state["n"] == 1:
            state["nested"] = {"sum": 0.0, "at": {"seen": [], "last": (0, "x")}}
            state["listed"] = [{"k": [1]}, [2, {"deep": {"er": 3}}]]
            state["by_number"] = {5: "x", "five": 5}
            state["empty"], state["nothing"], state["pair"] = {}, [], (1, (2,))
        nested = state["nested"]
        nested["sum"] += 1 / state["n"]
        nested["at"]["seen"].append(state["n"])
        nested["at"]["last"] = (state["n"], "x")
        state["listed"][0]["k"].append(state["n"])
        state["listed"][1][1]["deep"]["er"] += 1
        return nested["sum"]


class Late(Odd):
    """A tensor and a number that begin in the second step, as slow weights do."""

    def update(self, param: Tensor, state: dict[str, Any]) -> Any:
        if state["n"] >= 2:
            state["slow"] = state.get("slow", torch.zeros_like(param)).lerp(param, 0.25)
            state["count"] = state.get("count", 0) + 1
        return 1.0 + state.get("count", 0)


class Ending(Odd):
    """A warm-up that ends after the first step, and a tensor that is None from then on."""

    def update(self, param: Tensor, state: dict[str, Any]) -> Any:
        if state["n"] == 1:
            state["warm"], state["w"] = torch.zeros_like(param) + 7, 3
            state["best"] = torch.zeros_like(param)
        else:
            state.pop("warm", None)
            state.pop("w", None)
            state["best"] = None
        return 1.0 + state.get("w", 0)


class Growing(Odd):
    """A history that grows, in another dtype from the second step on."""

    def update(self, param: Tensor, state: dict[str, Any]) -> Any:
        dtype = torch.float64 if state["n"] > 1 else torch.float32
        before = state.get("history", torch.zeros(0, dtype=dtype)).to(dtype)
        state["history"] = torch.cat([before, torch.tensor([1 / state["n"]], dtype=dtype)])
        return float(state["history"].sum())


class Global(Odd):
    """Keeps values and a tensor for no parameter in particular."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        mine = self.state["all"]
        mine["k"] = mine.get("k", 0) + 1
        mine["average"] = mine.get("average", torch.zeros(2)) + 0.5
        mine["by"] = {"rank": torch.distributed.get_rank() if _has_ranks() else 0}
        super().step(closure)

    def update(self, param: Tensor, state: dict[str, Any]) -> Any:
        return 1.0 + self.state["all"]["k"]


class AdamWithAverage(torch.optim.AdamW):
    """torch's own, with an average of the weights in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in (p for group in self.param_groups for p in group["params"]):
            if param in self.state:
                state = self.state[param]
                state["ema"] = state.get("ema", torch.zeros_like(param)).lerp(param.detach(), 0.5)
                state["seen"] = {"steps": state.get("seen", {"steps": 0})["steps"] + 1}


class SgdWithCount(torch.optim.SGD):
    """torch's own, which keeps nothing, with a count."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in (p for group in self.param_groups for p in group["params"]):
            if param.grad is not None:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1


class Ordered(Odd):
    """Keeps a dict of another class than dict, which a checkpoint cannot hold."""

    def update(self, param: Tensor, state: dict[str, Any]) -> Any:
        state["ordered"] = OrderedDict(n=state["n"])
        return 1.0


class OwnKeys(Odd):
    """Has a state dict of its own."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.rounds = 0
        super().__init__(params)

    def update(self, param: Tensor, state: dict[str, Any]) -> Any:
        self.rounds += 1
        return 1.0 + self.rounds

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        self.rounds = rest.pop("rounds")
        super().load_state_dict(rest)


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, as published ones do: slow weights of its own, under `optimizer` the fast one."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.optimizer = torch.optim.SGD([*params], lr=1e-2, momentum=0.9)
        super().__init__(self.optimizer.param_groups, {})
        for param in self.optimizer.param_groups[0]["params"]:
            self.state[param]["slow"] = param.detach().clone()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for param, state in self.state.items():
            state["slow"].lerp_(param.detach(), 0.5)


class Sam(torch.optim.Optimizer):
    """As published ones do: momentum is in an optimizer beside its own state, which shares its groups."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=1e-2, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()


RESTORED: dict[str, Callable[[Iterable[Tensor]], Any]] = {
    cls.__name__: cls
    for cls in (Nested, Late, Ending, Growing, Global, AdamWithAverage, SgdWithCount)
}
"""Those whose state comes back as it was."""
REFUSED: dict[str, tuple[Callable[[Iterable[Tensor]], Any], str]] = {
    "Ordered": (Ordered, "ordered is no longer of the class that it was"),
    "OwnKeys": (OwnKeys, "OwnKeys keeps rounds of its own, which is not saved"),
    "Sam": (Sam, "Sam keeps the state of its base_optimizer, which is not saved"),
    "Lookahead": (Lookahead, "Lookahead keeps state of its own, which is not saved"),
}
"""Those of which something is not saved, and what `exact` says."""


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def described(value: Any) -> Any:
    """Return a value of optimizer state so that equal means equal classes, dtypes and bits."""
    if isinstance(value, Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return type(value).__name__, str(whole.dtype), tuple(whole.shape), whole.tolist()
    if isinstance(value, dict):
        return type(value).__name__, {key: described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [described(item) for item in value]
    return type(value).__name__, value


def state_of(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return all of an optimizer's state, by the names of the parameters, and its groups."""
    known = {name: optimizer.state.get(param, {}) for name, param in model.named_parameters()}
    other = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {
        "state": {name: described(dict(state)) for name, state in known.items()},
        "other": {key: described(dict(state)) for key, state in other.items()},
        "groups": described(groups),
    }
