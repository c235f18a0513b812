"""A single flipped bit anywhere in any file that we write: `verify` reports it, or refuses to read."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.errors import CkptmapError
from ckptmap.execution.manifest import NAME
from ckptmap.operations.verify import read_manifest
from ckptmap.storage.manifest_file import chunks_of

ENCODED = ("hf-nf4", "full-nf4", "fsdp2-nf4", "hf-bnb-nf4", "hf-ct-int8", "full-int8", "dcp-hf-fp8")
WRITTEN = (*(setup.name for setup in registry.setups()), *ENCODED)
NAMES = ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight")
SHAPES = ((32, 64), (64,), (48, 64))

Region = tuple[Path, int, int]
"""A file, and the (start, stop) of bytes in it."""


def written(folder: Path, to: str) -> Path:
    """An output of this setup: weights, moments of AdamW where it holds any, a scheduler, a step."""
    torch.manual_seed(3)
    weights = dict(zip(NAMES, map(torch.randn, SHAPES), strict=True))
    parameters = [torch.nn.Parameter(value) for value in weights.values()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = {"model": weights, "optimizer": optimizer.state_dict(), "step": 7}
    torch.save(state, folder / "run.pt")
    setup = max((s for s in registry.setups() if to.startswith(s.name)), key=lambda s: len(s.name))
    options: dict[str, Any] = {"world_size": 2} if setup.sharded else {}
    try:
        ckptmap.convert(folder / "run.pt", folder / "out", to, param_order=NAMES, **options)
    except CkptmapError:  # this setup holds weights alone
        torch.save(weights, folder / "run.pt")
        ckptmap.convert(folder / "run.pt", folder / "out", to, **options)
    return folder / "out"


def regions(out: Path, ckpt: Checkpoint) -> Iterator[Region]:
    """Every chunk of a tensor, every run of bytes between two, and every file without tensors."""
    document = read_manifest(ckpt)
    for file in sorted(f for f in out.rglob("*") if f.is_file()) if out.is_dir() else (out,):
        name = file.relative_to(out).as_posix()
        inside = [c for _, c in chunks_of(document) if out.is_file() or c[0] == name]
        ends = sorted({0, file.stat().st_size, *(b for c in inside for b in (c[1], c[1] + c[2]))})
        if out.is_file():
            (at, nbytes), *_ = ckpt.index.manifest_spans() if ckpt.index.manifest_spans else ()
            ends = sorted({*ends, at, at + nbytes})
        yield from ((file, start, stop) for start, stop in pairwise(ends))


def is_missed(out: Path, file: Path, bit: int) -> bool:
    """Whether `verify` calls the output sound although this bit of the file is flipped."""
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        good = stream.read(1)
        stream.seek(bit // 8)
        stream.write(struct.pack("B", good[0] ^ 1 << bit % 8))
        stream.flush()
        try:
            return ckptmap.verify(out, threads=1).ok
        except CkptmapError:
            return False
        finally:
            stream.seek(bit // 8)
            stream.write(good)


def missed(out: Path, each: int, seed: str) -> list[str]:
    """Flips that are missed: of the first and last byte of a region, and of some between."""
    rng = random.Random(seed)
    with ckptmap.open(out) as ckpt:
        places = list(regions(out, ckpt))
    assert out.is_file() or any(file.name == NAME for file, _, _ in places)
    found = []
    for file, start, stop in places:
        some = [start, stop - 1, *(rng.randrange(start, stop) for _ in range(each))]
        for byte in some if each else rng.sample(some, 1):
            bit = 8 * byte + rng.randrange(8)
            if is_missed(out, file, bit):
                found.append(f"{file.name}: bit {bit % 8} of byte {byte} in {start}..{stop}")
    return found


@pytest.mark.parametrize("to", WRITTEN)
def test_a_flipped_bit_is_found_wherever_it_is(to: str, tmp_path: Path) -> None:
    out = written(tmp_path, to)
    assert ckptmap.verify(out).problems == ()
    assert missed(out, 2, to) == []
    assert ckptmap.verify(out).ok
