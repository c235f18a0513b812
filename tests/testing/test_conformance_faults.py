"""The conformance kit can fail: each adapter here has one fault, and the check for that fault finds it."""

from __future__ import annotations

import importlib
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptmap import registry
from ckptmap.formats.detect import look
from ckptmap.formats.safetensors.format import SafetensorsFile
from ckptmap.formats.torch_save.format import FULL, TorchZip, TorchZipWriter
from ckptmap.protocols import Index, OutFile, OutState, Place
from ckptmap.tensors import Chunk, StoredTensor, TensorInfo
from ckptmap.testing import (
    ContainerKit,
    ReaderKit,
    check_container,
    check_reader,
)
from tests.support.paths import EXAMPLES

sys.path.insert(0, str(EXAMPLES))
toy: Any = importlib.import_module("toy_container")
sys.path.pop(0)

Files = Sequence[OutFile]


# ------------------------------------------------------------------------------- writers


class Faulty(toy.ToyWriter):  # type: ignore[misc]
    """A writer whose files pass through `fault` on the way out."""

    def __init__(self, fault: Callable[[OutState, list[OutFile]], Files]) -> None:
        self.fault = fault

    def files(self, state: OutState, name: str) -> Files:
        return self.fault(state, list(super().files(state, name)))


def largest(files: list[OutFile]) -> int:
    return max(range(len(files) - 1), key=lambda i: files[i].nbytes)


def changed(files: list[OutFile], **change: Any) -> Files:
    """The largest data file changed."""
    at = largest(files)
    files[at] = replace(files[at], **change)
    return files


def slot_overlaps(state: OutState, files: list[OutFile]) -> Files:
    (slot,) = files[largest(files)].slots
    return changed(files, slots=[slot, slot._replace(offset=1, nbytes=slot.nbytes - 1)])


def slot_leaves(state: OutState, files: list[OutFile]) -> Files:
    return changed(files, nbytes=files[largest(files)].nbytes - 1)


def seal_overwrites(state: OutState, files: list[OutFile]) -> Files:
    return changed(files, seal=lambda crcs, manifest: [(1, b"xx")])


def seal_forgets(state: OutState, files: list[OutFile]) -> Files:
    index = files[-1]

    def seal(crcs: Sequence[int], manifest: bytes | None) -> Iterator[tuple[int, bytes]]:
        for offset, piece in index.seal(crcs, manifest):
            yield offset, piece[:-3]

    return [*files[:-1], replace(index, seal=seal)]


def seal_is_random(state: OutState, files: list[OutFile]) -> Files:
    index = files[-1]

    def seal(crcs: Sequence[int], manifest: bytes | None) -> Iterator[tuple[int, bytes]]:
        yield from index.seal(crcs, manifest)
        yield index.nbytes, os.urandom(8)

    return [*files[:-1], replace(index, seal=seal, nbytes=index.nbytes + 8)]


def order_is_random(state: OutState, files: list[OutFile]) -> Files:
    return [*random.sample(files[:-1], len(files) - 1), files[-1]]


def named_by_key(state: OutState, files: list[OutFile]) -> Files:
    named = [replace(f, name=str(t.path[-1])) for f, t in zip(files, state.tensors, strict=False)]
    return [*named, files[-1]]


def drops_records(state: OutState, files: list[OutFile]) -> Files:
    return files if not state.records else toy.ToyWriter().files(replace(state, records={}), "")


class NoDuplicateCheck(toy.ToyWriter):  # type: ignore[misc]
    def files(self, state: OutState, name: str) -> Files:
        once = {tensor.path: tensor for tensor in state.tensors}
        files: Files = super().files(replace(state, tensors=list(once.values())), name)
        return files


@pytest.mark.parametrize(
    ("fault", "check", "message"),
    [
        (slot_overlaps, "slots", "slots overlap"),
        (slot_leaves, "slots", "leaves the file"),
        (seal_overwrites, "seals", "seal writes over the slot"),
        (seal_forgets, "seals", "nothing writes byte"),
        (seal_is_random, "seals", "sealed again, other bytes"),
        (order_is_random, "slots", "laid out differently"),
        (named_by_key, "slots", "leaves the destination"),
        (drops_records, "records", "records {}"),
    ],
)
def test_faulty_writer(fault: Any, check: str, message: str, tmp_path: Path) -> None:
    kit = ContainerKit(toy.ToyReader(), Faulty(fault), toy.TOY, tmp_path)
    with pytest.raises(AssertionError, match=re.escape(message)):
        getattr(kit, check)()


def test_writer_that_takes_duplicates(tmp_path: Path) -> None:
    kit = ContainerKit(toy.ToyReader(), NoDuplicateCheck(), toy.TOY, tmp_path)
    with pytest.raises(AssertionError, match="twice, and it is written"):
        kit.duplicates()


def test_a_fault_is_an_assertion_error_in_one_call(tmp_path: Path) -> None:
    writer = Faulty(slot_overlaps)
    with pytest.raises(AssertionError, match="slots overlap"):
        check_container(toy.ToyReader(), writer, toy.TOY, tmp_path)


def test_zip_writer_whose_slots_overlap(tmp_path: Path) -> None:
    class Overlapping(TorchZipWriter):
        def files(self, state: OutState, name: str) -> Files:
            (out,) = super().files(state, name)
            first, *others = out.slots
            moved = [slot._replace(offset=first.offset) for slot in others]
            return [replace(out, slots=[first, *moved])]

    with pytest.raises(AssertionError, match="slots overlap"):
        check_container(TorchZip(), Overlapping(), FULL, tmp_path)


@pytest.mark.parametrize("check", ["crashes", "killed"])
def test_publishing_before_the_end(check: str, tmp_path: Path) -> None:
    """Stands for a spine, or a writer, that makes the destination while it is still writing."""
    name = {"crashes": "crashed", "killed": "killed"}[check]

    class Early(toy.ToyWriter):  # type: ignore[misc]
        def files(self, state: OutState, name_: str) -> Files:
            (tmp_path / name / "out").mkdir(exist_ok=True)
            files: Files = super().files(state, name_)
            return files

    kit = ContainerKit(toy.ToyReader(), Early(), toy.TOY, tmp_path)
    with pytest.raises(AssertionError, match=f"{name} while sealing, and out is there"):
        getattr(kit, check)()


# ------------------------------------------------------------------------------- readers


def with_regions(index: Index, change: Callable[[Any], Any]) -> Index:
    """The index with every tensor's regions changed."""
    leaves = {}
    for path, leaf in index.leaves.items():
        chunks = [Chunk(c.box, change(c.region)) for c in leaf.chunks]
        leaves[path] = StoredTensor(leaf.info, chunks)
    return replace(index, leaves=leaves)


class OffByOne(SafetensorsFile):
    def index(self, place: Place) -> Index:
        return with_regions(super().index(place), lambda r: r._replace(offset=r.offset - 1))


class ReadsPastTheEnd(SafetensorsFile):
    def index(self, place: Place) -> Index:
        return with_regions(super().index(place), lambda r: r._replace(offset=r.offset + 1))


class ForgetsShort(toy.ToyReader):  # type: ignore[misc]
    """Leaves out a tensor whose file is too short, without a word."""

    def index(self, place: Place) -> Index:
        try:
            found: Index = super().index(place)
            return found
        except toy.SourceError as error:
            if error.code != "CKM104":
                raise
            entries = toy._parsed(Path(place.path) / toy.INDEX)["tensors"]
            leaves = {}
            for key, entry in entries.items():
                info = TensorInfo(tuple(entry["shape"]), entry["dtype"])
                if (Path(place.path) / entry["file"]).stat().st_size == info.nbytes:
                    leaves[key,] = toy._tensor(Path(place.path).absolute(), key, entry)
            return Index("toy", leaves, (str(Path(place.path).absolute() / toy.INDEX),
                         *(leaf.chunks[0].region.file for leaf in leaves.values())))  # fmt: skip


class RaisesValueError(toy.ToyReader):  # type: ignore[misc]
    def index(self, place: Place) -> Index:
        try:
            found: Index = super().index(place)
        except toy.SourceError as error:
            raise IndexError(str(error)) from error
        return found


class ClaimsAll(toy.ToyReader):  # type: ignore[misc]
    def claims(self, place: Place) -> bool:
        return place.is_dir


class ReadsTensors(toy.ToyReader):  # type: ignore[misc]
    def index(self, place: Place) -> Index:
        found: Index = super().index(place)
        for file in found.files:
            Path(file).read_bytes()
        return found


@pytest.mark.parametrize(
    ("reader", "check", "message"),
    [
        (ForgetsShort(), "reads", "other keys, no error"),
        (RaisesValueError(), "reads", "raises IndexError, expected SourceError"),
        (ClaimsAll(), "reads", "which is not its own"),
        (ReadsTensors(), "headers_only", "bytes more than opening"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_faulty_reader(reader: Any, check: str, message: str, tmp_path: Path) -> None:
    kit = ContainerKit(reader, toy.ToyWriter(), toy.TOY, tmp_path)
    with pytest.raises(AssertionError, match=message):
        getattr(kit, check)()


@pytest.mark.parametrize(
    ("reader", "message"), [(OffByOne(), "has other values"), (ReadsPastTheEnd(), "ends at byte")]
)
def test_reader_that_is_off_by_one(reader: Any, message: str, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(5)}
    save_file(tensors, tmp_path / "some.safetensors")
    check_reader(SafetensorsFile(), tmp_path / "some.safetensors", tensors, tmp_path / "sound")
    with pytest.raises(AssertionError, match=message):
        check_reader(reader, tmp_path / "some.safetensors", tensors, tmp_path / "kit")


def test_reader_that_imports_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import numpy\nfrom toy_container import *\nclass Heavy(ToyReader): ...\n"
    (tmp_path / "kit_heavy.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    reader = importlib.import_module("kit_heavy").Heavy()
    kit = ContainerKit(reader, toy.ToyWriter(), toy.TOY, tmp_path / "kit")
    with pytest.raises(AssertionError, match="opening imports numpy"):
        ReaderKit(reader, kit.output, kit.tensors, tmp_path / "reading").without_torch()


def test_reader_that_follows_names_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "DATA", re.compile(r".*\.bin"))
    kit = ContainerKit(toy.ToyReader(), toy.ToyWriter(), toy.TOY, tmp_path)
    with pytest.raises(AssertionError, match=r"names '\.\./00\.bin', and it is read"):
        kit.reads()


def test_the_registry_is_whole_again() -> None:
    names = [setup.name for setup in registry.setups()]
    assert "toy" not in names and len(set(names)) == len(names)
    assert registry.container_for(look(Path(__file__))) is None
