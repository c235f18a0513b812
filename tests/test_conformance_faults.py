"""The kit can fail: each adapter here has one fault, and is caught by the check meant for it."""

from __future__ import annotations

import importlib
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptmap import registry
from ckptmap.containers.safetensors import SafetensorsFile
from ckptmap.containers.torch_zip import FULL, TorchZip, TorchZipWriter
from ckptmap.directories.verl import Verl
from ckptmap.encodings.dense import CastBf16, DenseAs, flat
from ckptmap.encodings.nf4 import NF4Scheme
from ckptmap.encodings.nf4_encoding import NF4
from ckptmap.layouts.shard import Shard0
from ckptmap.places import look
from ckptmap.protocols import OutFile, OutState, Place, Write
from ckptmap.tensors import Box, Chunk, Index, StoredTensor, TensorInfo
from ckptmap.testing import (
    ContainerKit,
    SchemeKit,
    check_container,
    check_directory,
    check_layout,
    check_reader,
    check_scheme,
)
from ckptmap.testing.base import required

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
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
    return changed(files, slots=[slot, replace(slot, offset=1, nbytes=slot.nbytes - 1)])


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
            moved = [replace(slot, offset=slot.offset - 64) for slot in others]
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
        return with_regions(super().index(place), lambda r: replace(r, offset=r.offset - 1))


class ReadsPastTheEnd(SafetensorsFile):
    def index(self, place: Place) -> Index:
        return with_regions(super().index(place), lambda r: replace(r, offset=r.offset + 1))


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


class ImportsTorch(toy.ToyReader):  # type: ignore[misc]
    """In this module, which imports torch."""


@pytest.mark.parametrize(
    ("reader", "check", "message"),
    [
        (ForgetsShort(), "reads", "other keys, no error"),
        (RaisesValueError(), "reads", "raises IndexError, expected SourceError"),
        (ClaimsAll(), "reads", "which is not its own"),
        (ReadsTensors(), "headers_only", "bytes more than opening"),
        (ImportsTorch(), "reads", "opening imports"),
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


def test_reader_that_follows_names_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "DATA", re.compile(r".*\.bin"))
    kit = ContainerKit(toy.ToyReader(), toy.ToyWriter(), toy.TOY, tmp_path)
    with pytest.raises(AssertionError, match=r"names '\.\./00\.bin', and it is read"):
        kit.reads()


# ------------------------------------------------------------------------------- layouts


@dataclass
class Cutter(Shard0):
    """Shard0 with a fault."""

    fault: Callable[[list[tuple[int, Box]]], list[tuple[int, Box]]]

    def cut(self, info: TensorInfo, world_size: int) -> list[tuple[int, Box]]:
        return self.fault(list(super().cut(info, world_size)))


def hole(chunks: list[tuple[int, Box]]) -> list[tuple[int, Box]]:
    return chunks[:-1] if len(chunks) > 1 else chunks


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (hole, "chunks cover"),
        (lambda chunks: [*chunks, chunks[0]], "not in order|overlap|empty"),
        (lambda chunks: [(rank + 1, box) for rank, box in chunks], "rank 1 of 1 ranks"),
        (lambda chunks: list(reversed(chunks)), "not in order"),
        (lambda chunks: [*chunks, (chunks[-1][0], Box.whole((0,) * len(chunks[0][1].sizes)))],
         "an empty box|overlap"),
        (lambda chunks: [c for c in chunks if c[1].numel], "no box at all"),
        (lambda chunks: chunks[1 << 40], "IndexError"),
    ],
)  # fmt: skip
def test_faulty_cut(fault: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_layout(Cutter(fault))


def test_layout_that_joins_strangers() -> None:
    class Greedy(Shard0):
        def join(self, values: Sequence[Any], key: str) -> Any:
            return StoredTensor(TensorInfo((), "float32"), [])

    with pytest.raises(AssertionError, match="joined"):
        check_layout(Greedy())


def test_layout_that_joins_what_is_not_whole() -> None:
    class Careless(Shard0):
        """Its parts are (box, info of the whole); it never asks whether all are there."""

        def join(self, values: Sequence[Any], key: str) -> Any:
            if not all(isinstance(value, tuple) for value in values):
                return None
            return StoredTensor(values[0][1], [Chunk(box, None) for box, _ in values])  # type: ignore[arg-type]

    def parts(info: TensorInfo, world_size: int) -> list[Any]:
        return [(box, info) for _, box in Shard0().cut(info, world_size)]

    with pytest.raises(AssertionError, match="took 1 parts of 2 for the whole"):
        check_layout(Careless(), parts)


# ------------------------------------------------------------------------------- encodings


@dataclass(frozen=True)
class FaultyNF4(NF4):
    """NF4 with a fault named by its scheme."""

    fault: str = ""

    def encoder(self, info: TensorInfo, device: str) -> Any:
        encoder: Any = super().encoder(info, device)
        feed, finish = encoder.feed, encoder.finish
        if self.fault == "finish":
            encoder.finish = lambda: (finish(), ())[1]
        if self.fault == "twice":
            encoder.feed = lambda offset, values: (*feed(offset, values), *feed(offset, values))
        if self.fault == "offset":
            encoder.feed = lambda offset, values: feed(0, values)
        if self.fault == "dtype":
            encoder.finish = lambda: [replace(w, values=w.values.double()) for w in finish()]
        return encoder

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        found = super().part_box(info, part, box)
        if self.fault == "part_box" and found and part == "quantized_scalers" and box.numel:
            return Box(found.offsets, tuple(max(0, n - 1) for n in found.sizes))
        return found

    def decode(self, info: TensorInfo, parts: Mapping[str, Any], box: Box, out: Any) -> None:
        super().decode(info, parts, box, out)
        if self.fault == "decode":
            out.mul_(-1)
        if self.fault == "random":
            out += torch.randn(())

    def record(self, info: TensorInfo) -> Mapping[str, Any] | None:
        record = dict(super().record(info) or {})
        if self.fault == "record":
            record["shape"] = [info.numel]
        if self.fault == "json":
            record["shape"] = torch.Size(info.shape) if len(info.shape) < 2 else {1, 2}
        return record


class Faults(NF4Scheme):
    def __init__(self, fault: str) -> None:
        object.__setattr__(self, "fault", fault)

    def encoding(self, info: TensorInfo) -> Any:
        found: Any = super().encoding(info)
        if not isinstance(found, NF4):
            return found
        return FaultyNF4(found.block_size, found.scaler_block_size, self.fault)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fault", "check", "message"),
    [
        ("finish", "describes", "part 'quantized_scalers': 0 of 1 elements written once"),
        ("twice", "describes", "not in order"),
        ("offset", "pieces", "not in order"),
        ("dtype", "describes", "torch.float64, expected"),
        ("part_box", "boxes", "size of tensor|shape|other values"),
        ("decode", "values", "a relative rms error of"),
        ("random", "values", "decodes differently"),
        ("record", "recognised", "found again as"),
        ("json", "recognised", "not JSON serializable"),
    ],
)
def test_faulty_encoding(fault: str, check: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message), required(check):
        getattr(SchemeKit(Faults(fault)), check)()


def test_faulty_encoding_in_one_call() -> None:
    with pytest.raises(AssertionError, match="written once"):
        check_scheme(Faults("finish"))


class Truncating(CastBf16):
    """Rounds towards zero, where torch rounds to nearest."""

    def encoding(self, info: TensorInfo) -> Any:
        found = super().encoding(info)
        return TruncatedAs("bfloat16") if info.dtype == "float32" else found


class TruncatedAs(DenseAs):
    def encoder(self, info: TensorInfo, device: str) -> Any:
        encoder: Any = super().encoder(info, device)

        def feed(offset: int, values: torch.Tensor) -> Iterable[Write]:
            cut = values.view(torch.int32).bitwise_right_shift(16).to(torch.int16)
            yield Write("", flat(offset, values.numel()), cut.view(torch.bfloat16))

        encoder.feed = feed
        return encoder


def test_cast_that_is_not_torchs() -> None:
    with pytest.raises(AssertionError, match=r"the part is not values\.to\(dtype\)"):
        SchemeKit(Truncating()).values()


def test_scheme_that_touches_what_it_leaves_alone() -> None:
    class Fickle(CastBf16):
        """Takes an embedding when the plan asks, and says later that it does not."""

        asked = 0

        def target(self, fqn: str, info: TensorInfo) -> Any:
            Fickle.asked += 1
            return None if Fickle.asked > 6 else super().target(fqn, info)

    with pytest.raises(AssertionError, match=r"target\(\) is None, yet it changes"):
        SchemeKit(Fickle()).untouched()


# ------------------------------------------------------------------------------- directories


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    """Rank files of our own writer; that adapters know real ones is tested elsewhere."""
    import ckptmap

    torch.save({"fc.weight": torch.ones(4, 2)}, tmp_path / "a.pt")
    ckptmap.convert(tmp_path / "a.pt", tmp_path / "verl", to="fsdp2-ranks", world_size=2)
    (tmp_path / "verl" / "fsdp_config.json").write_text("{}")
    return tmp_path / "verl"


def test_sound_directory(verl: Path) -> None:
    check_directory(Verl(), verl)


class ClaimsAnyDirectory(Verl):
    def claims(self, place: Place) -> bool:
        return place.is_dir


class ReadsToClaim(Verl):
    def claims(self, place: Place) -> bool:
        if place.is_dir:
            for _ in range(20):
                [f.read_bytes() for f in Path(place.path).iterdir() if f.is_file()]
        return super().claims(place)


class NamesTheAbsent(Verl):
    def members(self, place: Place) -> Any:
        found = super().members(place)
        return replace(found, left=["rng_state.pt"])


class RaisesKeyError(Verl):
    def members(self, place: Place) -> Any:
        if "model_world_size_2_rank_1.pt" not in place.names:
            raise KeyError("model_world_size_2_rank_1.pt")
        return super().members(place)


class LeadsOut(Verl):
    def members(self, place: Place) -> Any:
        found = super().members(place)
        outside = replace(found.members[0], path=str(Path(place.path).parent))
        return replace(found, members=(outside,))


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        (ClaimsAnyDirectory(), "which is not its own"),
        (ReadsToClaim(), "claims\\(\\) reads"),
        (NamesTheAbsent(), "left behind: rng_state.pt is not there"),
        (RaisesKeyError(), "raises KeyError, expected SourceError"),
        (LeadsOut(), "lies outside"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_faulty_directory(directory: Any, message: str, verl: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        check_directory(directory, verl)


def test_the_registry_is_whole_again() -> None:
    names = [setup.name for setup in registry.setups()]
    assert "toy" not in names and len(set(names)) == len(names)
    assert registry.container_for(look(Path(__file__))) is None
