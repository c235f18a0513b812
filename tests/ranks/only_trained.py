"""Only the trained layers of an FSDP2 model are saved, over a base, and both are loaded.

python -m tests.ranks.only_trained FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckptmap
from ckptmap.errors import ArgumentError
from tests.live.save.test_only_trained import net
from tests.ranks.resume_save import expect
from tests.support.cpu_sharding import fully_shard


def sharded(seed: int) -> Any:
    model = net(seed)
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer)
    return fully_shard(model) or model


def main(folder: Path) -> None:
    ckptmap.save(folder / "base", sharded(0)).wait()
    model = sharded(1)
    ckptmap.load(folder / "base", model)
    with torch.no_grad():
        model[2].weight.mul_(2)
    ckptmap.save(folder / "c", model, only="trainable").wait()
    again = sharded(2)
    report = ckptmap.load(folder / "c", again, exact=True)
    assert report.inexact == (), report.inexact
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())
    stages(folder)


def stage() -> Any:
    """One layer of a model, as a stage of a pipeline: its name is the rank's."""
    return nn.ModuleDict({str(dist.get_rank()): nn.Linear(4, 3)})


def stages(folder: Path) -> None:
    """A pattern may name weights of one stage alone; it must name some of any stage."""
    ckptmap.save(folder / "stages", stage()).wait()
    model = stage()
    ckptmap.load(folder / "stages", model, drop=["0.*" if dist.get_rank() else "1.*"])
    expect(
        ArgumentError, "only='typo.*': no tensor", lambda: part(folder, model, ["0.*", "typo.*"])
    )
    part(folder, model, "0.*")
    with ckptmap.open(folder / "part") as ckpt:
        assert [*ckpt] == ["0.bias", "0.weight"] or [*ckpt] == ["0.weight", "0.bias"], [*ckpt]


def part(folder: Path, model: Any, only: Any) -> None:
    ckptmap.save(folder / "part", model, only=only).wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
