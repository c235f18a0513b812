"""Conversions of several weights whose source or target is quantized, on the CPU and on the device.

An encoded source is decoded where the arithmetic runs; the bytes must be those of the CPU. So must those of
a merge, which the CPU computes whatever the device.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu_session.rates import compare_devices
from benchmarks.gpu_session.session import StepRun
from benchmarks.gpu_session.timing import link_s_per_byte, weight

JOBS = (("nf4", "full-bf16"), ("nf4", "full-int8"), ("fp32", "full-int8"), ("fp32", "full-nf4"))
"""(form of the source, setup to convert it to)"""
NAME = "layers.0.mlp.up_proj.weight"


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
    with step.result.attempt("merge"):
        merged(step, side // 8)


def merged(step: StepRun, side: int) -> None:
    """Check that an adapter is merged to the CPU's bytes, dense and NF4, and that `verify` says so."""
    import torch

    import ckptmap

    base, adapter = step.work / "base", step.work / "adapter"
    torch.save({f"model.{NAME}": weight(side, "bfloat16")}, base)
    adapter.mkdir()
    halves = {half: weight(side, "float32", n)[:8] for n, half in enumerate("AB")}
    halves["B"] = halves["B"].t().contiguous()
    key = f"base_model.model.model.{NAME.removesuffix('weight')}lora_"
    torch.save(
        {f"{key}{half}.weight": w for half, w in halves.items()}, adapter / "adapter_model.bin"
    )
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    for to in ("full-bf16", "full-nf4"):
        out = {
            where: step.work / f"merged-{to}-{where.partition(':')[0]}"
            for where in ("cpu", step.device)
        }
        for where, path in out.items():
            ckptmap.merge(base, adapter, path, to, force=True, device=where, overwrite=True)
        same = out["cpu"].read_bytes() == out[step.device].read_bytes()
        step.result.check(f"merge to {to}: the CPU's bytes", same)
        said = ckptmap.verify(out[step.device], against=base, adapter=adapter)
        step.result.check(f"merge to {to}: verify", said.ok, str(said))


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
