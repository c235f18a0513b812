"""The optimizers of the tests by short name, as a training run would build them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def torchao(name: str, **options: Any) -> Callable[[Iterable[Tensor]], Any]:
    def build(params: Iterable[Tensor]) -> Any:
        import torchao.optim

        return getattr(torchao.optim, name)(params, lr=1e-2, **options)

    return build


def bnb(name: str, **options: Any) -> Callable[[Iterable[Tensor]], Any]:
    def build(params: Iterable[Tensor]) -> Any:
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
        import bitsandbytes

        return getattr(bitsandbytes.optim, name)(params, **{"lr": 1e-2, **options})

    return build


SR = {"bf16_stochastic_round": True}

ROUNDING: dict[str, Callable[[Iterable[Tensor]], Any]] = {
    "ao": torchao("_AdamW", **SR),
    "ao8": torchao("AdamW8bit", **SR),
    "ao4": torchao("AdamW4bit", **SR),
    "aofp8": torchao("AdamWFp8", **SR),
}
"""Those that round stochastically."""

LOW_BIT: dict[str, Callable[[Iterable[Tensor]], Any]] = {
    name + "-sr" * rounds: torchao(name, bf16_stochastic_round=rounds)
    for name in (
        "Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW",
    )
    for rounds in (False, True)
    if not (rounds and "AdamW" in name)
}  # fmt: skip
"""torchao's others: all of its optimizers, with and without stochastic rounding, are here or there."""

TORCH: dict[str, Callable[[Iterable[Tensor]], Any]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}

BNB: dict[str, Callable[[Iterable[Tensor]], Any]] = {
    "bnb8": bnb("AdamW8bit"),
    "bnb8-paged": bnb("PagedAdamW8bit"),
    "bnb32": bnb("AdamW"),
    "lamb8": bnb("LAMB8bit"),
}

BNB_OTHERS: dict[str, Callable[[Iterable[Tensor]], Any]] = {
    "ademamix8": bnb("AdEMAMix8bit"),
    "lion8": bnb("PagedLion8bit", lr=1e-3),
    "sgd8": bnb("SGD8bit", momentum=0.9),
    "lars8": bnb("LARS8bit", momentum=0.9),
    "rmsprop8": bnb("RMSprop8bit", lr=1e-3),
    "adagrad8": bnb("Adagrad8bit"),
}
"""Those whose states are not Adam's two; all of bitsandbytes' step on the CPU."""

ALL = {**TORCH, **ROUNDING, **BNB, **BNB_OTHERS}


def step_at_random(model: Any, optimizer: Any, steps: int = 1) -> None:
    """Take steps with random gradients."""
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    optimizer.zero_grad()


def inner(value: Any) -> list[Tensor]:
    """The plain tensors that a state tensor is made of, on this rank."""
    local = value.to_local() if hasattr(value, "to_local") else value
    if hasattr(local, "codes"):
        return [local.codes.view(torch.uint8), local.scale]
    return [local]


def same_state(first: Any, second: Any) -> list[str]:
    """What differs between two optimizers over parameters in the same order."""
    wrong = []
    pairs = [
        (number, a, b)
        for ours, theirs in zip(first.param_groups, second.param_groups, strict=True)
        for number, (a, b) in enumerate(zip(ours["params"], theirs["params"], strict=True))
    ]
    for number, a, b in pairs:
        one, two = first.state[a], second.state[b]
        if one.keys() != two.keys():
            wrong.append(f"{number}: {set(one)} and {set(two)}")
            continue
        wrong += [f"{number}.{k}" for k in one if not same_value(one[k], two[k])]
    return wrong


def same_value(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == two)
    ones, twos = inner(one), inner(two)
    return (
        type(one) is type(two)
        and one.dtype == two.dtype
        and len(ones) == len(twos)
        and all(torch.equal(x, y) for x, y in zip(ones, twos, strict=True))
    )
