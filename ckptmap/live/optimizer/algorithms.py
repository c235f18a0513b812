"""Which kind of optimizer state and hyper-parameters are for, and in whose words they are.

torch.optim.SGD        lr, momentum, dampening, ...       state momentum_buffer
bitsandbytes' SGD      lr, betas = (momentum, dampening)  state momentum_buffer
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

STATES = (
    ("AdEMAMix", {"exp_avg_slow"}),
    ("Adamax", {"exp_inf"}),
    ("Adadelta", {"acc_delta"}),
    ("Adam", {"exp_avg", "exp_avg_sq"}),
    ("RMSprop", {"square_avg"}),
    ("SGD", {"momentum_buffer"}),
    ("Adagrad", {"sum"}),
)
"""Told by state that only it keeps, the more telling first."""
LION = {"exp_avg"}
"""All that Lion keeps; others keep it beside more."""
MARKS = {
    "betas": "Adam",
    "beta2_decay": "Adafactor",
    "alpha": "RMSprop",
    "lr_decay": "Adagrad",
    "momentum": "SGD",
}
"""Told by a hyper-parameter, where there is no state."""
MUON = {"ns_steps", "ns_coefficients"}
"""Told by any of these before all state: torch keeps it under SGD's name."""
OTHERS = "another optimizer"

FIRST_BETA = {"SGD": "momentum", "RMSprop": "alpha", "Adagrad": ""}
"""What bitsandbytes passes as the first of its betas, of optimizers that have none. The second is
not read by its kernels."""
SHARED = {
    "SGD": ("lr", "initial_lr", "weight_decay"),
    "RMSprop": ("lr", "initial_lr", "weight_decay", "eps"),
    "Adagrad": ("lr", "initial_lr", "weight_decay", "eps"),
}
WITHOUT = ("nesterov", "dampening", "centered", "lr_decay", "maximize")
"""Hyper-parameters of torch's that bitsandbytes has no counterpart for."""


def algorithm(group: Mapping[str, Any], state: Collection[str] = ()) -> str:
    """What kind of optimizer such hyper-parameters are for; those of another mean other things.
    `state`: canonical names of what a parameter of the group has."""
    if MUON & group.keys():
        return "Muon"
    kept = set(state) - {"step"}
    if kept == LION:
        return "Lion"
    for name, names in STATES:
        if names <= kept:
            return name
    return next((name for key, name in MARKS.items() if key in group), OTHERS)


def spoken(kind: str, values: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's hyper-parameters in the words of the live group, of the same algorithm."""
    theirs, ours = "betas" in values, "betas" in live
    if kind not in SHARED or theirs == ours:
        return dict(values)
    found = {key: values[key] for key in SHARED[kind] if key in values}
    first = FIRST_BETA[kind]
    if theirs and first:
        found[first] = values["betas"][0]
    elif first and first in values:
        found["betas"] = (values[first], *live["betas"][1:])
    return found


def unspoken(kind: str, values: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """Settings in use there that the live group has no word for."""
    if kind not in SHARED or "betas" in values or "betas" not in live:
        return []
    return [f"{key}: was {values[key]}, is not known here" for key in WITHOUT if values.get(key)]
