"""Conversions of several weights whose source or target is quantized, on the CPU and on the device.

An encoded source is decoded where the arithmetic runs; the bytes must be those of the CPU.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu_session.rates import compare_devices
from benchmarks.gpu_session.session import StepRun
from benchmarks.gpu_session.timing import link_s_per_byte, weight

JOBS = (("nf4", "full-bf16"), ("nf4", "full-int8"), ("fp32", "full-int8"), ("fp32", "full-nf4"))
"""(form of the source, setup to convert it to)"""


def run(step: StepRun) -> None:
    """Time each conversion on both devices and compare the files."""
    count, side = (2, 128) if step.is_tiny else (4, 8192)
    link_s = link_s_per_byte(step.device, 1 << 16 if step.is_tiny else 1 << 28)
    sources = written(step.work, count, side)
    for form, to in JOBS:
        nbytes = count * side * side * (2 if form == "nf4" else 4)
        compare_devices(step, sources[form], to, nbytes, link_s, of=form)
        for left in step.work.glob("full-*"):
            left.unlink()


def written(folder: Path, count: int, side: int) -> dict[str, Path]:
    """Write the same weights as float32 and as NF4; return the files by form."""
    import torch

    import ckptmap

    sources = {"fp32": folder / "source-fp32", "nf4": folder / "source-nf4"}
    state = {
        f"model.layers.{n}.mlp.up_proj.weight": weight(side, "float32", n) for n in range(count)
    }
    torch.save(state, sources["fp32"])
    dense = folder / "source-bf16"
    torch.save({name: w.bfloat16() for name, w in state.items()}, dense)
    ckptmap.convert(dense, sources["nf4"], to="full-nf4", sync=False)
    dense.unlink()
    return sources
