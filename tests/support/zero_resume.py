"""Models that go on from a checkpoint of DeepSpeed, one of them filled by hand from what DeepSpeed had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.golden import truth
from tests.golden.deepspeed.make_deepspeed import STEPS, Net, Run, groups_of, model_of


def untrained(run: Run) -> Net:
    """A model of the run in fp32, with other weights."""
    model = model_of(replace(run, dtype="fp32"))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(3.0)
    return model


def groups_in_order(run: Run, model: Net) -> list[dict[str, Any]]:
    """The groups of the run, with hyper-parameters that are not the run's."""
    return [{**group, "weight_decay": 0.7} for group in groups_of(model, run.groups)]


def resumed_by_hand(folder: Path, run: Run) -> tuple[Net, torch.optim.Optimizer]:
    """Return model and optimizer with the weights, moments and hyper-parameters of the run."""
    model = untrained(run)
    masters, moments = truth.under("masters/", folder), truth.moments(folder)
    frozen = truth.weights(folder)
    state: dict[int, dict[str, Any]] = {}
    names = dict(model.named_parameters())
    name_of = {value: name for name, value in names.items()}
    with torch.no_grad():
        for name, value in names.items():
            start = masters.get(name, frozen.get(name))
            value.copy_(model_of(run).get_parameter(name) if start is None else start)
    optimizer = torch.optim.AdamW(groups_of(model, run.groups), lr=1e-2)
    number = 0
    for group in optimizer.param_groups:
        for value in group["params"]:
            state[number] = {**moments[name_of[value]], "step": torch.tensor(float(STEPS))}
            number += 1
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return model, optimizer


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step with gradients that follow from the weights' names and places alone: the same on any sharding."""
    for number, (name, value) in enumerate(model.named_parameters()):
        if value.requires_grad:
            generator = torch.Generator().manual_seed(number + len(name))
            whole = torch.randn(value.shape, generator=generator)
            value.grad = _like(whole, value)
    optimizer.step()


def _like(whole: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(value, DTensor):
        return distribute_tensor(whole, value.device_mesh, value.placements)
    return whole
