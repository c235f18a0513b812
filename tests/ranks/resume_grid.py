"""Every wrapping in every mode loads what the one before it saved, and saves it again: on 1 rank and on 4, and on one
of 2 and 3. A mode changes names, and leaves how tensors are cut to the wrapping.

python -m tests.ranks.resume_grid FOLDER START      START is a checkpoint under FOLDER

Values are compared with FOLDER/truth.pt by torch's own gathering, or, where that has no names for
such a wrapping, tensor by tensor in what was saved.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptmap
from tests.support.resume_model import built


def cases(world: int) -> list[tuple[str, str]]:
    wraps = ["plain", "ddp", "fsdp1", "fsdp1-flat", "fsdp2", "hsdp"]
    modes = ["eager", "compiled", "compiled-layers", "checkpointed"]
    half = world % 2 if world in (2, 3) else None
    return [
        (wrap, mode)
        for row, wrap in enumerate(wraps)
        for column, mode in enumerate(modes)
        if half is None or (row + column) % 2 == half
    ]


def main(folder: Path, start: str) -> None:
    truth = torch.load(folder / "truth.pt")
    world = dist.get_world_size()
    source = folder / start
    for number, (wrap, mode) in enumerate(cases(world)):
        model = built(wrap, mode, seed=100 + number)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        report = ckptmap.load(source, model, optimizer)
        assert report.state is not None and not report.state.initialised, report
        assert not (report.cast or report.state.cast or report.state.recoded), report
        assert optimizer.param_groups[0]["lr"] == 0.01, optimizer.param_groups
        target = folder / f"world{world}" / f"{wrap}-{mode}"
        ckptmap.save(target, model, optimizer, step=number).wait()
        if dist.get_rank() == number % world:
            compare(target, truth)
        source = target
    dist.barrier()


def compare(path: Path, truth: dict[str, Any]) -> None:
    """Weights and moments that were saved have the bits of the truth."""
    with ckptmap.open(path) as ckpt:
        assert set(ckpt) == set(truth["model"]), path
        for name, want in truth["model"].items():
            assert torch.equal(ckpt[name].read(), want), (path, name)
        assert set(ckpt.optimizer) == set(truth["state"]), path
        for name, state in truth["state"].items():
            found = ckpt.optimizer[name]
            assert set(found) == set(state), (path, name)
            for key, want in state.items():
                assert torch.equal(found[key].read(), want), (path, name, key)
    assert ckptmap.verify(path).ok, path


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), sys.argv[2])
    dist.barrier()
    dist.destroy_process_group()
