"""The kit for key forms, layouts, encodings and directories can fail: each adapter has one fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmap.formats.frameworks.verl import Verl
from ckptmap.optim.keys_by_fqn import ByFqn
from ckptmap.optim.keys_by_index import ByIndex
from ckptmap.optim.keys_flattened import Flattened
from ckptmap.optim.state import KeyForm, Optimizer, StateKeys
from ckptmap.protocols import Place, Write
from ckptmap.quantization.dense import CastBf16, DenseAs, flat
from ckptmap.quantization.nf4.encoding import NF4
from ckptmap.quantization.nf4.scheme import NF4Scheme
from ckptmap.sharding.shard0 import Shard0
from ckptmap.tensors import Box, Chunk, StoredTensor, TensorInfo
from ckptmap.testing import (
    SchemeKit,
    check_directory,
    check_key_form,
    check_layout,
    check_scheme,
)
from ckptmap.testing.base import required

# ------------------------------------------------------------------------------- key forms


class Greedy(ByFqn):
    def read(self, leaves: Mapping[Any, Any]) -> StateKeys | None:
        return super().read(leaves) or StateKeys(False, {}, {}, [], list(leaves))


class Flat(Flattened):
    """Nested state is cut off without a word."""

    def write(self, optimizer: Optimizer) -> list[tuple[Any, Any]]:
        kept = [replace(leaf, name=leaf.name[:1]) for leaf in optimizer.leaves]
        return super().write(replace(optimizer, leaves=kept))


class Nameless(ByIndex):
    def write(self, optimizer: Optimizer) -> list[tuple[Any, Any]]:
        found = super().write(optimizer)
        for group in found[-1][1]:
            del group["param_names"]
        return found


class Forgetful(ByFqn):
    """Reads no setting of a group."""

    def read(self, leaves: Mapping[Any, Any]) -> StateKeys | None:
        keys = super().read(leaves)
        return None if keys is None else replace(keys, hyper={})


class Merging(ByFqn):
    """One group where there were two."""

    def write(self, optimizer: Optimizer) -> list[tuple[Any, Any]]:
        params = [fqn for group in optimizer.groups for fqn in group["params"]]
        one = {**optimizer.groups[0], "params": params}
        return super().write(replace(optimizer, groups=[one]))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (Greedy(), r"claims \{\}"),
        (Flat(), "nested state.*reads the state"),
        (Nameless(), "by index without the names"),
        (Forgetful(), "is accounted for nowhere"),
        (Merging(), "reads the groups"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_faulty_key_form(form: KeyForm, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_key_form(form)


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
        (lambda chunks: [c for c in chunks if c[1].numel], "there is no box"),
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
            record["shape"] = set(info.shape)
        return record


class Faults(NF4Scheme):
    def __init__(self, fault: str) -> None:
        object.__setattr__(self, "fault", fault)

    def encoding(self, info: TensorInfo) -> Any:
        found: Any = super().encoding(info)
        if not isinstance(found, NF4):
            return found
        return FaultyNF4(found.block_size, found.scaler_block_size, fault=self.fault)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fault", "check", "message"),
    [
        ("finish", "describes", "part 'quantized_scalers': 0 of 1 elements written once"),
        ("twice", "describes", "not in order"),
        ("offset", "pieces", "not in order"),
        ("dtype", "describes", "torch.float64, expected"),
        ("part_box", "boxes", "exceeds dimension size|size of tensor|other values"),
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


def test_scheme_that_changes_a_tensor_it_does_not_target() -> None:
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
        return replace(found, unread_files=["rng_state.pt"])


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
