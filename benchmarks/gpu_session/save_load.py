"""Save a model and its AdamW while training goes on, and load them again.

The saved values must be those of the moment of the call, whatever the steps after it did. The time
for which `save` blocks is compared with a copy of all bytes over the link, and so is `load`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.bare_loop import bare_loop_s
from benchmarks.gpu_session.importable import is_importable
from benchmarks.gpu_session.memory import peaks
from benchmarks.gpu_session.models import adamw, copied, different, stack, state_of, train
from benchmarks.gpu_session.session import StepRun
from benchmarks.gpu_session.timing import clocked, link_s_per_byte, synchronize

WIDTH, LAYERS = 8192, 16
"""4.3 GB of float32 weights, 12.9 GB with both moments."""
GOAL = 0.6
"""The share of the link's rate that `load` should reach."""
COPIES_ON_DEVICE, COPIES_ON_HOST = 5, 5
"""How often all that is saved exists at a time, at most: live, expected, loaded, gradients and slack; in pinned
memory, in two files, and slack."""


def run(step: StepRun) -> None:
    width, layers = (64, 2) if step.is_tiny else (WIDTH, fitting(step))
    nbytes_link = 1 << 16 if step.is_tiny else 1 << 30
    up = link_s_per_byte(step.device, nbytes_link)
    down = link_s_per_byte(step.device, nbytes_link, up=False)
    model, optimizer, nbytes = trained(step, layers, width)
    plain_s = training_s(step, model, optimizer)
    path = step.work / "saved"
    for turn in ("first", "second"):
        with step.result.attempt(f"{turn} save"), peaks(step, f"{turn} save"):
            wanted = save_and_train(step, turn, path, model, optimizer, nbytes * down, plain_s)
    del model, optimizer
    with step.result.attempt("bare loop"):
        files = [file for file in path.iterdir() if file.suffix == ".distcp"]
        bare = min(bare_loop_s(files, step.device) for _ in range(3))
        step.result.figure("the same files read and sent by a bare loop", nbytes / bare / 1e9, "GB/s",
                           ratio=nbytes * up / bare, of="the pinned link")  # fmt: skip
    for verify in ("none", "stored", "none", "stored"):  # the first one imports, too
        with step.result.attempt(f"load, verify={verify!r}"):
            load(step, path, wanted, layers, width, verify, nbytes, nbytes * up)
    shutil.rmtree(path, ignore_errors=True)
    del wanted
    with step.result.attempt("safetensors"):
        beside_safetensors(step, width, min(layers, 4), up)


def beside_safetensors(step: StepRun, width: int, layers: int, up: float) -> None:
    """Report how fast a safetensors file comes into a model on the device, and into tensors by its library."""
    if not is_importable("safetensors"):
        step.result.note("a safetensors file: not loaded: needs safetensors")
        return
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    import ckptmap

    model = stack(layers, width, step.device)
    wanted, file = copied(state_of(model)), step.work / "model.safetensors"
    save_file({name.removeprefix("model."): w.cpu() for name, w in wanted.items()}, file)

    def prefetched() -> None:
        with safe_open(file, framework="pt", device=step.device) as opened:
            opened.prefetch()
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                opened.get_tensor(name)

    jobs: dict[str, Callable[[], Any]] = {
        "ckptmap.load": lambda: ckptmap.load(file, model),
        "safetensors' load_file": lambda: load_file(file, device=step.device),
    }
    if hasattr(safe_open, "prefetch"):
        jobs["safetensors' prefetch"] = prefetched
    nbytes = file.stat().st_size
    for what, job in jobs.items():
        took = min(clocked(job, step.device) for _ in range(2))
        step.result.figure(f"a safetensors file by {what}", nbytes / took / 1e9, "GB/s",
                           ratio=nbytes * up / took, of="the pinned link")  # fmt: skip
    wrong = different(wanted, state_of(model))
    step.result.check(f"a safetensors file: {len(wanted)} tensors", not wrong, str(wrong[:6]) if wrong else "")  # fmt: skip


def fitting(step: StepRun) -> int:
    """Return how many layers the memory of the device and of the host has room for."""
    import os

    import torch

    layer = 3 * 4 * WIDTH * WIDTH
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // COPIES_ON_HOST
    free = torch.cuda.mem_get_info()[0] // COPIES_ON_DEVICE if step.on_cuda else host
    disk = shutil.disk_usage(step.work).free // 3
    layers = max(1, min(LAYERS, host // layer, free // layer, disk // layer))
    if layers < LAYERS:
        step.result.note(f"{layers} layers of {LAYERS}: there is room for no more")
    return layers


def trained(step: StepRun, layers: int, width: int) -> tuple[Any, Any, int]:
    """Return a model and its optimizer after two steps of training, and the bytes of their state."""
    model = stack(layers, width, step.device)
    optimizer = adamw(model)
    train(model, optimizer, 0, 2, step.device)
    nbytes = sum(tensor.nbytes for tensor in state_of(model, optimizer).values())
    step.result.figure("model and optimizer", nbytes / 1e9, "GB")
    return model, optimizer, nbytes


def training_s(step: StepRun, model: Any, optimizer: Any) -> float:
    """Return the seconds of a training step while nothing is saved."""
    count = 3
    synchronize(step.device)
    start = time.perf_counter()
    train(model, optimizer, 2, 2 + count, step.device)
    synchronize(step.device)
    return (time.perf_counter() - start) / count


def save_and_train(
    step: StepRun, turn: str, path: Path, model: Any, optimizer: Any, copy_s: float, plain_s: float
) -> dict[str, Any]:
    """Save in the background, train on until it is done, and return what was to be saved."""
    import ckptmap

    wanted = copied(state_of(model, optimizer))
    synchronize(step.device)
    start = time.perf_counter()
    handle = ckptmap.save(path, model, optimizer, step=1, overwrite=True)
    blocked = time.perf_counter() - start
    steps = 0
    while steps < 3 or not handle.done:
        train(model, optimizer, 10 + steps, 11 + steps, step.device)
        steps += 1
    synchronize(step.device)
    training = (time.perf_counter() - start - blocked) / steps
    handle.wait()
    whole = time.perf_counter() - start
    found = step.result
    found.figure(f"{turn} save: blocked", blocked, "s", ratio=blocked / copy_s, of="a copy of all bytes to pinned memory")  # fmt: skip
    found.figure(f"{turn} save: published after", whole, "s")
    found.figure(f"{turn} save: steps of training meanwhile", steps)
    found.figure(f"{turn} save: a step of training meanwhile", training, "s", ratio=training / plain_s, of="one alone")  # fmt: skip
    return wanted


def load(
    step: StepRun, path: Path, wanted: dict[str, Any], layers: int, width: int, verify: str,
    nbytes: int, copy_s: float,
) -> None:  # fmt: skip
    """Load into another model; check that every tensor is as it was when `save` was called."""
    import ckptmap
    from ckptmap.live.options import DEVICE_MEMORY, MAX_MEMORY

    model = stack(layers, width, step.device, seed=1)
    optimizer = adamw(model)
    train(model, optimizer, 0, 1, step.device)
    synchronize(step.device)
    start = time.perf_counter()
    most = DEVICE_MEMORY if step.on_cuda else MAX_MEMORY
    with peaks(step, f"load, verify={verify!r}", most):
        ckptmap.load(path, model, optimizer, verify=verify)
    synchronize(step.device)
    took = time.perf_counter() - start
    step.result.figure(
        f"load, verify={verify!r}", nbytes / took / 1e9, "GB/s", ratio=copy_s / took, of="the pinned link",
        goal=GOAL,
    )  # fmt: skip
    wrong = different(wanted, state_of(model, optimizer))
    step.result.check(
        f"load, verify={verify!r}: {len(wanted)} tensors are as they were when save was called",
        not wrong, f"{len(wrong)} differ: {sorted(wrong)[:6]}" if wrong else "",
    )  # fmt: skip
