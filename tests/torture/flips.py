"""Flips: one bit of one file that we wrote is flipped, and verify must say which file or tensor.

named     verify says no, and names the file or a tensor
unnamed   verify says no, and names neither
missed    verify says ok
internal  an error that is none of ours
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

import ckptmap
from ckptmap import registry
from tests.golden import outputs as golden
from tests.support.paths import GOLDEN
from tests.torture.runner import Outcome, refusal

NEAR = 4096
"""Bytes at both ends of a file, where its structure is: half of the flips lie there."""


class Flips:
    name = "flips"
    good = frozenset({"named"})

    def __init__(self, folder: Path) -> None:
        """Write every setup with the state of an optimizer, and every encoding."""
        self.paths = list(written(folder))
        for path in self.paths:
            report = ckptmap.verify(path)
            if not report.ok:
                raise AssertionError(f"{path}: {report}")

    def case(self, draw: random.Random, folder: Path) -> Iterator[Outcome]:
        path = draw.choice(self.paths)
        at = folder / path.name
        shutil.copytree(path, at) if path.is_dir() else shutil.copyfile(path, at)
        files = sorted(f for f in at.rglob("*") if f.is_file()) if at.is_dir() else [at]
        file = draw.choice(files)
        where = flip(draw, file)
        label = f"{where} of {file.name}"
        yield Outcome("begun", path.parent.name, label)
        result, text = judged(at, file)
        yield Outcome(result, path.parent.name, label, text)


def flip(draw: random.Random, file: Path) -> str:
    """Flip one bit of a file; return where it is."""
    nbytes = file.stat().st_size
    near = min(NEAR, nbytes)
    at = draw.randrange(draw.choice((near, near, nbytes, nbytes)))
    if draw.random() < 0.3:
        at = nbytes - 1 - at
    bit = draw.randrange(8)
    fd = os.open(file, os.O_RDWR)
    old = os.pread(fd, 1, at)[0]
    os.pwrite(fd, bytes([old ^ 1 << bit]), at)
    os.close(fd)
    return f"bit {bit} of byte {at} of {nbytes}"


def judged(path: Path, file: Path) -> tuple[str, str]:
    """Return what verify makes of a path, in which `file` is damaged."""
    try:
        report = ckptmap.verify(path)
    except Exception as error:
        result, text = refusal(error)
        if result != "refused":
            return result, text
    else:
        if report.ok:
            return "missed", ""
        text = "; ".join(report.problems)
    names = {file.name, *(other.name for other in path.rglob("*"))}
    words = (*names, "manifest", "layers.", "embed", "norm", "head", ".weight", "exp_avg")
    return ("named" if any(word in text for word in words) else "unnamed"), text


def written(folder: Path) -> Iterator[Path]:
    """Write every setup of a run of training, and every encoding of weights, and yield the paths."""
    runs = golden.SOURCES["training"]
    source = golden.made(runs, folder / "source")
    setups = [setup.name for setup in registry.setups()]
    encoded = [f"hf-{name}" for name in golden.encodings() if name]
    for to in (*setups, *encoded, *golden.gguf_types(), "fsdp2-nf4", "full-int8"):
        yield _converted(source, folder / to, to, **golden.options(runs, to))
    yield _converted(source, folder / "hf-sha256", "hf", digest="sha256")
    yield from of_releases(folder)
    yield saved(folder)


def of_releases(folder: Path) -> Iterator[Path]:
    """What is written of quantized releases: codes kept in another form, moved, decoded, and given back."""
    gptq = GOLDEN / "gptq"
    for name, to in (
        ("gptq-4", "hf-ct-int4"), ("gptq-4-asym", "hf-ct-int4"), ("gptq-8", "hf-ct-int8"),
        ("awq-4", "hf-ct-int4"), ("gptq-4-order", "hf"), ("awq-4-asym", "fsdp2"), ("gptq-3", "full-bf16"),
    ):  # fmt: skip
        yield _converted(gptq / name, folder / f"{name}-{to}", to)
    for file in sorted((GOLDEN / "foreign").glob("[hq]*[sf]")):
        if file.suffix in (".safetensors", ".gguf"):
            yield _converted(file, folder / f"{file.name}-fsdp2", "fsdp2")
    work = _converted(gptq / "gptq-4", folder / "work", "full-bf16")
    given_back = folder / "as" / "out"
    given_back.parent.mkdir()
    ckptmap.convert(work, given_back, as_=gptq / "gptq-4", sync=False)
    yield given_back


def _converted(source: Path, place: Path, to: str, **options: object) -> Path:
    place.mkdir()
    dst = place / "out"
    ckptmap.convert(source, dst, to, sync=False, max_shard_nbytes=60_000, **options)  # type: ignore[arg-type]
    return dst


def saved(folder: Path) -> Path:
    """What `save` writes of a live model and its optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    dst = folder / "save" / "out"
    dst.parent.mkdir()
    ckptmap.save(dst, model, optimizer, step=3, background=False)
    return dst
