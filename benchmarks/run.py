"""Measure ckptmap against `cp -r` and against the tools that people use today; writes RESULTS.md.

    python benchmarks/run.py [--size quarter] [--rounds 3] [--only model,nf4]

Contestants are whole processes that run in turn, A B C A B C. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from cases import GROUPS, Case
from measure import Filler, Sample, nbytes_of, prepare, rounds, run
from rank_sources import SETS
from report import Measured, text, verdicts
from sources import SIZES, is_made, path_of
from sparse_sources import FORMS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MANY = ("many_safetensors", "many_pt", "many_dcp", "dcp_files", *SETS, *FORMS)
"""Sources that do not depend on --size; both sizes share the folder with them."""

LEFT_OUT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONDONTWRITEBYTECODE")
"""Environment variables that contestants do not get. Each library chooses its own threads, and code
that runs from a clone is compiled by the warm-up, as pip compiles an installed package."""


def main() -> int:
    asked = _arguments()
    work = asked.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    cases = list(_chosen(asked.only))
    load = os.getloadavg()[0]
    for case in cases:
        for name in filter(None, (case.source, case.peer_source)):
            _make(work, asked.size, name)
    filler = None if asked.no_filler else Filler(work / "filler")
    measured = []
    for case in cases:
        measured.append(_measure(case, work, asked.size, asked.rounds, filler))
        _tell(measured[-1])
    raw = {item.case.name: {n: [asdict(s) for s in v] for n, v in item.samples.items()} for item in measured}  # fmt: skip
    (work / f"results-{asked.size}.json").write_text(json.dumps(raw, indent=1) + "\n")
    out = asked.out or (HERE / "RESULTS.md" if asked.only is None else work / "RESULTS.md")
    out.write_text(text(measured, asked.size, asked.rounds, load))
    print(f"wrote {out}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="full", help="2.47 or 0.62 GB of weights")
    parser.add_argument("--rounds", type=int, default=3, help="after one warm-up (default 3)")
    parser.add_argument(
        "--only", help="cases or groups (model, growth, ranks, inspect, headers), comma between; does not replace "
        "RESULTS.md",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "bench",
        help="where sources and outputs go: 34 GB at full size, 16 GB at quarter; 13 GB for ranks",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="where the report goes")
    parser.add_argument("--no-filler", action="store_true", help="leave free memory as it is")
    return parser.parse_args()


def _chosen(only: str | None) -> Iterator[Case]:
    names = only.split(",") if only else list(GROUPS)
    known = {case.name: [case] for group in GROUPS.values() for case in group}
    for name in names:
        found: Sequence[Case] | None = GROUPS.get(name) or known.get(name)
        if found is None:
            sys.exit(f"no case or group {name!r}: choose of {', '.join([*GROUPS, *known])}")
        yield from found


def _folder(work: Path, size: str, name: str) -> Path:
    return work / ("many" if name in MANY else size)


def _make(work: Path, size: str, name: str) -> None:
    """Make a source, in a process of its own, so that this process does not grow."""
    folder = _folder(work, size, name)
    if is_made(folder, name):
        return
    print(f"making {name} ({size})", flush=True)
    needs = [] if name in MANY else ["hf"]
    command = [sys.executable, str(HERE / "sources.py"), str(folder), size, *needs, name]
    subprocess.run(command, check=True)


def _measure(case: Case, work: Path, size: str, count: int, filler: Filler | None) -> Measured:
    source = path_of(_folder(work, size, case.source), case.source)
    other = case.peer_source or case.source
    peer_source = path_of(_folder(work, size, other), other)
    destination = work / "out" / case.name
    destination.parent.mkdir(exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}

    def once(command: list[str], reads: Path) -> Sample:
        prepare(destination, reads, filler)
        return run(command, ROOT, env)

    commands = case.commands(source, peer_source, destination)
    contestants: dict[str, Callable[[], Sample]] = {
        name: partial(once, command, peer_source if name in case.peers else source)
        for name, command in commands.items()
    }
    slow = dict.fromkeys(case.peers, 1) if case.slow else {}
    try:
        samples = rounds(contestants, count, slow)
    finally:
        shutil.rmtree(destination, ignore_errors=True)
        destination.unlink(missing_ok=True)
    return Measured(case, nbytes_of(source), samples)


def _tell(item: Measured) -> None:
    ours = item.samples[item.case.ours]
    cpu = sorted(sample.cpu_s for sample in ours)[len(ours) // 2]
    print(f"{item.case.title}: {cpu:.2f} s cpu", flush=True)
    for verdict in verdicts(item):
        mark = "ok  " if verdict.met else "MISS"
        print(f"  {mark} {verdict.what}: {verdict.found}, wanted {verdict.wanted}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
