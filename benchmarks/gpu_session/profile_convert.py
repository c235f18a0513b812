"""A profile of one conversion: kernels, how busy the device is, and copies beside kernels.

torch.profiler writes a trace; what is computed from it is in `of_trace`, which knows no device.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.encoders import NAME
from benchmarks.gpu_session.session import StepRun
from benchmarks.gpu_session.timing import weight

Span = tuple[float, float]
"""Start and end in microseconds."""
KERNELS, COPIES = ("kernel",), ("gpu_memcpy", "gpu_memset")
JOBS = (("bf16", "full-nf4"), ("full-nf4", "full-bf16"), ("bf16", "full-int8"), ("bf16", "full-bnb-nf4"))  # fmt: skip
MOST = 8
"""Kernels that are named, those that take longest."""


def run(step: StepRun) -> None:
    """Profile conversions of one weight."""
    import torch

    import ckptmap

    side = 128 if step.is_tiny else 8192
    torch.save({NAME: weight(side, "bfloat16")}, step.work / "bf16")
    ckptmap.convert(step.work / "bf16", step.work / "full-nf4", to="full-nf4", sync=False)
    for source, to in JOBS:
        with step.result.attempt(f"{source} -> {to}"):
            trace = profiled(step.work / source, step.work / "out", to, step)
            report(step, f"{source} -> {to}", trace, side * side)


def profiled(source: Path, out: Path, to: str, step: StepRun) -> Sequence[dict[str, Any]]:
    """Return the trace's events of one conversion, after one that makes tables and buffers."""
    from torch.profiler import ProfilerActivity, profile

    import ckptmap

    def convert() -> None:
        out.unlink(missing_ok=True)  # what is complete already would not be converted again
        ckptmap.convert(source, out, to=to, device=step.device, sync=False, threads=1)

    convert()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if step.on_cuda else [])]
    with profile(activities=kinds) as profiler:
        convert()
    trace = step.work / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events: Sequence[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return events


def report(step: StepRun, what: str, events: Sequence[dict[str, Any]], numel: int) -> None:
    from ckptmap.quantization.blockwise.chunks import DEVICE_NUMEL

    found = step.result
    kernels, copies = spans(events, KERNELS), spans(events, COPIES)
    if not kernels:
        if step.on_cuda:
            kinds = Counter(str(event.get("cat")) for event in events)
            found.note(f"{what}: the profiler saw no kernel, only {dict(kinds)}")
        return
    found.figure(f"{what}: kernels", len(kernels))
    feed = DEVICE_NUMEL
    found.figure(
        f"{what}: kernels a feed of {feed >> 20}M elements", len(kernels) / max(1, numel / feed)
    )
    both = sorted(kernels + copies)
    whole = max(end for _, end in both) - both[0][0]
    busy, copying = total(kernels), total(copies)
    found.figure(f"{what}: from the first to the last work of the device", whole / 1e3, "ms")
    found.figure(f"{what}: kernels run", busy / 1e3, "ms", ratio=busy / whole, of="that time")
    found.figure(f"{what}: copies run", copying / 1e3, "ms", ratio=copying / whole, of="that time")
    beside = busy + copying - total(both)
    found.figure(f"{what}: copies beside kernels", beside / 1e3, "ms",
                 ratio=beside / copying if copying else 0.0, of="the copies")  # fmt: skip
    longest: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in KERNELS:
            longest[str(event["name"])[:90]] += event.get("dur", 0)
    lines = [f"{us / 1e3:.2f} ms {name}" for name, us in longest.most_common(MOST)]
    found.note(f"{what}: longest kernels: " + "; ".join(lines))


def spans(events: Iterable[dict[str, Any]], kinds: Sequence[str]) -> list[Span]:
    """Return when events of some kinds ran, in order."""
    return sorted((e["ts"], e["ts"] + e.get("dur", 0)) for e in events if e.get("cat") in kinds)


def total(found: Iterable[Span]) -> float:
    """Return the microseconds in which at least one of the spans, which are in order, ran."""
    covered, last = 0.0, float("-inf")
    for start, end in found:
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    return covered
