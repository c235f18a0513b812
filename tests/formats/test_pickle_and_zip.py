"""Pickles and zip archives: what is read, what is refused, and that no pickle ever calls anything."""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import struct
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.serialization import config

from ckptmap.errors import SourceError
from ckptmap.formats.pickle.named_values import Call, Global, Instance
from ckptmap.formats.pickle.reader import Device, DType, Size, load
from ckptmap.formats.pickle.writer import StorageTensor, dump
from ckptmap.formats.torch_save.reader import load as load_zip
from ckptmap.formats.torch_save.writer import layout_zip
from ckptmap.formats.zip.reader import read_records
from ckptmap.storage.files import Files
from ckptmap.tensors import ITEMSIZE, Opaque
from tests.support.examples import examples

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
NUMBERS = ("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")

# ------------------------------------------------------------------------------ reading pickles


class Calls:
    """An object whose pickle calls `function(*args)`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_come_as_they_were(protocol: int) -> None:
    value = {
        "set": {1, "a"},
        "frozen": frozenset((1, 2)),
        "bytes": bytes(range(256)),
        "bytearray": bytearray(b"xyz"),
        "complex": 1 - 2j,
        "nested": [1, (2.5, None, True), {"k": -(2**80)}],
        "ordered": collections.OrderedDict(a=1, b=2),
        "default": collections.defaultdict(list, {1: [2]}),
        "range": range(3),
        "slice": slice(1, 5, 2),
        3: "é\ud800",
    }
    assert load(pickle.dumps(value, protocol), "here") == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_foreign_objects_are_inert_and_say_what_they_were(protocol: int) -> None:
    value = {
        "args": argparse.Namespace(lr=1e-3),
        "class": argparse.Namespace,
        "function": os.path.join,
        "deque": collections.deque([1, 2]),
        "path": Path("a/b"),
    }
    tree = load(pickle.dumps(value, protocol), "here")
    assert all(isinstance(found, Opaque) for found in tree.values())
    assert tree["args"].class_name == "argparse.Namespace"
    assert tree["args"].state == {"lr": 1e-3}
    assert tree["class"].class_name == "argparse.Namespace" and tree["class"].state is None
    assert tree["deque"].items == [1, 2]
    assert repr(tree["args"]) == repr(tree["class"]) == "<argparse.Namespace>"
    assert len(set(tree.values())) == len(value), "hashed by identity"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numbers_of_numpy_are_exactly_what_they_were(protocol: int) -> None:
    numpy = pytest.importorskip("numpy")
    kinds = [numpy.dtype(f"{order}{kind}") for order in "<>" for kind in NUMBERS]
    values = [numpy.array([-3 if kind.kind in "if" else 3]).astype(kind)[0] for kind in kinds]
    values += [
        numpy.float32(0.1),
        numpy.float64("inf"),
        numpy.uint64(2**64 - 1),
        numpy.bool_(False),
    ]
    found = load(pickle.dumps(values, protocol), "here")
    assert found == [value.item() for value in values]
    assert [type(value) for value in found] == [type(value.item()) for value in values]
    others = [
        numpy.longdouble(1),
        numpy.complex64(1j),
        numpy.datetime64("2026-01-01"),
        numpy.str_("a"),
    ]
    inert = load(pickle.dumps(others, protocol), "here")
    assert [value.name for value in inert] == ["scalar"] * len(others)


def test_malformed_numpy_scalars_stay_inert() -> None:
    scalar, dtype = Global("numpy._core.multiarray", "scalar"), Global("numpy", "dtype")
    for args in ((), (1, b"x"), (Call(dtype, ("f8",)), b"12345678"), (Call(dtype, ()), b"")):
        assert isinstance(load(dump(Call(scalar, args)), "here"), Opaque)
    with pytest.raises(SourceError, match="TorchVersion"):
        load(dump(Call(Global("torch.torch_version", "TorchVersion"), ([],))), "here")


def test_torch_markers() -> None:
    tree = load(
        pickle.dumps((torch.bfloat16, torch.Size((2, 3)), torch.device("cuda", 1)), 2), "here"
    )
    assert tree == (DType("bfloat16"), (2, 3), Device("cuda:1"))
    assert type(tree[1]) is Size


def test_metadata_of_a_state_dict_is_kept_and_nothing_else_is() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    ordered = collections.OrderedDict(a=1)
    ordered._metadata = state._metadata  # type: ignore[attr-defined]
    ordered.keys = "shadow"  # type: ignore[method-assign,assignment]
    found = load(pickle.dumps(ordered, 2), "here")
    assert found._metadata == state._metadata  # type: ignore[attr-defined]
    assert list(found.keys()) == ["a"]


def shout(*args: Any) -> None:
    raise AssertionError("a pickle called a function of this module")


DANGEROUS = [
    pytest.param(Calls(os.system, "exit 3"), r"os\.system", id="os.system"),
    pytest.param(Calls(eval, "1"), r"\.eval", id="eval"),
    pytest.param(Calls(exec, "1"), r"\.exec", id="exec"),
    pytest.param(Calls(__import__, "this"), "__import__", id="import"),
    pytest.param(Calls(open, "/etc/passwd"), r"\.open", id="open"),
    pytest.param(Calls(pickle.loads, b"N."), r"pickle\.loads", id="pickle.loads"),
    pytest.param(Calls(torch.load, "x.pt"), r"torch\.serialization\.load", id="torch.load"),
    pytest.param(Calls(sys.exit, 3), r"sys\.exit", id="sys.exit"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("value", "names"), DANGEROUS)
def test_a_pickle_that_attacks_is_refused(value: Any, names: str, protocol: int) -> None:
    with pytest.raises(SourceError, match=rf"here: pickle names .*{names}.*nothing was run"):
        load(pickle.dumps({"w": 1, "x": value}, protocol), "here")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_any_other_function_is_not_called(protocol: int) -> None:
    tree = load(pickle.dumps(Calls(shout, 1, 2), protocol), "here")
    assert tree.name == "shout" and tree.args == (1, 2)


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


HAND_MADE = {
    "INST": b"(S'exit 3'\nios\nsystem\n.",
    "OBJ": b"(" + _global("os", "system") + b"S'exit 3'\no.",
    "dotted name": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x06exit 3\x85R.",
    "getattr of a module": (
        b"\x80\x02" + _global("__builtin__", "getattr")
        + _global("torch", "os") + b"X\x06\0\0\0system\x86RX\x06\0\0\0exit 3\x85R."
    ),
    "getattr chain": (
        b"\x80\x02" + _global("__builtin__", "getattr") + _global("__builtin__", "getattr")
        + _global("torch", "serialization") + b"X\x02\0\0\0os\x86RX\x06\0\0\0system\x86R."
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_attacks(name: str) -> None:
    with pytest.raises(SourceError, match="pickle names") as caught:
        load(HAND_MADE[name], "here")
    assert caught.value.code == "CKM106"


def test_nested_classes_of_protocol_2_are_inert() -> None:
    data = (
        b"\x80\x02" + _global("__builtin__", "getattr")
        + _global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
        + b"X\x11\0\0\0ProcessGroupState\x86R)\x81}X\x01\0\0\0aK\x01sb."
    )  # fmt: skip
    found = load(data, "here")
    assert found.name == "ShardedTensor.ProcessGroupState" and found.state == {"a": 1}


def test_reconstructor_is_inert() -> None:
    data = _global("copy_reg", "_reconstructor") + b"(" + _global("m", "C")
    found = load(data + _global("__builtin__", "object") + b"NtR(dp0\nb.", "here")
    assert found.class_name == "m.C"


MALFORMED = {
    "empty": b"",
    "truncated": b"\x80\x02}q\0(X\x05\0\0\0",
    "stack": b"0.",
    "memo": b"h\x05.",
    "huge memo index": b"N" + b"r\xff\xff\xff\xff.",
    "huge text memo index": b"Np4000000000\n.",
    "long integer": b"\x8b\x00\x01\x00\x00" + bytes(255) + b"\x01.",
    "huge memo index behind many strings": b"X\3\0\0\0abc0" * 2000 + b"Nr\xff\xff\xff\xff.",
    "huge string": b"\x8e" + struct.pack("<Q", 2**62) + b"x.",
    "unicode": b"X\x01\0\0\0\xff.",
    "set of unhashable": b"\x8f(]\x90.",
    "call of a dtype": _global("torch", "float32") + b")R.",
    "call of a value": b"K\x01)R.",
    "build of a name": _global("m", "C") + b"}b.",
    "build of a function": _global("torch", "Size") + b"N}X\x01\0\0\0aK\x01s\x86b.",
    "bytes of a number": _global("__builtin__", "bytearray") + b"\x8a\x05\0\0\0\0\x01\x85R.",
    "list of a range": (
        _global("__builtin__", "list") + _global("__builtin__", "range")
        + b"\x8a\x06\0\0\0\0\0\x01\x85R\x85R."
    ),
    "extension": b"\x82\x01.",
    "persistent": b"Pstorage\n.",
    "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_pickles_are_one_error(name: str) -> None:
    with pytest.raises(SourceError, match="here: malformed pickle") as caught:
        load(MALFORMED[name], "here")
    assert caught.value.code == "CKM106"


def test_copies_without_end_are_refused() -> None:
    """`set(x)` of a memoised list, again and again: a few bytes of pickle a copy."""
    one = b"h\x01h\0\x85R"
    many = _global("__builtin__", "set") + b"q\x010" + b"]q\0(" + b"K\1" * 3000 + b"e0"
    with pytest.raises(SourceError, match="copies far more items than the pickle holds"):
        load(many + b"(" + one * 20_000 + b"t.", "here")


@examples(300)
@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    try:
        load(data, "here")
    except SourceError as error:
        assert error.code == "CKM106"


# ------------------------------------------------------------------------------ writing pickles

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner)
    | st.tuples(inner, inner, inner, inner, inner),
    max_leaves=12,
)  # fmt: skip


@examples(200)
@given(PLAIN)
def test_plain_values_are_written_as_pickle_reads_them(value: Any) -> None:
    data = dump(value)
    assert pickle.loads(data) == value
    assert load(data, "here") == value
    assert dump(value) == data


def test_torch_reads_the_pickles_that_are_written() -> None:
    ordered = collections.OrderedDict(a=1)
    ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    value = {
        "dtype": DType("bfloat16"),
        "size": Size((2, 3)),
        "device": Device("cuda:1"),
        "ordered": ordered,
        "set": {3, 1},
        "layout": Call(Global("torch.serialization", "_get_layout"), ("torch.strided",)),
        "object": Instance(Global("argparse", "Namespace"), {"a": 1}),
    }
    found = pickle.loads(dump(value))
    assert found["dtype"] is torch.bfloat16
    assert found["size"] == torch.Size((2, 3)) and type(found["size"]) is torch.Size
    assert found["device"] == torch.device("cuda:1")
    assert found["ordered"]._metadata == {"": {"version": 1}}
    assert found["set"] == {1, 3}
    assert found["layout"] is torch.strided
    assert found["object"] == argparse.Namespace(a=1)


def test_unknown_values_are_named_by_their_path() -> None:
    with pytest.raises(TypeError, match=r"^model\.args\.1: .* cannot be written"):
        dump({"model": {"args": [1, argparse.Namespace()]}})
    longest = (1 << 2039) - 1  # what torch.load(weights_only=True) has an opcode for
    assert pickle.loads(dump([longest, -longest])) == [longest, -longest]
    with pytest.raises(TypeError, match=r"^epoch: so long an integer cannot be written"):
        dump({"epoch": longest + 1})
    inner: list[Any] = []
    inner.append(inner)
    with pytest.raises(TypeError, match="nested deeper than 200"):
        dump({"loop": inner})


# ------------------------------------------------------------------------------ zip archives


@pytest.fixture
def files() -> Any:
    opened = Files()
    yield opened
    opened.close()


def write_zip(path: Path, members: dict[str, bytes], **how: Any) -> str:
    with zipfile.ZipFile(path, "w", **how) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return str(path)


GOOD = {"a/data.pkl": b"\x80\x02}.", "a/version": b"3\n", "a/data/0": b"1234"}

BAD_ARCHIVES = {
    "compressed": (GOOD, {"compression": zipfile.ZIP_DEFLATED}, "is compressed"),
    "two roots": (GOOD | {"b/x": b""}, {}, "outside its root folder"),
    "dots": (GOOD | {"a/../x": b""}, {}, "unsafe name"),
    "backslash": (GOOD | {"a/b\\x": b""}, {}, "unsafe name"),
    "absolute": ({"/a": b"", **GOOD}, {}, "outside its root folder"),
    "no pickle": ({"a/x": b""}, {}, "without data.pkl"),
    "torchscript": (GOOD | {"a/constants.pkl": b""}, {}, "TorchScript"),
    "empty": ({}, {}, "empty zip"),
}


@pytest.mark.parametrize("name", BAD_ARCHIVES)
def test_bad_archives(tmp_path: Path, files: Files, name: str) -> None:
    members, how, match = BAD_ARCHIVES[name]
    path = write_zip(tmp_path / "x.pt", members, **how)
    with pytest.raises(SourceError, match=match) as caught:
        load_zip(files, path)
    assert caught.value.code == "CKM105"


def test_doubled_member_is_refused(tmp_path: Path, files: Files) -> None:
    path = tmp_path / "x.pt"
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "w") as archive:
        for data in (b"1", b"2"):
            archive.writestr("a/data.pkl", data)
    with pytest.raises(SourceError, match=r"a/data\.pkl: is there twice"):
        read_records(files, str(path))


def test_encrypted_and_overlapping_members_are_refused(tmp_path: Path, files: Files) -> None:
    path = write_zip(tmp_path / "x.pt", GOOD)
    data = bytearray(Path(path).read_bytes())
    first = data.index(b"PK\1\2")
    data[first + 8] |= 1
    (tmp_path / "enc.pt").write_bytes(data)
    with pytest.raises(SourceError, match="is encrypted"):
        read_records(files, str(tmp_path / "enc.pt"))
    data[first + 8] &= ~1
    last = data.rindex(b"PK\1\2")
    data[last + 42 : last + 46] = data[first + 42 : first + 46]
    (tmp_path / "over.pt").write_bytes(data)
    with pytest.raises(SourceError, match="overlaps the member or directory at byte"):
        read_records(files, str(tmp_path / "over.pt"))


def test_a_repacked_archive_is_read(tmp_path: Path, files: Files) -> None:
    """Other paddings, no descriptors, a folder entry: members are still stored."""
    torch.save({"w": torch.arange(5)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        members = {"a/": b""} | {name: archive.read(name) for name in archive.namelist()}
    path = write_zip(tmp_path / "b.pt", members)
    [chunk] = load_zip(files, path).tree["w"].chunks
    found = files.read(path, chunk.region.offset, chunk.region.nbytes)
    assert found == struct.pack("<5q", *range(5)) and chunk.crc32 == zlib.crc32(found)


def test_trailing_bytes_and_missing_end(tmp_path: Path, files: Files) -> None:
    torch.save({"w": torch.arange(5)}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "more.pt").write_bytes(data + b"junk")
    with pytest.raises(SourceError, match="4 bytes follow the end") as caught:
        load_zip(files, str(tmp_path / "more.pt"))
    assert caught.value.code == "CKM105"
    for nbytes in (0, 1, 21, 30, 100, len(data) // 2, len(data) - 22, len(data) - 1):
        path = tmp_path / f"{nbytes}.pt"
        path.write_bytes(data[:nbytes])
        with pytest.raises(SourceError, match="truncated") as caught:
            load_zip(files, str(path))
        assert caught.value.code == "CKM104"


def test_an_item_inside_another_file(tmp_path: Path, files: Files) -> None:
    torch.save({"w": torch.arange(5)}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "big").write_bytes(b"x" * 77 + data + b"y" * 33)
    [chunk] = load_zip(files, str(tmp_path / "big"), 77, len(data)).tree["w"].chunks
    assert files.read(str(tmp_path / "big"), chunk.region.offset, 40) == struct.pack(
        "<5q", *range(5)
    )


def write_layout(path: Path, root: str, tree: Any, data: list[bytes], extra: Any = None) -> None:
    layout = layout_zip(root, dump(tree), [(str(i), len(d)) for i, d in enumerate(data)])
    pieces = layout.seal([zlib.crc32(d) for d in data], extra or {})
    with path.open("wb") as file:
        for offset, piece in [*pieces, *zip(layout.offsets, data, strict=True)]:
            file.seek(offset)
            file.write(piece)
    if not extra:
        assert path.stat().st_size == layout.nbytes


def test_layout_is_torchs_own_byte_for_byte(tmp_path: Path) -> None:
    """But for the content id, whose hash is torch's: 40 digits and its CRC, twice."""
    state = {"a": torch.arange(7), "e": torch.empty(0), "b": torch.ones(300, dtype=torch.int8)}
    torch.save(state, tmp_path / "ref.pt")
    raw = (tmp_path / "ref.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "ref.pt") as archive:
        pkl = archive.read("ref/data.pkl")
        data = [archive.read(f"ref/data/{i}") for i in range(3)]
        content_id = archive.read("ref/.data/serialization_id")
    layout = layout_zip("ref", pkl, [(str(i), len(d)) for i, d in enumerate(data)])
    ours = bytearray(layout.nbytes)
    for offset, piece in [
        *zip(layout.offsets, data, strict=True),
        *layout.seal([zlib.crc32(d) for d in data], {}),
    ]:
        ours[offset : offset + len(piece)] = piece
    at = raw.index(content_id)
    mine = bytes(ours[at : at + 40])
    crc = [struct.pack("<I", zlib.crc32(digits)) for digits in (mine, content_id)]
    assert bytes(ours).replace(mine, content_id).replace(crc[0], crc[1]) == raw


def test_wide_archives_of_more_than_4_gib(tmp_path: Path, files: Files) -> None:
    """Sparse: sizes and offsets above 32 bits, read by zipfile, by torch and by us."""
    wide = 2**32 + 100
    tree = {
        "a": StorageTensor("0", "uint8", wide, 0, (wide,), (1,)),
        "b": StorageTensor("1", "uint8", 5, 0, (5,), (1,)),
    }
    layout = layout_zip("w", dump(tree), [("0", wide), ("1", 5)])
    path = tmp_path / "w.pt"
    with path.open("wb") as file:
        file.truncate(layout.nbytes)
        pieces = [*layout.seal([0, zlib.crc32(b"hello")], {}), (layout.offsets[1], b"hello")]
        for offset, piece in pieces:
            os.pwrite(file.fileno(), piece, offset)
    assert all(offset % 64 == 0 for offset in layout.offsets)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("w/data/0").file_size == wide
        assert archive.read("w/data/1") == b"hello"
    for computed in (False, True):
        with config.patch({"load.calculate_storage_offsets": computed}):  # type: ignore[attr-defined]
            found = torch.load(path, mmap=True, weights_only=True)
        assert bytes(found["b"].tolist()) == b"hello" and found["a"].numel() == wide
    [chunk] = load_zip(files, str(path)).tree["b"].chunks
    assert files.read(str(path), chunk.region.offset, 5) == b"hello"


def test_more_members_than_16_bits_count(tmp_path: Path, files: Files) -> None:
    count = 66_000
    tree = {f"t{i}": StorageTensor(str(i), "uint8", 1, 0, (), ()) for i in range(count)}
    write_layout(tmp_path / "m.pt", "m", tree, [bytes([i % 251]) for i in range(count)])
    loaded = load_zip(files, str(tmp_path / "m.pt"))
    assert len(loaded.records) == count + 6
    [chunk] = loaded.tree["t65999"].chunks
    assert files.read(str(tmp_path / "m.pt"), chunk.region.offset, 1)[0] == 65_999 % 251
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert len(archive.namelist()) == count + 6


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_dtype_loads_in_torch(tmp_path: Path, dtype: str) -> None:
    raw = bytes(range(1, 1 + 6 * ITEMSIZE[dtype])) if dtype != "bool" else b"\0\1\1\0\0\1"
    tree = {"w": StorageTensor("0", dtype, 6, 0, (2, 3), (3, 1), requires_grad=False)}
    write_layout(tmp_path / "d.pt", "d", tree, [raw], {"ckptmap.manifest.json": b"{}"})
    for mmap in (True, False):
        found = torch.load(tmp_path / "d.pt", weights_only=True, mmap=mmap)["w"]
        assert found.dtype is getattr(torch, dtype) and found.shape == (2, 3)
        assert bytes(found.untyped_storage().tolist()) == raw
