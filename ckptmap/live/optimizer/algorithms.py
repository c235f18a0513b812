"""The algorithm that optimizer state and hyper-parameters belong to, and their names in each library.

torch.optim.SGD        lr, momentum, dampening, ...       state momentum_buffer
bitsandbytes' SGD      lr, betas = (momentum, dampening)  state momentum_buffer
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

STATES = (
    ("AdEMAMix", {"exp_avg_slow"}),
    ("Adamax", {"exp_inf"}),
    ("Adadelta", {"acc_delta"}),
    ("Adam", {"exp_avg", "exp_avg_sq"}),
    ("RMSprop", {"square_avg"}),
    ("SGD", {"momentum_buffer"}),
    ("Adagrad", {"sum"}),
)
"""Algorithm -> state that identifies it; the more specific ones first."""
LION = {"exp_avg"}
"""All state of Lion; other algorithms keep it beside more."""
MARKS = {
    "betas": "Adam",
    "beta2_decay": "Adafactor",
    "alpha": "RMSprop",
    "lr_decay": "Adagrad",
    "momentum": "SGD",
    "history_size": "LBFGS",
}
"""Hyper-parameter -> the algorithm that it identifies, where there is no state."""
MUON = {"ns_steps", "ns_coefficients"}
"""Hyper-parameters that identify Muon before any state, whose name in torch is SGD's."""
OTHERS = "another optimizer"

FIRST_BETA = {"SGD": "momentum", "RMSprop": "alpha", "Adagrad": ""}
"""Hyper-parameter that bitsandbytes passes as the first of its betas, for algorithms without betas.
Its kernels do not read the second."""
SHARED = {
    "SGD": ("lr", "initial_lr", "weight_decay"),
    "RMSprop": ("lr", "initial_lr", "weight_decay", "eps"),
    "Adagrad": ("lr", "initial_lr", "weight_decay", "eps"),
}
WITHOUT = ("nesterov", "dampening", "centered", "lr_decay", "maximize")
"""Hyper-parameters of torch.optim that bitsandbytes does not have."""


def algorithm(group: Mapping[str, object], state: Collection[str] = ()) -> str:
    """Return the algorithm of a parameter group: hyper-parameters of one name mean different things in
    different algorithms. `state` has the canonical names of a parameter's state."""
    if MUON & group.keys():
        return "Muon"
    names_of_state = set(state) - {"step"}
    if names_of_state == LION:
        return "Lion"
    for name, names in STATES:
        if names <= names_of_state:
            return name
    return next((name for key, name in MARKS.items() if key in group), OTHERS)


def by_live_names(
    kind: str, values: Mapping[str, object], live: Mapping[str, object]
) -> dict[str, object]:
    """Return the checkpoint's hyper-parameters by the names of the live group, of the same algorithm."""
    stored_has_betas, live_has_betas = "betas" in values, "betas" in live
    if kind not in SHARED or stored_has_betas == live_has_betas:
        return dict(values)
    renamed = {key: values[key] for key in SHARED[kind] if key in values}
    first = FIRST_BETA[kind]
    if stored_has_betas and first:
        renamed[first] = _betas(values)[0]
    elif first and first in values:
        renamed["betas"] = (values[first], *_betas(live)[1:])
    return renamed


def _betas(group: Mapping[str, object]) -> Sequence[object]:
    betas = group["betas"]
    assert isinstance(betas, Sequence), betas
    return betas


def settings_without_live_name(
    kind: str, values: Mapping[str, object], live: Mapping[str, object]
) -> list[str]:
    """Return the settings of the checkpoint that the live group does not have."""
    if kind not in SHARED or "betas" in values or "betas" not in live:
        return []
    return [f"{key}: was {values[key]}, is not known here" for key in WITHOUT if values.get(key)]
