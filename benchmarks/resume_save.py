"""Measure `ckptmap.save` of a live FSDP2 run against torch's own saves: time, CPU, and how long training stands still.

    python -m benchmarks.resume_save [--ranks 4] [--layers 8] [--width 1024] [--repeats 3] [--only synced] [--keep-freed]

synced, while training waits: every byte is on the disk when it returns
    dcp       dcp.save, whose FileSystemWriter syncs its files
    ckptmap   ckptmap.save
not synced: the bytes are in the page cache when it returns, which ckptmap.save does not offer
    dcp       dcp.save with FileSystemWriter(sync_files=False)
in the background: "blocked" is how long the call holds the thread that trains
    dcp       dcp.async_save
    kept dcp  dcp.async_save with a stager that keeps its memory between saves, as torchtitan's
              `async_with_pinned_mem` does; without CUDA its memory is not pinned
    ckptmap   ckptmap.save(background=True)
    manager   CheckpointManager.save, which was called before at a step that was not due: it makes memory then
              in a thread. To be measured by itself, `--only "background dcp,background manager"`: memory is
              shared with `ckptmap`

A run saves twice with the same model, as a training run does; the second save is what is reported, and the
first stands beside it, since memory that is kept between saves is new to the first one. Modules are imported before:
those of dcp by this file, those of ckptmap as `CheckpointManager` does. Seconds are those of the slowest rank, CPU
is user and system time of all ranks, "CPU blocked" that of the threads that train. Below the table stands how long
each save in the background blocks as a multiple of `async_save`: that in CPU is less disturbed by other work of the
machine. `--keep-freed` leaves out that freed memory is returned to the system before each save, which spares
`async_save` most page faults. Memory is what a rank needs in addition to its model and optimizer: the peak of RssAnon.
`--only` takes the beginnings of names: what keeps memory, keeps it while the others are measured.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import ckptmap
from benchmarks.resume import Peak, anonymous, chosen, sharded
from ckptmap.live.save.prepare import prepare

DCP, KEPT = "background dcp", "background kept dcp"
MANAGER = "background manager"
TRAINS_S = 3.0
"""Seconds between the first call of a manager and its first save."""
_managers: list[ckptmap.CheckpointManager] = []
_steps = itertools.count(1)


class Wait(Protocol):
    """Waits until a save is complete."""

    def __call__(self) -> object: ...


@dataclass(frozen=True)
class Run:
    """What one save took: seconds, CPU seconds of all ranks, and bytes."""

    blocked: float
    blocked_cpu: float
    total: float
    cpu: float
    memory: int


# ------------------------------------------------------------------------------- contestants


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def by_dcp(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, sync: bool) -> Wait:
    writer = dcp.FileSystemWriter(path, sync_files=sync)  # type: ignore[attr-defined]
    dcp.save(state_of(model, optimizer), storage_writer=writer)  # type: ignore[attr-defined]
    return lambda: None


def by_async(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, stager: DefaultStager | None
) -> Wait:
    future: Any = dcp.async_save(  # type: ignore[attr-defined]
        state_of(model, optimizer), checkpoint_id=path, async_stager=stager
    )
    return lambda: future.result()


def by_ckptmap(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, background: bool
) -> Wait:
    return ckptmap.save(path, model, optimizer, background=background).wait


def managed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wait:
    """Save the next even step by the manager. Its total has the removal of the step before, which others leave to
    `measure`; else that would go on beside the next save."""
    while _managers[0].save(next(_steps), model, optimizer) is None:
        pass
    return _managers[0].wait


def contestants(stager: DefaultStager) -> Mapping[str, Callable[[Path, Any, Any], Wait]]:
    return {
        "synced dcp": lambda p, m, o: by_dcp(p, m, o, True),
        "synced ckptmap": lambda p, m, o: by_ckptmap(p, m, o, False),
        "not synced dcp": lambda p, m, o: by_dcp(p, m, o, False),
        DCP: lambda p, m, o: by_async(p, m, o, None),
        KEPT: lambda p, m, o: by_async(p, m, o, stager),
        "background ckptmap": lambda p, m, o: by_ckptmap(p, m, o, True),
        MANAGER: lambda p, m, o: managed(m, o),
    }


# ------------------------------------------------------------------------------- measuring


def measure(
    save: Callable[[Path, Any, Any], Wait], path: Path, model: Any, optimizer: Any, keeps: bool
) -> Run:
    """Save once, and return what it took. keeps: whether freed memory is kept in the process."""
    gc.collect()
    if not keeps:
        ctypes.CDLL(None).malloc_trim(0)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    dist.barrier()
    before, used = anonymous(), time.process_time()
    with Peak() as peak:
        started, begun = time.monotonic(), time.thread_time()
        wait = save(path, model, optimizer)
        blocked, held = time.monotonic() - started, time.thread_time() - begun
        wait()
        dist.barrier()
        total = time.monotonic() - started
    most = torch.tensor([blocked, total, float(peak.nbytes - before)], dtype=torch.float64)
    cpu = torch.tensor([time.process_time() - used, held], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return Run(float(most[0]), float(cpu[1]), float(most[1]), float(cpu[0]), int(most[2]))


def rank_main(folder: Path, layers: int, width: int, repeats: int, keeps: int, only: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    prepare()
    model, optimizer = sharded(layers, width)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    found: dict[str, list[list[dict[str, float]]]] = {}
    saves = contestants(stager)
    if MANAGER in chosen(saves, only):
        _managers.append(ckptmap.CheckpointManager(folder / "managed", every=2, keep=1))
        _managers[0].save(next(_steps), model, optimizer)
        time.sleep(TRAINS_S)
    for _ in range(repeats):
        for name in chosen(saves, only):  # in turn: the machine is alike for all
            runs = [
                measure(saves[name], folder / "saved", model, optimizer, bool(keeps))
                for _ in range(2)
            ]
            found.setdefault(name, []).append([asdict(run) for run in runs])
    stager.close()
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def table(found: Mapping[str, list[list[dict[str, float]]]]) -> str:
    """Return the medians as a table of Markdown: of the second saves, and how long the first blocked."""
    lines = [
        "| | blocked, s | (first save) | CPU blocked, s | total, s | CPU, s | more memory a rank, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        second = {key: statistics.median(run[1][key] for run in runs) for key in runs[0][1]}
        first = statistics.median(run[0]["blocked"] for run in runs)
        cells = (
            f"{second['blocked']:.3f}", f"{first:.3f}", f"{second['blocked_cpu']:.3f}",
            f"{second['total']:.2f}", f"{second['cpu']:.2f}", f"{second['memory'] / 1e6:.0f}",
        )  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios(found: Mapping[str, list[list[dict[str, float]]]]) -> str:
    """Return how long each save of ckptmap blocks, as a multiple of each save of dcp in the background."""
    lines = []
    for name, runs in found.items():
        for other in (name for name in (DCP, KEPT) if name in found):
            if not name.startswith("background") or name in (DCP, KEPT):
                continue
            pairs = [(mine, of) for mine, of in zip(runs, found[other], strict=True)]
            wall, cpu, first = (
                statistics.median(mine[at][key] for mine, _ in pairs)
                / statistics.median(of[at][key] for _, of in pairs)
                for at, key in ((1, "blocked"), (1, "blocked_cpu"), (0, "blocked"))
            )
            lines.append(
                f"{name} blocks {wall:.2f}x of {other} (CPU {cpu:.2f}x, first save {first:.2f}x)"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    from tests.corpus.ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="beginnings of names, set apart by commas")
    parser.add_argument("--keep-freed", action="store_true", help="freed memory is not returned")
    parser.add_argument("--work", type=Path, help="an existing folder for what is saved")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ckptmap-save-", dir=asked.work) as folder:
        args = [
            folder,
            *map(
                str, (asked.layers, asked.width, asked.repeats, int(asked.keep_freed), asked.only)
            ),
        ]
        run_ranks("benchmarks.resume_save", asked.ranks, ["--rank", *args], timeout=1800)
        found = json.loads((Path(folder) / "found.json").read_text())
    nbytes = 3 * 4 * asked.layers * asked.width**2
    print(f"{asked.ranks} ranks, {nbytes / 1e6:.0f} MB of weights and moments in float32\n")
    print(table(found))
    print(f"\n{ratios(found)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), *map(int, sys.argv[3:7]), sys.argv[7])
    else:
        main()
