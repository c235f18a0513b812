"""What is tortured by failing calls and by power cuts: convert, merge, save, push, and overwriting."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

import ckptmap
from ckptmap.storage import publish
from ckptmap.storage.publish_by_marker import is_pending
from tests.corpus import Corpus
from tests.support.hub.client import connected, llama
from tests.support.hub.server import Hub
from tests.support.hub.state import Tree, holds, shown_on
from tests.support.paths import GOLDEN
from tests.torture import readers as r
from tests.torture.runner import refusal

ABSENT, OLD, NEW = "absent", "old", "new"
HALF = "half published, and told so"


@dataclass(frozen=True)
class Operation:
    """Writes `dst` in a folder; `old` is what lay there before, and is replaced.

    sync     the operation waits for the disk before it publishes
    whole    the content of a complete destination
    renamed  the destination appears by one rename, else file by file: meanwhile it is HALF
    """

    name: str
    dst: str
    run: Callable[[Path], object]
    read: Callable[[Path], r.Named]
    whole: r.Content
    old: Path | None = None
    sync: bool = True
    renamed: bool = True

    def prepare(self, place: Path) -> None:
        place.mkdir()
        if self.old is not None and self.old.is_dir():
            shutil.copytree(self.old, place / self.dst)
        elif self.old is not None:
            shutil.copyfile(self.old, place / self.dst)

    def finish(self, place: Path) -> None:
        """End what `prepare` began."""

    @property
    def before(self) -> str:
        return ABSENT if self.old is None else OLD

    @property
    def allowed(self) -> Sequence[str]:
        """The states that a run may leave which did not succeed."""
        return (self.before, NEW) if self.renamed else (self.before, NEW, HALF)

    def state(self, place: Path) -> str:
        """Return ABSENT, OLD, NEW or HALF, or what else the destination is."""
        dst = place / self.dst
        if not os.path.lexists(dst) or (dst.is_dir() and not any(dst.iterdir())):
            return ABSENT
        if is_pending(dst):
            return HALF
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


@dataclass(frozen=True)
class Push(Operation):
    """Publishes a model on the Hub of the tests, which runs in the process that prepares it."""

    hubs: dict[Path, tuple[Hub, ExitStack]] = field(default_factory=dict)
    """The Hub of each place, and the context that keeps it running."""

    def prepare(self, place: Path) -> None:
        place.mkdir()
        context = ExitStack()
        patch = context.enter_context(pytest.MonkeyPatch.context())
        hub = context.enter_context(connected(place / "home", patch))
        patch.setenv("HF_TOKEN", "hf_owner")
        assert self.old is not None
        hub.add("org/m", self.old)
        self.hubs[place] = hub, context

    def finish(self, place: Path) -> None:
        self.hubs.pop(place)[1].close()

    def state(self, place: Path) -> str:
        """Judge what main shows, and all that it has shown."""
        seen = [self._tree(tree) for tree in shown_on(self.hubs[place][0].repos["org/m"])[1:]]
        return next((state for state in seen if state not in (OLD, NEW)), seen[-1])

    def _tree(self, tree: Tree) -> str:
        assert self.old is not None
        if holds(tree, self.old):
            return OLD
        held = r.Content((path, "", (), blob.sha256) for path, blob in tree.items() if blob.lfs)
        return NEW if held == self.whole else f"main shows {sorted(tree)}"

    def left(self, place: Path) -> list[str]:
        """Return nothing: what is beside lies in the client's own cache."""
        return []


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
    made.append(_convert(folder, source, "fsdp2", "out", r.read_dcp, renamed=False))
    made.append(_convert(folder, source, "hf", "out", r.read_hf, other, renamed=False))
    release = GOLDEN / "gptq" / "gptq-4"
    made.append(_convert(folder, release, "hf-ct-int4", "out", r.read_compressed))
    made.append(_convert(folder, hf_llama(folder), "gguf-q8_0", "out.gguf", r.read_gguf))
    made.append(_merge(folder))
    made += [_save(folder, None), _save(folder, other)]
    return made


def hf_llama(folder: Path) -> Path:
    """The model of transformers that becomes a GGUF file."""
    from tests.support.int8_models import dense

    return dense(_fresh(folder) / "model")


def _convert(
    folder: Path,
    source: Path,
    to: str,
    dst: str,
    read: Callable[[Path], r.Named],
    other: Path | None = None,
    sync: bool = True,
    renamed: bool = True,
) -> Operation:
    overwrite = other is not None

    def run(place: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not renamed:
                patch.setattr(publish, "rename_problem", lambda *_: "not permitted")
            ckptmap.convert(
                source,
                place / dst,
                to,
                overwrite=overwrite,
                sync=sync,
                threads=1,
                max_shard_nbytes=None if dst.endswith(".gguf") else 2000,  # one file stays one
            )

    words = (
        f"convert {to}",
        " over an old one" if overwrite else "",
        "" if sync else " --no-sync",
        "" if renamed else " file by file",
    )
    name = "".join(words)
    old = None
    if other is not None:
        old = _fresh(folder) / dst
        ckptmap.convert(other, old, to, sync=False)
    return _known(folder, name, dst, run, read, old, sync, renamed)


def _merge(folder: Path) -> Operation:
    from tests.support.merge_cases import LINEARS, saved
    from tests.support.merge_cases import llama as small

    place = _fresh(folder)
    saved(place, small(hidden=32), target_modules=LINEARS)

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


def pushing(folder: Path) -> Operation:
    """Push a sharded Llama over another one; what it publishes is what `convert` writes."""
    model = llama(_fresh(folder) / "model", "60KB")
    old = llama(_fresh(folder) / "old", dtype="float32")
    whole = _fresh(folder) / "whole"
    ckptmap.convert(model, whole, "hf", sync=False, max_shard_nbytes=80_000)
    weights = [
        (file.name, "", (), hashlib.sha256(file.read_bytes()).hexdigest())
        for file in whole.glob("*.safetensors")
    ]

    def run(place: Path) -> None:
        ckptmap.push(model, "org/m", to="hf", work=place / "work", max_shard_nbytes=80_000)

    return Push("push", "work", run, r.read_hf, r.Content(weights), old)


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
    renamed: bool = True,
) -> Operation:
    place = _fresh(folder) / "first"
    made = Operation(name, dst, run, read, r.Content(), old, sync, renamed)
    made.prepare(place)
    run(place)
    return replace(made, whole=r.content(read(place / dst)))
