"""Two models of accelerate under FSDP2: saved by it, loaded by number with our hooks.

PYTHONPATH=examples python -m tests.ranks.accelerate_several FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate_compiled import accelerator
from small_net import build, ranks, train

from ckptmap.integrations.accelerate import install


def run(seed: int) -> tuple[Any, list[tuple[Any, Any]]]:
    made, pairs = accelerator(), []
    for number in range(2):  # FSDP2 prepares one model a call
        model = build(seed + number)
        pairs.append(made.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    return made, pairs


def main(folder: Path) -> None:
    made, pairs = run(0)
    for model, optimizer in pairs:
        train(model, optimizer, 0, 2)
    made.save_state(str(folder / "out"))
    assert (folder / "out" / "pytorch_model_fsdp_1").is_dir()
    again, others = run(7)
    with install(again) as handle:
        again.load_state(str(folder / "out"))
    assert set(handle.reports) == {"model", "model_1"}, handle.reports
    for (model, optimizer), (other, theirs) in zip(pairs, others, strict=True):
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.to_local(), two.to_local())
            state = theirs.state[two]["exp_avg"]
            assert torch.equal(optimizer.state[one]["exp_avg"].to_local(), state.to_local())
        train(other, theirs, 2, 3)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with ranks():
        main(Path(sys.argv[1]))
