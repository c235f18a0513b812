"""Measure `ckptmap.load` into a live model against torch's own functions: time and peak memory.

    python -m benchmarks.resume [--ranks 4] [--layers 8] [--width 1024] [--repeats 3] [--only same-layout]

same-layout   a DCP checkpoint of the same mesh
    dcp       dcp.load + set_model_state_dict + set_optimizer_state_dict
    ckptmap   ckptmap.load
one-file      a torch.save file of one process
    full      torch.load on rank 0, set_*_state_dict(full_state_dict, broadcast_from_rank0)
    full-all  torch.load on every rank, set_*_state_dict(full_state_dict)
    ckptmap   ckptmap.load

Saves are measured by `resume_save.py`. CPU is user and system time of all ranks. Memory is what a rank needs in addition to its model and
optimizer: the peak of RssAnon while it loads, minus RssAnon before, after freed memory was returned to the system.
`--only` takes the beginnings of names: "full on every rank" needs the whole checkpoint once a rank.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptmap

SAMPLE_S = 0.002


def build(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Return an AdamW optimizer that has taken a step, so that it has state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def sharded(layers: int, width: int) -> tuple[nn.Module, torch.optim.AdamW]:
    model = build(layers, width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer_of(model)


# ------------------------------------------------------------------------------- contestants


def by_dcp(path: Path, model: Any, optimizer: Any) -> None:
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def by_full(path: Path, model: Any, optimizer: Any, everywhere: bool) -> None:
    read = everywhere or dist.get_rank() == 0
    state: Any = torch.load(path, map_location="cpu") if read else {"model": {}, "optimizer": {}}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not everywhere)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def by_ckptmap(path: Path, model: Any, optimizer: Any) -> None:
    ckptmap.load(path, model, optimizer)


CONTESTANTS: dict[str, tuple[str, Callable[[Path, Any, Any], None]]] = {
    "same-layout dcp": ("dcp", by_dcp),
    "same-layout ckptmap": ("dcp", by_ckptmap),
    "one-file full": ("one.pt", lambda p, m, o: by_full(p, m, o, False)),
    "one-file full-all": ("one.pt", lambda p, m, o: by_full(p, m, o, True)),
    "one-file ckptmap": ("one.pt", by_ckptmap),
}


# ------------------------------------------------------------------------------- measuring


def anonymous() -> int:
    """Return the RssAnon of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


class Peak:
    """The peak of RssAnon of this process in the block."""

    def __enter__(self) -> Peak:
        self.nbytes = anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.nbytes = max(self.nbytes, anonymous())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(name: str, folder: Path, layers: int, width: int) -> tuple[float, float, int]:
    """Return the seconds until all ranks have loaded, CPU seconds of all ranks, and the most additional bytes of
    a rank."""
    file, load = CONTESTANTS[name]
    model, optimizer = sharded(layers, width)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    before, used = anonymous(), time.process_time()
    with Peak() as peak:
        started = time.monotonic()
        load(folder / file, model, optimizer)
        dist.barrier()
        seconds = time.monotonic() - started
    cpu = torch.tensor([time.process_time() - used], dtype=torch.float64)
    extra = torch.tensor([peak.nbytes - before])
    dist.all_reduce(cpu)
    dist.all_reduce(extra, dist.ReduceOp.MAX)
    return seconds, float(cpu), int(extra)


def prepare(folder: Path, layers: int, width: int) -> None:
    """Write the DCP checkpoint and the torch.save file, with the same weights."""
    model, optimizer = sharded(layers, width)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder / "dcp")  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        whole = build(layers, width)
        filled = optimizer_of(whole)
        torch.save(
            {
                "model": whole.state_dict(),
                "optimizer": get_optimizer_state_dict(whole, filled),
            },
            folder / "one.pt",
        )
    dist.barrier()


def chosen(names: Iterable[str], only: str) -> list[str]:
    """Return the names that begin with one of those that `only` has, set apart by commas; empty: all."""
    return [name for name in names if name.startswith(tuple(only.split(",")))]


def rank_main(folder: Path, layers: int, width: int, repeats: int, only: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    prepare(folder, layers, width)
    names = chosen(CONTESTANTS, only)
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:  # in turn, so that the machine is in the same state for all
            found[name].append(measure(name, folder, layers, width))
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    from tests.corpus.ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="beginnings of names, set apart by commas")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ckptmap-resume-") as folder:
        args = [folder, *map(str, (asked.layers, asked.width, asked.repeats, asked.only))]
        run_ranks("benchmarks.resume", asked.ranks, ["--rank", *args], timeout=1800)
        found = json.loads((Path(folder) / "found.json").read_text())
    nbytes = 3 * 4 * asked.layers * asked.width**2
    print(f"{asked.ranks} ranks, {nbytes / 1e6:.0f} MB of weights and moments in float32")
    for name, runs in found.items():
        seconds, cpu, extra = (statistics.median(run[at] for run in runs) for at in range(3))
        print(f"{name:22} {seconds:8.2f} s {cpu:8.2f} s CPU {extra / 1e6:9.1f} MB more a rank")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), *map(int, sys.argv[3:6]), sys.argv[6])
    else:
        main()
