"""Only the trained layers of an FSDP2 model are saved, over a base, and both are loaded.

python -m tests.ranks.only_trained FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptmap
from tests.live.save.test_only_trained import net
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
