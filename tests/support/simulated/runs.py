"""Conversions, loads and saves with the device, each in a process of its own.

    python -m tests.support.simulated.runs NAME FOLDER

Prints what was found as JSON: the races, the tensors that are not what the CPU makes of them, and the waits of the
thread that called; of the run "without" how much was found without each kind of wait.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptmap
from ckptmap.live.model import reader_threads
from ckptmap.storage import device_copies
from ckptmap.tensors import Box
from tests.support.simulated import kernels, memory
from tests.support.simulated.streams import HOST, MODULE, NAME, Event, Stream

BLOCK_NBYTES = 1 << 12
CORES = 4
WRONG: list[str] = []
WAITS: dict[str, list[str]] = {}
FOUND: dict[str, int] = {}
WITHOUT: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "kernels before a copy": (Stream, "wait_event", lambda *_: None),
    "copies before a kernel": (Stream, "wait_stream", lambda *_: None),
    "copies before a block is filled": (Event, "query", lambda _: True),
    "the host for copies": (Event, "synchronize", lambda _: None),
}
"""Kinds of waits, and how to leave them out."""
SHAPES = {
    "a.q_proj.weight": (128, 128),
    "b.up_proj.weight": (257, 64),
    "c.down_proj.weight": (64, 1024),
    "norm.weight": (67,),
}

CONVERSIONS = [
    ("full", "full-nf4"), ("full", "full-bnb-nf4-dq"), ("full", "hf-fp8"), ("full", "hf-ct-nvfp4"),
    ("full-nf4", "full-int8"), ("full-nf4", "full"), ("hf-ct-int4", "hf-ct-nvfp4"), ("hf-ct-nvfp4", "full-int8"),
]  # fmt: skip


def main(name: str, folder: str) -> None:
    """Run one of RUNS and print what was found."""
    kernels.install()
    device_copies.BLOCK_NBYTES = BLOCK_NBYTES
    reader_threads.LEAST_WORK = reader_threads.LEAST_NBYTES = BLOCK_NBYTES
    os.sched_getaffinity = lambda _: set(range(CORES))
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    RUNS[name](Path(folder))
    memory.settle()
    print(json.dumps({"races": memory.RACES, "wrong": WRONG, "waits": WAITS, "found": FOUND}))


def waits_of(title: str, call: Callable[[], Any]) -> Any:
    """Return what the call returns, and keep why its thread has waited for the device."""
    begin = len(HOST.waits)
    made = call()
    WAITS[title] = [one for one in HOST.waits[begin:] if one.startswith("MainThread: ")]
    return made


# ------------------------------------------------------------------------------- conversions


def convert(folder: Path) -> None:
    _sources(folder)
    for source, to in CONVERSIONS:
        name = f"{source} to {to}"
        ckptmap.convert(folder / source, folder / f"{name} by the CPU", to=to)
        ckptmap.convert(folder / source, folder / name, to=to, device=NAME, threads=2)
        _compare_files(folder, name)


def _sources(folder: Path) -> None:
    maker = torch.Generator().manual_seed(2)
    state = {fqn: torch.randn(shape, generator=maker) for fqn, shape in SHAPES.items()}
    torch.save({fqn: value.bfloat16() for fqn, value in state.items()}, folder / "full")
    for to in ("full-nf4", "hf-ct-int4", "hf-ct-nvfp4"):
        ckptmap.convert(folder / "full", folder / to, to=to)


def without(folder: Path) -> None:
    """Leave out one kind of wait at a time: what is found then is a race, or bytes that are wrong."""
    _sources(folder)
    ckptmap.convert(folder / "full", folder / "full to full-nf4 by the CPU", to="full-nf4")
    for number, (title, (owner, method, nothing)) in enumerate(WITHOUT.items()):
        kept, place = getattr(owner, method), folder / str(number)
        place.mkdir()
        (place / "full to full-nf4 by the CPU").symlink_to(folder / "full to full-nf4 by the CPU")
        setattr(owner, method, nothing)
        ckptmap.convert(folder / "full", place / "full to full-nf4", to="full-nf4", device=NAME)
        setattr(owner, method, kept)
        _compare_files(place, "full to full-nf4")
        memory.settle()
        FOUND[title] = len(memory.RACES) + len(WRONG)
        memory.RACES.clear()
        WRONG.clear()


def _compare_files(folder: Path, name: str) -> None:
    with ckptmap.open(folder / f"{name} by the CPU") as one, ckptmap.open(folder / name) as other:
        for fqn, lazy in one.items():
            for part, stored in lazy.parts.items():
                whole = Box.whole(stored.info.shape)
                _compare(
                    f"{name}: {fqn} {part}",
                    lazy.read_part(part, whole),
                    other[fqn].read_part(part, whole),
                )


def _compare(title: str, wanted: torch.Tensor, found: torch.Tensor) -> None:
    a, b = (one.detach().cpu().reshape(-1).view(torch.uint8) for one in (wanted, found))
    if not torch.equal(a, b):
        WRONG.append(title)


# ------------------------------------------------------------------------------- live models


class Run:
    """A model on a device, and its optimizer, trained for a step."""

    def __init__(self, seed: int, device: str = NAME, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        layers = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 64)
        self.model = nn.Sequential(*layers)
        self.model.register_buffer("cache", torch.arange(100.0), persistent=False)
        self.model.to(device, dtype)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())
        self.step()

    def step(self) -> None:
        param = self.model[0].weight
        self.model(torch.ones(4, 64, device=param.device, dtype=param.dtype)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> Mapping[str, torch.Tensor]:
        """Return copies of all values, on the CPU, without a wait for the device."""
        state = self.optimizer.state
        found = dict(self.model.named_parameters())
        for name, param in self.model.named_parameters():
            found |= {f"{name} {key}": one for key, one in state.get(param, {}).items()}
        with torch.no_grad():
            return {
                name: (memory.real(one) if memory.is_here(one) else one).clone()
                for name, one in found.items()
            }


def _compare_runs(title: str, wanted: Mapping[str, torch.Tensor], found: Run) -> None:
    for name, value in found.values().items():
        _compare(f"{title}: {name}", wanted[name], value)


def save(folder: Path) -> None:
    """Train on at once, on the same stream, as a run does."""
    run = Run(1)
    for count, background in enumerate((False, True, True)):
        path, wanted = folder / f"saved {count}", run.values()

        def call(path: Path = path, background: bool = background) -> Any:
            return ckptmap.save(path, run.model, run.optimizer, background=background)

        handle = waits_of(f"save {count}", call)
        run.step()
        handle.wait()
        again = Run(2, "cpu")
        ckptmap.load(path, again.model, again.optimizer)
        _compare_runs(f"saved {count}", wanted, again)
    with ckptmap.CheckpointManager(folder / "managed") as manager:
        for number in range(3):
            wanted = run.values()

            def managed(number: int = number) -> Any:
                return manager.save(number, run.model, run.optimizer)

            waits_of(f"managed {number}", managed)
            run.step()
    again = Run(2, "cpu")
    found = sorted((folder / "managed").glob("*2"))
    ckptmap.load(found[0], again.model, again.optimizer)
    _compare_runs("managed", wanted, again)


def load(folder: Path) -> None:
    first = Run(1, "cpu")
    ckptmap.save(folder / "saved", first.model, first.optimizer, background=False)
    for to in ("hf", "full-nf4", "full-int8"):
        ckptmap.convert(folder / "saved", folder / to, to=to)
    torch.save(first.model.state_dict(), folder / "plain.pt")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        here, there = Run(2, dtype=dtype), Run(2, "cpu", dtype)
        for run in (here, there):
            waits_of(
                f"load of {run.model[0].weight.device} {dtype}",
                lambda run=run: ckptmap.load(folder / "saved", run.model, run.optimizer),
            )
        _compare_runs(f"load {dtype}", there.values(), here)
    for source in ("hf", "plain.pt"):
        here, there = Run(3), Run(3, "cpu")
        for run in (here, there):
            ckptmap.load(folder / source, run.model)
            run.optimizer.state.clear()
        _compare_runs(f"load {source}", there.values(), here)
    for source in ("full-nf4", "full-int8"):
        with ckptmap.open(folder / source) as checkpoint:
            for fqn, lazy in checkpoint.items():
                _compare(f"{source}: {fqn}", lazy.read(), lazy.read(device=NAME))
    side, here = MODULE.Stream(), Run(4)
    side.wait_stream(MODULE.current_stream())
    with MODULE.stream(side):  # the caller's own
        ckptmap.load(folder / "saved", here.model, here.optimizer)
        here.model(torch.ones(4, 64, device=NAME))


def only(folder: Path) -> None:
    """A frozen base in NF4 and in bfloat16, of which a save leaves out what has not changed."""
    first = Run(1, "cpu")
    ckptmap.save(folder / "saved", first.model, background=False)
    for to in ("full-nf4", "full-bf16"):
        ckptmap.convert(folder / "saved", folder / to, to=to)
        frozen = Run(2, dtype=torch.bfloat16).model.requires_grad_(False)
        frozen[1].requires_grad_(True)
        waits_of(f"load {to}", lambda to=to, model=frozen: ckptmap.load(folder / to, model))
        for count in range(2):
            path = folder / f"{to} {count}"

            def call(path: Path = path, model: nn.Module = frozen) -> Any:
                return ckptmap.save(path, model, only="trainable", background=True)

            waits_of(f"save {to} {count}", call).wait()
            with ckptmap.open(path) as checkpoint:
                kept = sorted(checkpoint)
            wanted = ["1.bias", "1.weight", *(["3.bias"] if count else [])]
            if kept != wanted:
                WRONG.append(f"{path.name}: has {kept}")
            frozen[3].bias.add_(1)


RUNS: dict[str, Callable[[Path], None]] = {
    "convert": convert,
    "save": save,
    "load": load,
    "only": only,
    "without": without,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
