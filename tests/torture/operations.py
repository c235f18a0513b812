"""What is tortured by failing calls and by power cuts: convert, merge, save and their overwriting."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import ckptmap
from tests.corpus import Corpus
from tests.torture import readers as r
from tests.torture.runner import refusal

ABSENT, OLD, NEW = "absent", "old", "new"


@dataclass(frozen=True)
class Operation:
    """Writes `dst` in a folder; `old` is what lay there before, and is replaced.

    sync   the operation waits for the disk before it publishes
    whole  the content of a complete destination
    """

    name: str
    dst: str
    run: Callable[[Path], object]
    read: Callable[[Path], r.Named]
    whole: r.Content
    old: Path | None = None
    sync: bool = True

    def prepare(self, place: Path) -> None:
        place.mkdir()
        if self.old is not None and self.old.is_dir():
            shutil.copytree(self.old, place / self.dst)
        elif self.old is not None:
            shutil.copyfile(self.old, place / self.dst)

    @property
    def before(self) -> str:
        return ABSENT if self.old is None else OLD

    def state(self, place: Path) -> str:
        """Return ABSENT, OLD or NEW, or what else the destination is."""
        dst = place / self.dst
        if not os.path.lexists(dst):
            return ABSENT
        if self.old is not None and r.read_files(dst) == r.read_files(self.old):
            return OLD
        try:
            report = ckptmap.verify(dst)
        except Exception as error:
            return f"verify: {refusal(error)[1]}"
        if not report.ok:
            return f"verify: {report.problems[0]}"
        try:
            content = r.content(self.read(dst))
        except BaseException as error:  # of DCP
            return f"verify says ok, its own library: {error}"
        return NEW if content == self.whole else "verify says ok, it holds other values"

    def left(self, place: Path) -> list[str]:
        """Return the names beside the destination."""
        return sorted(file.name for file in place.iterdir() if file.name != self.dst)


def operations(corpus: Corpus, folder: Path) -> list[Operation]:
    """Return all operations; each is run once, so that what it writes is known."""
    source = corpus["torch_module_attribute"].path
    other = corpus["torch_views"].path
    made = []
    for to, dst, read in (
        ("hf", "out", r.read_hf),
        ("full", "out.pt", r.read_torch),
        ("fsdp2", "out", r.read_dcp),
    ):
        made.append(_convert(folder, source, to, dst, read))
        made.append(_convert(folder, source, to, dst, read, sync=False))
        made.append(_convert(folder, source, to, dst, read, other))
    made.append(_convert(folder, source, "full", "out.pt", r.read_torch, other, sync=False))
    made.append(_merge(folder))
    made += [_save(folder, None), _save(folder, other)]
    return made


def _convert(
    folder: Path,
    source: Path,
    to: str,
    dst: str,
    read: Callable[[Path], r.Named],
    other: Path | None = None,
    sync: bool = True,
) -> Operation:
    overwrite = other is not None

    def run(place: Path) -> None:
        ckptmap.convert(
            source,
            place / dst,
            to,
            overwrite=overwrite,
            sync=sync,
            threads=1,
            max_shard_nbytes=2000,
        )

    name = f"convert {to}{' over an old one' if overwrite else ''}{'' if sync else ' --no-sync'}"
    old = None
    if other is not None:
        old = _fresh(folder) / dst
        ckptmap.convert(other, old, to, sync=False)
    return _known(folder, name, dst, run, read, old, sync)


def _merge(folder: Path) -> Operation:
    from tests.support.merge_cases import LINEARS, llama, saved

    place = _fresh(folder)
    saved(place, llama(hidden=32), target_modules=LINEARS)

    def run(to: Path) -> None:
        ckptmap.merge(place / "base", place / "adapter", to / "out", threads=1)

    return _known(folder, "merge", "out", run, r.read_hf)


def _save(folder: Path, other: Path | None) -> Operation:
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 24)).sum().backward()
    optimizer.step()

    def run(place: Path) -> None:
        ckptmap.save(
            place / "out", model, optimizer, step=3, background=False, overwrite=other is not None
        )

    old = None
    if other is not None:
        old = _fresh(folder) / "out"
        ckptmap.convert(other, old, "fsdp2", sync=False)
    return _known(folder, "save" + (" over an old one" if old else ""), "out", run, _trained, old)


def _trained(path: Path) -> r.Named:
    """A saved run without its random streams, which go on from one run to the next."""
    return {name: value for name, value in r.read_dcp(path).items() if "rng" not in name}


def _fresh(folder: Path) -> Path:
    place = folder / f"made-{len(list(folder.iterdir()))}"
    place.mkdir()
    return place


def _known(
    folder: Path,
    name: str,
    dst: str,
    run: Callable[[Path], object],
    read: Callable[[Path], r.Named],
    old: Path | None = None,
    sync: bool = True,
) -> Operation:
    place = _fresh(folder) / "first"
    made = Operation(name, dst, run, read, r.Content(), old, sync)
    made.prepare(place)
    run(place)
    return Operation(name, dst, run, read, r.content(read(place / dst)), old, sync)
