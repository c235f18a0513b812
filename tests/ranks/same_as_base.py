"""A frozen weight that one rank alone has changed is saved by all; ranks that give different `only` are told.

python -m tests.ranks.same_as_base FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

import ckptmap
from ckptmap.errors import ArgumentError
from ckptmap.live.model import loaded_bases
from tests.live.save.test_only_trained import net
from tests.ranks.only_trained import sharded
from tests.support.cpu_sharding import fully_shard
from tests.support.live_model import QUANTIZED, write
from tests.support.live_model import net as quantized_net


def fsdp1(seed: int) -> Any:
    return FullyShardedDataParallel(net(seed), use_orig_params=True, device_id=torch.device("cpu"))


def one_rank_changes(folder: Path, make: Callable[[int], Any], changed: str) -> None:
    ckptmap.save(folder / "base", make(0)).wait()
    model = make(1)
    ckptmap.load(folder / "base", model)
    for expected in (False, True):
        path = folder / f"c-{expected}"
        ckptmap.save(path, model, only="1.*").wait()
        with ckptmap.open(path) as ckpt:
            assert all(fqn.startswith("1.") or fqn == changed for fqn in ckpt), list(ckpt)
            assert (changed in ckpt) is expected
        for name, param in () if expected else model.named_parameters():
            if name.endswith(changed) and dist.get_rank() == 1:
                local = param.to_local() if hasattr(param, "to_local") else param
                local.data.view(-1)[-1:].add_(1)
    again = make(2)
    ckptmap.load(folder / "c-True", again)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        mine, theirs = (p.to_local() if hasattr(p, "to_local") else p for p in (a, b))
        assert torch.equal(mine, theirs)
    with pytest.raises(ArgumentError, match=r"only: is \[.*\] on rank 0 and \[.*\] on rank 1"):
        ckptmap.save(folder / "d", model, only=f"{1 + dist.get_rank()}.*")
    dist.barrier()


def sharded_nf4(folder: Path) -> None:
    """Sharded codes are the base's, whether a load of this run is remembered or not; changed ones are saved."""
    if dist.get_rank() == 0:
        folder.mkdir()
        write(folder)
    dist.barrier()
    model: Any = quantized_net(4)
    for name in QUANTIZED:
        fully_shard(model.get_submodule(name.removesuffix(".weight")))
    fully_shard(model)
    ckptmap.load(folder / "nf4.pt", model)
    codes = model.up.weight.to_local().quantized_data
    for number, expected in enumerate(
        [["norm.weight"], ["norm.weight"], ["norm.weight", "up.weight"]]
    ):
        path, base = folder / f"c{number}", folder / "nf4.pt" if number else None
        if number:
            loaded_bases._PROOFS.clear()
        if number == 2 and dist.get_rank() == 1:
            codes[0] ^= 0x11
        ckptmap.save(path, model, only="norm.*", base=base).wait()
        with ckptmap.open(path) as ckpt:
            assert sorted(ckpt) == expected
    dist.barrier()


def main(folder: Path) -> None:
    sharded_nf4(folder / "nf4")
    one_rank_changes(folder / "fsdp2", sharded, "2.weight")
    one_rank_changes(folder / "fsdp1", fsdp1, "2.bias")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
