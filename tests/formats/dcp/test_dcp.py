"""DCP directories: torch's own are read, ours are read by torch, broken and hostile ones are refused."""

from __future__ import annotations

import copy
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import ckptmap
from ckptmap.core.row_chunks import RowChunks
from ckptmap.errors import PlanError, SourceError
from ckptmap.formats.dcp.metadata_reader import read_metadata
from ckptmap.formats.dcp.metadata_records import Item, Metadata, TensorEntry
from ckptmap.formats.dcp.metadata_writer import emit_metadata
from ckptmap.formats.dcp.reader import Dcp
from ckptmap.formats.dcp.writer import DcpWriter
from ckptmap.formats.detect import look
from ckptmap.protocols import Index, OutState, OutTensor
from ckptmap.sharding.shard0 import Shard0
from ckptmap.tensors import Box, Cut, Opaque, StoredTensor, TensorInfo
from tests.corpus.ranks import run_ranks
from tests.support.container_io import materialise, out_tensors, read_leaf, same
from tests.support.examples import examples

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

RANK_TIMEOUT_S = 120


def index_of(path: FilePath) -> Index:
    place = look(path)
    assert Dcp().claims(place)
    return Dcp().index(place)


def write(
    path: FilePath,
    tensors: dict[Any, Any],
    world_size: int = 1,
    extra: dict[Any, Any] | None = None,
    records: dict[str, Any] | None = None,
) -> None:
    outs = out_tensors(tensors, Shard0(), world_size)
    state = OutState(outs, extra or {}, records or {}, world_size)
    materialise(DcpWriter().files(state, "x"), path, tensors)


def truth() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "model": {
            "layers.0.w": torch.randn(1001, 3),
            "layers.0.half": torch.randn(4, 3, 2).bfloat16(),
            "narrow": torch.randn(2, 5, dtype=torch.float64),
            "mask": torch.tensor([True, False, True]),
            "count": torch.tensor(7),
            "empty": torch.empty(0, 3),
            "f8": torch.randn(8, 2).to(torch.float8_e4m3fn).view(torch.uint8),
        },
        "step": 5,
        "args": {"lr": [1.0, None]},
    }


def flat(tree: dict[str, Any]) -> dict[Any, Any]:
    return {("model", key): tensor for key, tensor in tree["model"].items()}


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], FilePath]:
    """Runs the rank script once a world size; all of ours is there to be loaded."""
    work = tmp_path_factory.mktemp("ranks")
    tree = truth()
    torch.save(tree, work / "truth.pt")
    for world in (1, 2, 4):
        extra = {("step",): 5, ("args",): {"lr": [1.0, None]}}
        write(work / f"ours{world}", flat(tree), world, extra)
    done: set[int] = set()

    def run(world: int) -> FilePath:
        if world not in done:
            done.add(world)
            run_ranks("tests.ranks.dcp", world, [str(work)], RANK_TIMEOUT_S)
        return work

    return run


# ------------------------------------------------------------------------- torch's, read


def test_reads_a_one_process_save(tmp_path: FilePath) -> None:
    import torch.distributed.checkpoint as dcp

    base = torch.randn(6, 8)
    tensors = {
        "a.b": base,
        "turned": base.t(),
        "part": base[1:3, 2:5],
        "scalar": torch.tensor(2.5),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "f8": torch.randn(3).to(torch.float8_e5m2),
        "none": torch.empty(0, 4),
        "complex": torch.randn(3, dtype=torch.complex64),
        "odd.key/ü": torch.randn(1),
    }
    plain = {"step": 5, "tuple": (1, 2.5, None), "text": "é", "list": [1, 2], "flag": True}
    tree = {"model": tensors, "extra": plain, "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]}
    dcp.save(tree, checkpoint_id=tmp_path, no_dist=True)
    index = index_of(tmp_path)
    for key, tensor in tensors.items():
        assert same(read_leaf(index.leaves["model", key]), tensor), key
    for key, value in plain.items():
        assert index.leaves["extra", key] == value
    assert index.leaves["groups", 0, "lr"] == 0.5
    assert index.leaves["groups", 0, "betas"] == (0.9, 0.99)
    assert len(index.leaves) == len(tensors) + len(plain) + 2
    assert index.world == 1
    assert sorted(FilePath(f).name for f in index.files) == [".metadata", "__0_0.distcp"]
    crcs = [
        leaf.chunks[0].crc32 for leaf in index.leaves.values() if isinstance(leaf, StoredTensor)
    ]
    assert sum(crc is not None for crc in crcs) >= 6


def test_items_of_one_kind_are_read_alike(tmp_path: FilePath) -> None:
    """The quick comparison with the first of a kind gives what reading in full gives."""
    import torch.distributed.checkpoint as dcp

    tensors = {f"w{i}": torch.randn(16, 3) for i in range(20)}
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    index = index_of(tmp_path)
    assert all(same(read_leaf(index.leaves[(key,)]), value) for key, value in tensors.items())
    assert all(index.leaves[(key,)].chunks[0].crc32 for key in tensors)


def test_files_beside_the_shards_are_named(tmp_path: FilePath) -> None:
    """A loop's own scheduler, say: nothing tells what it is, and it does not go along."""
    torch.distributed.checkpoint.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    torch.save({"last_epoch": 3}, tmp_path / "c" / "scheduler.pt")
    (tmp_path / "c" / "notes.txt").write_text("x")
    assert index_of(tmp_path / "c").unread_files == ("scheduler.pt",)
    assert list(ckptmap.plan(tmp_path / "c", "full").notes) == ["left behind: scheduler.pt"]


def test_several_files_a_rank_and_stale_ones(tmp_path: FilePath) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemWriter

    tensors = {f"w{i}": torch.randn(3, 2) for i in range(4)}
    writer = FileSystemWriter(tmp_path, single_file_per_rank=False, thread_count=2)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    (tmp_path / "__7_0.distcp").write_bytes(b"of an earlier save")
    index = index_of(tmp_path)
    assert len(index.files) > 2
    assert index.world == 1
    assert index.notes == (
        "not read, because an earlier save into this directory wrote it: __7_0.distcp",
    )
    assert all(same(read_leaf(index.leaves[(key,)]), value) for key, value in tensors.items())


def test_reads_fsdp2_of_two_ranks(ranks: Callable[[int], FilePath]) -> None:
    work = ranks(2)
    index = index_of(work / "fsdp2")
    weights, state = torch.load(work / "fsdp2.pt", weights_only=True)
    assert index.world == 2
    for key, tensor in weights.items():
        assert same(read_leaf(index.leaves["model", key]), tensor), key
    assert len(index.leaves["model", "0.weight"].chunks) == 2
    assert type(index.leaves["model", "0.weight"].place) is RowChunks
    for fqn, values in state["state"].items():
        for name, value in values.items():
            leaf = index.leaves["optimizer", "state", fqn, name]
            assert same(read_leaf(leaf), value), (fqn, name)
    assert index.leaves["optimizer", "param_groups", 0, "lr"] == 0.125
    assert index.leaves[("step",)] == 3
    assert index.leaves["args", "lr"] == [1.0, None]


def test_nf4_items_are_found_at_open(ranks: Callable[[int], FilePath]) -> None:
    work = ranks(2)
    big, tiny = index_of(work / "nf4"), index_of(work / "nf4tiny")
    for index, key, info in (
        (big, "0.weight", (256, 256)),
        (big, "1.weight", (32, 64)),
        (tiny, "weight", (32, 64)),
    ):
        cut = index.leaves[(key,)]
        assert isinstance(cut, Cut)
        assert cut.info == TensorInfo(info, "bfloat16")
        rows = info[0] // 2
        assert [box for box, _ in cut.pieces] == [
            Box((rank * rows, 0), (rows, info[1])) for rank in range(2)
        ]
        assert all(piece.class_name.endswith(".NF4Tensor") for _, piece in cut.pieces)
        assert all(isinstance(piece, Opaque) for _, piece in cut.pieces)


# --------------------------------------------------------------------- ours, read by torch


@pytest.mark.parametrize("world", [1, 2, 4])
def test_torch_loads_ours_in_one_process(world: int, tmp_path: FilePath) -> None:
    import torch.distributed.checkpoint as dcp

    tree = truth()
    write(tmp_path, flat(tree), world, {("step",): 5, ("args",): tree["args"]})
    names = {f"__{rank}_0.distcp" for rank in range(world)} | {".metadata"}
    assert {path.name for path in tmp_path.iterdir()} == names
    target = {
        "model": {key: torch.zeros_like(value) for key, value in tree["model"].items()},
        "step": 0,
        "args": {"lr": None},
    }
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert target["step"] == 5
    assert target["args"] == {"lr": [1.0, None]}
    for key, tensor in tree["model"].items():
        assert torch.equal(target["model"][key], tensor), key


@pytest.mark.parametrize("world", [2, 4])
def test_torch_loads_ours_at_world_size(world: int, ranks: Callable[[int], FilePath]) -> None:
    """The ranks themselves compare; written for 1, 2 and 4 ranks each."""
    work = ranks(world)
    assert {path.name for path in work.glob("ours*")} == {"ours1", "ours2", "ours4"}


def test_torch_loads_a_bare_model(tmp_path: FilePath) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    from tests.ranks.dcp import build

    saved = build().state_dict()
    write(tmp_path / "dcp", {(key,): value for key, value in saved.items()}, 2)
    model = build()
    for value in model.state_dict().values():
        value.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(state[key], value) for key, value in saved.items())
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert all(torch.equal(whole[key], value) for key, value in saved.items())
    assert len(whole) == len(saved)


def test_torch_loads_our_optimizer_state(tmp_path: FilePath) -> None:
    """param_groups are looked for leaf by leaf, as torch flattens them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from tests.ranks.dcp import build, trained

    model = build()
    weights, state = get_state_dict(model, trained(model))
    tensors = {("model", key): value for key, value in weights.items()}
    for fqn, values in state["state"].items():
        for name, value in values.items():
            tensors["optimizer", "state", fqn, name] = value
    extra = {("optimizer", "param_groups"): state["param_groups"]}
    write(tmp_path, tensors, 2, extra)
    assert index_of(tmp_path).leaves["optimizer", "param_groups", 0, "lr"] == 0.125
    other = build()
    optimizer = trained(other)
    optimizer.param_groups[0]["lr"] = 0.0
    found = dict(zip(("model", "optimizer"), get_state_dict(other, optimizer), strict=True))
    for value in found["model"].values():
        value.zero_()
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        other, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert all(torch.equal(other.state_dict()[k], v) for k, v in weights.items())


def test_every_dtype_round_trips_and_torch_reads_it(tmp_path: FilePath) -> None:
    import torch.distributed.checkpoint as dcp

    from ckptmap.tensors import ITEMSIZE

    raw = torch.randint(0, 2, (4, 16), dtype=torch.uint8)
    tensors = {(name,): raw.view(getattr(torch, name)) for name in ITEMSIZE}
    write(tmp_path, tensors, 2)
    index = index_of(tmp_path)
    assert all(same(read_leaf(index.leaves[path]), value) for path, value in tensors.items())
    target = {name: value.clone() for (name,), value in tensors.items()}
    for value in target.values():
        value.view(torch.uint8).zero_()
    target.pop("float4_e2m1fn_x2")  # torch has no copy_ for it
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert all(same(value, tensors[(name,)]) for name, value in target.items())


def test_values_and_records_round_trip(tmp_path: FilePath) -> None:
    record = {"scheme": "nf4", "shape": [4, 4], "nested": {"b": 1, "a": None}}
    extra = {
        ("extra", "milestones"): {10: 1, 20: 2},
        ("extra", "empty"): {},
        ("extra", "deep"): {"a": {"b": [1, {"c": (1, 2)}]}, "t": "é"},
    }
    write(tmp_path, {("model", "w.x"): torch.ones(4)}, 1, extra, {"model.w": record})
    index = index_of(tmp_path)
    assert index.records == {"model.w": record}
    assert set(index.leaves) == {
        ("model", "w.x"),
        ("extra", "milestones"),
        ("extra", "empty"),
        ("extra", "deep", "a", "b", 0),
        ("extra", "deep", "a", "b", 1, "c"),
        ("extra", "deep", "t"),
    }
    assert index.leaves["extra", "milestones"] == {10: 1, 20: 2}
    assert index.leaves["extra", "empty"] == {}
    assert index.leaves["extra", "deep", "a", "b", 1, "c"] == (1, 2)


def test_data_lie_aligned_and_bytes_are_the_same_again(tmp_path: FilePath) -> None:
    tensors = {(f"w{i}",): torch.randn(5, i + 1).half() for i in range(8)}
    for name in ("a", "b"):
        write(tmp_path / name, tensors, 3, {("step",): 1})
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "a" / ".metadata").read_bytes()
    for leaf in index_of(tmp_path / "a").leaves.values():
        if isinstance(leaf, StoredTensor):
            assert all(chunk.region.offset % 64 == 0 for chunk in leaf.chunks)


def test_a_save_that_torch_cannot_read_back_is_named(tmp_path: FilePath) -> None:
    """All tensors of a file at one offset, raw lengths in .metadata: nothing is cut short."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

    state = {"w": torch.ones(4, 3), "b": torch.ones(2, dtype=torch.bfloat16), "step": 3}
    writer = FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state, storage_writer=writer, no_dist=True)
    with pytest.raises(
        SourceError, match=r"archive, found safetensors, as FileSystemWriter"
    ) as caught:
        ckptmap.open(tmp_path)
    assert caught.value.code == "CKM109" and "without serialization_format" in caught.value.hint


@pytest.mark.parametrize("numel", [4, 3000])
def test_a_conjugated_tensor_is_named(tmp_path: FilePath, numel: int) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.ones(numel, dtype=torch.complex64).conj(), "b": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with ckptmap.open(tmp_path) as ckpt:
        if ckpt.refused:
            assert "resolve_conj()" in ckpt.refused[0].reason
        else:
            with pytest.raises(SourceError, match="is a view that torch conjugates"):
                ckpt["w"].read()


def test_keys_that_collide_and_values_that_are_not_plain() -> None:
    info = TensorInfo((), "float32")
    chunk = ((0, Box((), ())),)
    with pytest.raises(PlanError, match=r"'a\.b' would be written twice: as \('a', 'b'\)"):
        DcpWriter().files(
            OutState([OutTensor(("a", "b"), info, chunk), OutTensor(("a.b",), info, chunk)]), "x"
        )
    with pytest.raises(PlanError, match=r"^args\.x: <os\.thing> cannot be written.*--drop args"):
        DcpWriter().files(OutState([], {("args",): {"x": Opaque("os", "thing")}}), "x")


segments = st.text("ab.é/", min_size=1, max_size=4)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
    | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.integers(), inner, max_size=2),
    max_leaves=5,
)  # fmt: skip


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.tuples(st.just("m"), segments), st.tuples(shapes, st.sampled_from(["float32", "int8", "bool"])), max_size=4),
    st.dictionaries(st.tuples(st.just("x"), segments), plain, max_size=3),
    st.integers(1, 4),
)  # fmt: skip
def test_random_trees_round_trip(
    tmp_path: FilePath, infos: dict[Any, Any], extra: dict[Any, Any], world: int
) -> None:
    tensors = {
        path: torch.arange(TensorInfo(shape, dtype).numel).reshape(shape).to(getattr(torch, dtype))
        for path, (shape, dtype) in infos.items()
    }
    shutil.rmtree(tmp_path / "d", ignore_errors=True)
    write(tmp_path / "d", tensors, world, extra)
    leaves = dict(index_of(tmp_path / "d").leaves)
    for path, tensor in tensors.items():
        assert same(read_leaf(leaves.pop(path)), tensor)
    from ckptmap.formats.dcp.writer import _flattened

    assert leaves == {p: v for path, value in extra.items() for p, v in _flattened(path, value)}


# --------------------------------------------------------------------------- the metadata

ITEM = Item("__0_0.distcp", 0, 1600)
SMALL = Metadata(
    {"m.w": TensorEntry(TensorInfo((4, 2), "bfloat16"), (((0, 0), (2, 2), ITEM), ((2, 0), (2, 2), ITEM)))},
    {"step": Item("__0_0.distcp", 1600, 900)},
    {"m.w": ("m", "w"), "step": ("step",)},
)  # fmt: skip


def test_metadata_is_what_torch_reads_and_would_write() -> None:
    import torch.distributed.checkpoint

    theirs = pickle.loads(emit_metadata(SMALL))
    entry = theirs.state_dict_metadata["m.w"]
    assert entry.size == torch.Size([4, 2])
    assert entry.properties.dtype == torch.bfloat16
    assert entry.properties.layout == torch.strided
    assert entry.properties.memory_format == torch.contiguous_format
    assert [type(chunk.offsets) for chunk in entry.chunks] == [torch.Size, torch.Size]
    assert theirs.planner_data == {"m.w": ("m", "w"), "step": ("step",)}
    assert theirs.version == "1.0.0"
    assert theirs.storage_meta.checkpoint_id is None
    assert {(key.fqn, key.offset, key.index) for key in theirs.storage_data} == {
        ("m.w", (0, 0), 0),
        ("m.w", (2, 0), 1),
        ("step", None, None),
    }
    for protocol in (2, 4, 5):
        assert read_metadata(pickle.dumps(theirs, protocol), "x") == SMALL


def test_metadata_of_older_torch() -> None:
    """No planner data, version or storage meta; the properties' class was elsewhere (<= 2.3)."""
    raw = emit_metadata(SMALL).replace(
        b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n",
        b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties\n",
    )
    assert read_metadata(raw, "x") == SMALL
    theirs = pickle.loads(emit_metadata(SMALL))
    for name in ("storage_meta", "version"):
        del theirs.__dict__[name]
    theirs.planner_data = None
    found = read_metadata(pickle.dumps(theirs), "x")
    assert found.tensors == SMALL.tensors
    assert found.path("m.w") == ("m.w",)


def test_metadata_cut_or_flipped_is_refused_or_parses() -> None:
    raw = emit_metadata(SMALL)
    assert read_metadata(raw, "x") == SMALL
    for length in range(len(raw)):
        with pytest.raises(SourceError, match=r"^x: "):
            read_metadata(raw[:length], "x")
    for position in range(len(raw)):
        for bit in (0, 3, 6, 7):
            flipped = bytearray(raw)
            flipped[position] ^= 1 << bit
            try:
                read_metadata(bytes(flipped), "x")
            except SourceError as error:
                assert error.code in ("CKM106", "CKM109")


def changed(change: Callable[[Any], object]) -> bytes:
    theirs = pickle.loads(emit_metadata(SMALL))
    change(theirs)
    return pickle.dumps(theirs)


def set_key(index: int, **fields: Any) -> Callable[[Any], object]:
    def change(metadata: Any) -> None:
        list(metadata.storage_data)[index].__dict__.update(fields)

    return change


def set_place(**fields: Any) -> Callable[[Any], object]:
    return lambda m: next(iter(m.storage_data.values())).__dict__.update(fields)


def set_chunk(**fields: Any) -> Callable[[Any], object]:
    return lambda m: m.state_dict_metadata["m.w"].chunks[0].__dict__.update(fields)


BAD_METADATA: dict[str, tuple[Callable[[Any], object], str]] = {
    "entries": (lambda m: m.__dict__.update(state_dict_metadata=[1]), "expected a dict, found list"),
    "no entries": (lambda m: m.__dict__.pop("state_dict_metadata"), "expected a dict"),
    "no storage": (lambda m: m.__dict__.update(storage_data=None), "storage_data, expected a dict"),
    "entry": (lambda m: m.state_dict_metadata.update(step=7), "entry 'step', expected a tensor or bytes, found 7"),
    "entry class": (
        lambda m: m.state_dict_metadata.update(step=torch.nn.ReLU()),
        r"found torch\.nn\.modules\.activation\.ReLU",
    ),
    "key": (lambda m: m.state_dict_metadata.update({7: 1}), "entry 7, expected|expected names"),
    "storage key": (lambda m: m.storage_data.update(a=1), "storage_data, expected an item, found 'a': 1"),
    "no place": (
        lambda m: m.storage_data.pop(next(iter(m.storage_data))),
        r"entry 'm\.w' at \(0, 0\) has no place in storage_data",
    ),
    "no value place": (
        lambda m: m.storage_data.pop(list(m.storage_data)[2]),
        "entry 'step' has no place",
    ),
    "twice": (set_key(1, offset=torch.Size((0, 0))), r"holds 'm\.w' at \(0, 0\) twice"),
    "no entry": (
        lambda m: m.state_dict_metadata.pop("m.w"), r"storage_data, 'm\.w' at \(0, 0\) belongs to no entry"
    ),
    "fqn": (set_key(1, fqn=7), "expected a MetadataIndex with an FQN, found 7"),
    "index offset": (set_key(1, offset=[[1], 2]), "expected sizes, found list"),
    "path": (set_place(relative_path=7), "expected a file and its range, found 7"),
    "negative": (set_place(offset=-1), "impossible: 1600 bytes from -1"),
    "huge": (set_place(length=10**600), "impossible: 10{60,} bytes from 0"),
    "transform": (set_place(transform_descriptors=7), "transforms, expected a list"),
    "chunks": (
        lambda m: m.state_dict_metadata["m.w"].__dict__.update(chunks=None),
        "chunks of 'm.w', expected a list",
    ),
    "chunk": (
        lambda m: m.state_dict_metadata["m.w"].__dict__.update(chunks=[1]),
        "chunk of 'm.w', expected ChunkStorageMetadata, found 1",
    ),
    "chunk rank": (set_chunk(offsets=torch.Size((0,))), r"chunk of 'm\.w', not of 2 dims: \(0,\)\+\(2, 2\)"),
    "chunk float": (set_chunk(sizes=(2.0, 2)), "expected sizes, found"),
    "chunk bool": (set_chunk(sizes=(True, 2)), "expected sizes, found"),
    "chunk negative": (set_chunk(offsets=(-1, 0)), "expected sizes, found"),
    "chunk huge": (set_chunk(offsets=(10**600, 0)), "expected sizes, found .10{60,}"),
    "chunk wide": (set_chunk(sizes=(2**63, 2)), "expected sizes, found"),
    "size": (
        lambda m: m.state_dict_metadata["m.w"].__dict__.update(size=torch.Size((2**40, 2**40))),
        r"shape \(1099511627776, 1099511627776\) has too many dims or elements",
    ),
    "dtype": (
        lambda m: m.state_dict_metadata["m.w"].properties.__dict__.update(dtype=torch.qint8),
        r"unknown dtype torch\.qint8",
    ),
    "properties": (
        lambda m: m.state_dict_metadata["m.w"].__dict__.update(properties=3),
        "unknown dtype None",
    ),
    "planner": (lambda m: m.__dict__.update(planner_data=[1]), "planner_data, expected a dict"),
    "no path": (lambda m: m.planner_data.update(step=()), r"planner_data\['step'\], expected a path"),
    "surrogate": (lambda m: m.planner_data.update(step=("\ud800",)), "expected text or int: '.ud800'"),
    "a key without a path": (lambda m: m.planner_data.pop("step"), "a path of every key, found none of 'step'"),
    "segment": (lambda m: m.planner_data.update(step=(2.5,)), "expected text or int: float"),
    "another path": (
        lambda m: m.planner_data.update(step=("m", "w")),
        r"planner_data\['step'\], expected a path of that key, found \('m', 'w'\)",
    ),
    "another number": (
        lambda m: m.planner_data.update(step=("step", 0)),
        r"planner_data\['step'\], expected a path of that key, found \('step', 0\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_METADATA)
def test_bad_metadata(name: str) -> None:
    change, match = BAD_METADATA[name]
    with pytest.raises(
        SourceError, match=f"^dir/.metadata: bad DCP metadata: .*({match})"
    ) as caught:
        read_metadata(changed(change), "dir/.metadata")
    assert caught.value.code == "CKM109"
    assert "\n" not in str(caught.value)


def test_evil_metadata_is_refused_and_not_run(tmp_path: FilePath) -> None:
    mark = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {mark}",)

    for evil in (Evil(), {"a": Evil()}):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(evil))
        with pytest.raises(SourceError, match=r"pickle names os\.system .*\(?refused") as caught:
            index_of(tmp_path)
        assert caught.value.code == "CKM106"
    theirs = pickle.loads(emit_metadata(SMALL))
    theirs.planner_data["step"] = Evil()
    with pytest.raises(SourceError, match="nothing was run"):
        read_metadata(pickle.dumps(theirs), "x")
    assert not mark.exists()


def test_a_pickle_cannot_change_our_classes() -> None:
    """BUILD on a class that it names would set attributes of that class."""
    glob = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    for state in (b"(N}X\x03\x00\x00\x00fqnK\x01stb", b"}X\x03\x00\x00\x00fqnK\x01sb"):
        with pytest.raises(SourceError, match="malformed pickle"):
            read_metadata(b"\x80\x02" + glob + state + b".", "x")
    assert read_metadata(emit_metadata(SMALL), "x") == SMALL


@pytest.mark.parametrize(
    "module, name, match",
    [
        ("bytecheckpoint.checkpointer.meta_type", "Metadata", "ByteCheckpoint is another format"),
        ("collections", "OrderedDict", r"metadata\.Metadata, found dict"),
        ("my.own", "Metadata", r"metadata\.Metadata, found my\.own\.Metadata"),
    ],
)
def test_other_roots(module: str, name: str, match: str) -> None:
    raw = f"c{module}\n{name}\n)R.".encode()
    with pytest.raises(SourceError, match=match) as caught:
        read_metadata(b"\x80\x02" + raw, "x/.metadata")
    assert caught.value.code == "CKM109"


# ----------------------------------------------------------------------- bad directories


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    """torch's own: 4 chunks of one tensor, made by stitching four saves' metadata."""
    import torch.distributed.checkpoint as dcp

    path = tmp_path_factory.mktemp("good") / "dcp"
    dcp.save({"w": torch.randn(4, 3), "v": torch.randn(3, 4), "step": 5}, checkpoint_id=path, no_dist=True)  # fmt: skip
    return path


@pytest.fixture
def broken(good: FilePath, tmp_path: FilePath) -> FilePath:
    return FilePath(shutil.copytree(good, tmp_path / "dcp"))


def edit(change: Callable[[Any], object]) -> Callable[[FilePath], None]:
    def apply(directory: FilePath) -> None:
        file = directory / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        change(metadata)
        file.write_bytes(pickle.dumps(metadata))

    return apply


def place_of(metadata: Any, fqn: str) -> Any:
    return next(place for key, place in metadata.storage_data.items() if key.fqn == fqn)


def swap_items(metadata: Any) -> None:
    """As torch's _StridedShard bug does: each declared chunk holds the other's bytes."""
    w, v = place_of(metadata, "w"), place_of(metadata, "v")
    w.__dict__, v.__dict__ = v.__dict__, w.__dict__


def resize(size: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    """Declare tensor w of another size and chunks; every chunk is w's one item."""

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = torch.Size(size)
        template = entry.chunks[0]
        place = place_of(metadata, "w")
        key = next(key for key in metadata.storage_data if key.fqn == "w")
        del metadata.storage_data[key]
        entry.chunks = []
        for offsets, sizes in boxes:
            chunk = copy.copy(template)
            chunk.offsets, chunk.sizes = torch.Size(offsets), torch.Size(sizes)
            entry.chunks.append(chunk)
            where = copy.copy(key)
            where.__dict__["offset"] = torch.Size(offsets)
            metadata.storage_data[where] = place

    return change


def dtype_of(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32


def link_out(directory: FilePath) -> None:
    (directory / "__0_0.distcp").rename(directory.parent / "outside")
    (directory / "__0_0.distcp").symlink_to("../outside")


def rename(name: str) -> Callable[[FilePath], None]:
    def change(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = name

    return edit(change)


def flip_item(position: int) -> Callable[[FilePath], None]:
    """Damage in the small archive of w, at the given byte of it."""

    def apply(directory: FilePath) -> None:
        place = place_of(pickle.loads((directory / ".metadata").read_bytes()), "w")
        file = directory / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[place.offset + position] ^= 0xFF
        file.write_bytes(data)

    return apply


BAD: dict[str, tuple[Callable[[FilePath], None], str, str]] = {
    "no data file": (
        lambda d: (d / "__0_0.distcp").unlink(),
        "CKM109",
        r"/\.metadata: lists the data file '__0_0\.distcp', which is missing",
    ),
    "truncated": (
        lambda d: os.truncate(d / "__0_0.distcp", 3000),
        "CKM104",
        "truncated, expected .* bytes or more, found 3000",
    ),
    "past the end": (
        edit(lambda m: place_of(m, "w").__dict__.update(offset=10**9)),
        "CKM104",
        "truncated, expected 100000.* found",
    ),
    "dots": (rename("../dcp/__0_0.distcp"), "CKM116", "leads out of the directory"),
    "absolute": (rename("/etc/passwd"), "CKM116", "'/etc/passwd' leads out of the directory"),
    "symlink": (link_out, "CKM116", "it is a symlink to .*outside"),
    "directory": (rename("."), "CKM116", "leads out"),
    "zstd": (
        edit(lambda m: place_of(m, "w").__dict__.update(transform_descriptors=["stream.zstd/1"])),
        "CKM109",
        r"is transformed by stream\.zstd/1, .*save it again without `_extensions`",
    ),
    "swapped": (edit(swap_items), "CKM112", r"declares float32\[\d, \d\], the item holds float32.*pytorch#161368"),
    "dtype": (edit(dtype_of), "CKM112", r"declares int32\[4, 3\], the item holds float32\[4, 3\]"),
    "hole": (edit(resize((8, 3), ((0, 0), (4, 3)))), "CKM112", "chunks cover 12 of 24 elements"),
    "overlap": (
        edit(resize((6, 3), ((0, 0), (4, 3)), ((2, 0), (4, 3)))),
        "CKM112",
        "overlap",
    ),
    "outside": (edit(resize((4, 3), ((1, 0), (4, 3)))), "CKM112", "leaves the shape"),
    "no chunks": (edit(resize((4, 3))), "CKM112", "chunks cover 0 of 12 elements"),
    "offset shifted": (
        edit(lambda m: place_of(m, "w").__dict__.update(offset=place_of(m, "w").offset + 1)),
        "CKM10[456]",
        "item 'w' at byte",
    ),
    "value damaged": (
        edit(lambda m: place_of(m, "step").__dict__.update(offset=5)),
        "CKM10[456]",
        "item 'step' at byte 5",
    ),
    "item damaged": (flip_item(0x60), "CKM10[56]", "item 'w' at byte .*(damaged|malformed|says)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_directory(name: str, broken: FilePath) -> None:
    harm, code, match = BAD[name]
    harm(broken)
    with pytest.raises(SourceError, match=match) as caught:
        index = index_of(broken)
        for leaf in index.leaves.values():
            assert not isinstance(leaf, StoredTensor) or leaf.chunks
    assert re.fullmatch(code, caught.value.code)
    assert str(broken) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_second_of_a_kind_is_checked_too(tmp_path: FilePath) -> None:
    """Damage in an item after one of the same shape was read: in its pickle and its directory."""
    import torch.distributed.checkpoint as dcp

    dcp.save({f"w{i}": torch.randn(4, 3) for i in range(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    place = place_of(metadata, "w2")
    clean = (tmp_path / "__0_0.distcp").read_bytes()
    refused = 0
    for position in (*range(0, 704, 41), *range(place.length - 800, place.length, 41)):
        data = bytearray(clean)
        data[place.offset + position] ^= 0xFF
        (tmp_path / "__0_0.distcp").write_bytes(data)
        index = index_of(tmp_path)
        before = [read_leaf(index.leaves[(f"w{i}",)]) for i in range(2)]
        assert len(before) == 2
        try:
            region = index.leaves[("w2",)].chunks[0].region
        except SourceError:
            refused += 1
        else:  # padding, a timestamp, a checksum: the data are found where they are
            assert region.offset == place.offset + 704
    assert refused > 10


def test_an_unfinished_save_is_not_claimed(tmp_path: FilePath) -> None:
    (tmp_path / ".metadata.tmp").touch()
    place = look(tmp_path)
    assert not Dcp().claims(place)
    with pytest.raises(SourceError, match="the save died before it finished") as caught:
        Dcp().index(place)
    assert caught.value.code == "CKM109"


def test_a_record_that_is_none(tmp_path: FilePath) -> None:
    write(tmp_path, {}, 1, {("w.__ckptmap__",): 7})
    with pytest.raises(
        SourceError, match=r"item 'w\.__ckptmap__': expected an encoding record, a dict of names"
    ):
        index_of(tmp_path)


def test_no_torch_is_imported(good: FilePath) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom ckptmap.formats.detect import look\n"
        "from ckptmap.formats.dcp.reader import Dcp\nfrom ckptmap.formats.dcp import writer as dcp_write; from ckptmap.formats.huggingface import format as hf\n"
        f"index = Dcp().index(look(Path({str(good)!r})))\n"
        "assert len(index.leaves) == 3 and index.leaves[('w',)].chunks\n"
        "assert not {'torch', 'numpy', 'safetensors', 'torchao'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
