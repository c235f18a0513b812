"""Write RESULTS.md from the samples of all cases: medians, ranges, targets reached and missed."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from cases import COPY, MIB, OURS, QUICK, SYNCED_COPY, Case
from measure import Sample

PACKAGES = (
    "ckptmap", "torch", "torchao", "safetensors", "accelerate", "transformers", "xxhash", "typer"
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """The samples of one case by contestant, in the order of the rounds; `nbytes` of its source."""

    case: Case
    nbytes: int
    samples: Mapping[str, Sequence[Sample]]

    def ratios(self, name: str, other: str, what: str) -> list[float]:
        """Return the ratio of `name` to `other` in each round.

        If they ran different numbers of rounds, the ratio is to the median of `other`.
        """
        mine, theirs = self.values(name, what), self.values(other, what)
        if len(mine) != len(theirs):
            return [value / median(theirs) for value in mine]
        return [a / b for a, b in zip(mine, theirs, strict=True)]

    def values(self, name: str, what: str) -> list[float]:
        return [float(getattr(sample, what)) for sample in self.samples[name]]


@dataclass(frozen=True)
class Verdict:
    """One target of a case, and whether it was met."""

    what: str
    wanted: str
    found: str
    met: bool


def verdicts(measured: Measured) -> Iterator[Verdict]:
    case, target, ours = measured.case, measured.case.target, measured.case.ours
    for what, limit, mine in (("cpu", target.cpu, OURS), ("wall", target.wall, ours)):
        if limit is not None:
            found = median(measured.ratios(mine, COPY, f"{what}_s"))
            yield Verdict(f"{what} / cp", f"<= {limit:g}", f"{found:.2f}", found <= limit)
    if target.synced_wall is not None:
        limit = target.synced_wall
        found = median(measured.ratios(OURS, SYNCED_COPY, "wall_s"))
        yield Verdict("wall / cp, both synced", f"<= {limit:g}", f"{found:.2f}", found <= limit)
    if target.anon_nbytes is not None:
        peak = max(measured.values(OURS, "anon_nbytes") + measured.values(ours, "anon_nbytes"))
        wanted = f"<= {target.anon_nbytes / MIB:.0f} MiB"
        yield Verdict("peak memory", wanted, f"{peak / MIB:.0f} MiB", peak <= target.anon_nbytes)
    for peer in case.peers:
        for what, least, mine in (
            ("cpu", target.peer_cpu, OURS), ("wall", target.peer_wall, ours)
        ):  # fmt: skip
            if least is not None:
                found = median(measured.ratios(peer, mine, f"{what}_s"))
                wanted, text = f">= {least:g}x ours", f"{found:.{1 if found >= 1 else 2}f}x"
                yield Verdict(f"{what} of {peer}", wanted, text, found >= least)
    if target.item_s is not None:
        beyond = median(measured.values(OURS, "cpu_s")) - median(measured.values(COPY, "cpu_s"))
        each = beyond / case.items
        wanted, text = f"<= {target.item_s * 1e6:g} us", f"{each * 1e6:.1f} us"
        yield Verdict("cpu beyond cp, each", wanted, text, each <= target.item_s)
    if target.own_wall_s is not None:
        found = median(measured.values(OURS, "wall_s"))
        wanted, text = f"<= {target.own_wall_s:g} s", f"{found:.2f} s"
        yield Verdict("wall", wanted, text, found <= target.own_wall_s)


def machine() -> str:
    """Return the cores, processor, memory and system of this machine, without its name."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return (
        f"{os.cpu_count()} cores ({model}), {total:.0f} GiB of memory,"
        f" Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


def versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def text(measured: Sequence[Measured], size: str, rounds: int, load: float) -> str:
    """Return the text of RESULTS.md."""
    lines = [
        "# Results",
        "",
        "Written by `benchmarks/run.py`; how it measures is in [README.md](README.md).",
        "",
        f"- {date.today().isoformat()}, size `{size}`, {rounds} rounds; every row is a median,"
        " (lowest to highest)",
        f"- {machine()}",
        f"- load average when it began: {load:.1f}"
        + (" (others were at work: CPU ratios are the firm numbers)" if load > 0.7 else ""),
        f"- {versions()}",
        "- CUDA: not run",
        "",
        *_summary(measured),
    ]
    for item in measured:
        lines += ["", *_table(item)]
    return "\n".join(lines) + "\n"


def _summary(measured: Sequence[Measured]) -> Iterator[str]:
    found = [(item.case, verdict) for item in measured for verdict in verdicts(item)]
    missed = [(case, verdict) for case, verdict in found if not verdict.met]
    yield f"**{len(found) - len(missed)} of {len(found)} targets reached.**"
    if missed:
        yield ""
        yield "Missed:"
        yield ""
    for case, verdict in missed:
        yield f"- {case.title}: {verdict.what} {verdict.found}, wanted {verdict.wanted}"


def _table(item: Measured) -> Iterator[str]:
    case = item.case
    yield f"## {case.title}"
    yield ""
    if case.copies:
        yield "| | wall s | cpu s | wall / cp | cpu / cp | wall / cp, synced | peak memory MiB |"
        yield "|---|---|---|---|---|---|---|"
    else:
        yield "| | wall s | cpu s | peak memory MiB |"
        yield "|---|---|---|---|"
    for name in item.samples:
        cells = [_range(item.values(name, "wall_s")), _range(item.values(name, "cpu_s"))]
        if case.copies:
            cells += [_range(item.ratios(name, COPY, what)) for what in ("wall_s", "cpu_s")]
            cells.append(_range(item.ratios(name, SYNCED_COPY, "wall_s")))
        peak = max(item.values(name, "anon_nbytes")) / MIB
        label = f"**{name}**" if name in (OURS, QUICK) else f"`{name}`"
        yield f"| {label} | {' | '.join(cells)} | {peak:.0f} |"
    yield ""
    yield f"{item.nbytes / 1e9:.2f} GB; `ckptmap {' '.join(case.args)}`"
    yield ""
    for verdict in verdicts(item):
        mark = "reached" if verdict.met else "**missed**"
        yield f"- {verdict.what}: {verdict.found}, wanted {verdict.wanted}: {mark}"


def _range(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f} (once)"
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
