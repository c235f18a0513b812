"""State of parameters that were not all stepped alike, into one flat parameter: `python -m ... DIR`.

A model of one process is trained so that one parameter has no state, or counts fewer steps. FSDP1
with use_orig_params=False, whose optimizer has been stepped before, loads it.
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import ckptmap
from ckptmap.live.model.load_report import LoadReport
from tests.corpus.writers_fsdp1 import gathered


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def step(optimizer: torch.optim.Optimizer, without: int | None = None) -> None:
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            p.grad = None if i == without else torch.full_like(p, 0.1 * (i + 1))
    optimizer.step()


def trained(without: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Three steps, of which parameter `without` misses the first `steps`."""
    model = net(0)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    for n in range(3):
        step(optimizer, without if n < steps else None)
    return model, optimizer


def loaded(
    path: Path, without: int, steps: int
) -> tuple[LoadReport, dict[str, dict[str, torch.Tensor]], dict[str, dict[str, torch.Tensor]]]:
    """The report, the state of the flat parameter by name, and that of the plain model."""
    plain, stepped = trained(without, steps)
    if dist.get_rank() == 0:
        torch.save({"model": plain.state_dict(), "optimizer": stepped.state_dict()}, path)
    dist.barrier()
    model = FSDP(net(1), use_orig_params=False, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(optimizer)
    report = ckptmap.load(path, model, optimizer)
    truth = {n: dict(stepped.state.get(p, {})) for n, p in plain.named_parameters()}
    found = gathered(model, optimizer).optimizer
    return report, {n: dict(s) for n, s in found.items()}, truth


def check_missing(folder: Path) -> None:
    """One that was never stepped begins at zero, and is named; the others keep theirs."""
    report, found, truth = loaded(folder / "missing.pt", 1, 3)
    assert not truth.pop("0.bias")
    for fqn, states in truth.items():
        for name, value in states.items():
            assert torch.equal(found[fqn][name], value), (fqn, name)
    assert not found["0.bias"]["exp_avg"].any() and not found["0.bias"]["exp_avg_sq"].any()
    assert report.state is not None
    lost = [name for name in report.state.initialised if name.startswith("0.bias.")]
    assert len(lost) == len(report.state.initialised), report.state.initialised
    assert any("0.bias: state begins anew" in why for why in report.inexact), report.inexact


def check_steps(folder: Path) -> None:
    """One that was stepped once where the others were three times: the count is three, and said."""
    report, found, truth = loaded(folder / "steps.pt", 0, 2)
    assert {float(states["step"]) for states in truth.values()} == {1.0, 3.0}
    for fqn, states in truth.items():
        assert float(found[fqn]["step"]) == 3.0
        assert torch.equal(found[fqn]["exp_avg"], states["exp_avg"]), fqn
    assert report.state is not None
    (said,) = report.state.settings
    assert "the checkpoint has 1, 3; is 3" in said, said
    assert any(".step: its flat parameter counts one" in why for why in report.inexact)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the deprecations of FSDP's own state dicts
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    folder = Path(sys.argv[1])
    check_missing(folder)
    check_steps(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
