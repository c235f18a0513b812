"""What the device is, and which arithmetic it does otherwise than the CPU."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.session import StepRun

SMI = (
    "driver_version", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
    "memory.total", "memory.used", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "mig.mode.current",
)  # fmt: skip
"""What nvidia-smi is asked for."""
DIVISORS = (127.5, 127.0, 448.0, 7.0, 255.0)
"""By which encoders divide to make scales."""
PINNED_NBYTES = 256 << 20


def run(step: StepRun) -> None:
    """Report the device and the host, then compare basic operations with the CPU's."""
    host(step)
    if step.on_cuda:
        cuda(step)
    division(step)
    operations(step)


def host(step: StepRun) -> None:
    import torch

    found = step.result
    found.figure("cores", len(os.sched_getaffinity(0)))
    found.figure(
        "host memory", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30, "GiB"
    )
    for place in ("/tmp", "/dev/shm"):
        if Path(place).is_dir():
            found.figure(f"free in {place}", shutil.disk_usage(place).free >> 30, "GiB")
    pages = Path("/sys/kernel/mm/transparent_hugepage")
    for name in ("enabled", "shmem_enabled", "defrag"):
        with found.attempt(f"huge pages: {name}"):
            found.figure(f"huge pages: {name}", (pages / name).read_text().strip())
    found.figure("memory that may be locked", str(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
    found.figure("torch threads", torch.get_num_threads())
    found.figure("torch", torch.__version__)


def cuda(step: StepRun) -> None:
    import torch

    found, properties = step.result, torch.cuda.get_device_properties(step.device)
    found.figure("device", properties.name)
    found.figure("capability", f"{properties.major}.{properties.minor}")
    found.figure("multiprocessors", properties.multi_processor_count)
    found.figure("device memory", properties.total_memory >> 20, "MiB")
    found.figure("CUDA of torch", str(torch.version.cuda))
    found.figure("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    with found.attempt("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader"]
        said = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout
        for name, value in zip(SMI, said.splitlines()[0].split(","), strict=False):
            found.figure(f"nvidia-smi {name}", value.strip())
    with found.attempt("pinned memory"):
        for turn in ("first", "second"):
            start = time.perf_counter()
            held = torch.empty(PINNED_NBYTES, dtype=torch.uint8, pin_memory=True)
            found.figure(
                f"allocate 256 MiB of pinned memory, {turn}", time.perf_counter() - start, "s"
            )
            del held
        torch.empty((PINNED_NBYTES // 2) + 4096, dtype=torch.uint8, pin_memory=True)
        for name, value in torch.cuda.host_memory_stats().items():
            if "bytes.current" in name or "bytes.peak" in name:
                found.figure(f"host_memory_stats {name}", int(value), "B")


def division(step: StepRun) -> None:
    """Report which share of quotients differs from the CPU's, by the kind of the divisor.

    A CUDA kernel may multiply by the reciprocal of a divisor that is a Python number or a tensor on the CPU
    (pytorch#191495). An encoder that divides so makes other scales than the CPU.
    """
    import torch

    maker = torch.Generator().manual_seed(1)
    values = torch.rand(1 << (12 if step.is_tiny else 22), generator=maker) * 10
    there = values.to(step.device)
    for divisor in DIVISORS:
        forms: dict[str, Any] = {
            "a Python number": divisor,
            "a 0-dim tensor on the CPU": torch.tensor(divisor),
            "a 0-dim tensor on the device": torch.tensor(divisor, device=step.device),
        }
        wanted = values / torch.full_like(values, divisor)
        for form, given in forms.items():
            differ, most = ulps(there / given, wanted)
            step.result.figure(f"x / {divisor:g} as {form}: share that differs", differ)
            if most > 1:
                step.result.note(f"x / {divisor:g} as {form}: differs by up to {most} ulp")
        differ, _ = ulps(values / divisor, wanted)
        step.result.check(f"the CPU divides by {divisor:g} exactly", differ == 0)


def ulps(a: Any, b: Any) -> tuple[float, int]:
    """Return the share of float32 values that differ, and by how many units in the last place at most."""
    import torch

    apart = (a.cpu().view(torch.int32).long() - b.cpu().view(torch.int32).long()).abs()
    return float((apart != 0).double().mean()), int(apart.max())


def operations(step: StepRun) -> None:
    """Report which basic operations make other bits than on the CPU: they explain what encoders do."""
    import torch

    values = awkward(1 << (12 if step.is_tiny else 20))
    peaks = values.abs().view(-1, 64).amax(1, keepdim=True)
    codes = torch.linspace(-1, 1, 255)
    jobs: dict[str, Callable[..., Any]] = {
        "tensor / tensor": lambda v, p, c: v.view(-1, 64) / p,
        "tensor * tensor": lambda v, p, c: v.view(-1, 64) * p,
        "reciprocal": lambda v, p, c: p.reciprocal(),
        "amax of 64": lambda v, p, c: v.abs().view(-1, 64).amax(1),
        "sum of 64": lambda v, p, c: v.nan_to_num(0, 1, -1).view(-1, 64).sum(1),
        "mean of all": lambda v, p, c: v.nan_to_num(0, 1, -1).mean(),
        "round": lambda v, p, c: (v * 100).round(),
        "sqrt": lambda v, p, c: v.abs().sqrt(),
        "bucketize": lambda v, p, c: torch.bucketize(v, c, out_int32=True),
        "clamp to int8": lambda v, p, c: v.nan_to_num(0, 1, -1).mul(100).round().clamp(-128, 127).to(torch.int8),
        "to bfloat16": lambda v, p, c: v.to(torch.bfloat16),
        "to float16": lambda v, p, c: v.to(torch.float16),
        "to float8_e4m3fn": lambda v, p, c: v.to(torch.float8_e4m3fn),
        "to float8_e5m2": lambda v, p, c: v.to(torch.float8_e5m2),
        "bfloat16 / bfloat16": lambda v, p, c: v.bfloat16().view(-1, 64) / p.bfloat16(),
        "bfloat16 to float16": lambda v, p, c: v.bfloat16().half(),
    }  # fmt: skip
    here = (values, peaks, codes)
    there = tuple(t.to(step.device) for t in here)
    for name, job in jobs.items():
        with step.result.attempt(name):
            wanted, found = job(*here), job(*there).cpu()
            size = wanted.element_size()
            kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
            differ = wanted.reshape(-1).view(kind) != found.reshape(-1).view(kind)
            nan = wanted.reshape(-1).float().isnan() & found.reshape(-1).float().isnan()
            step.result.figure(f"{name}: share of other bits", float(differ.double().mean()))
            if bool((differ & nan).any()):
                step.result.note(
                    f"{name}: {int((differ & nan).sum())} of them are NaN of other bits"
                )


def awkward(count: int) -> Any:
    """Return float32 values of all sizes, with zeros, subnormals, infinities and NaN among them."""
    import torch

    maker = torch.Generator().manual_seed(2)
    values = torch.randn(count, generator=maker) * torch.exp2(torch.randint(-20, 20, (count,), generator=maker).float())  # fmt: skip
    special = [0.0, -0.0, 1e-40, -1e-45, float("inf"), float("-inf"), float("nan"), 448.0, 464.0, 465.0, 3.4e38, 65520.0]  # fmt: skip
    values[: len(special)] = torch.tensor(special)
    return values
