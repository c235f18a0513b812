"""One torch.save file: ckptmap reads what torch wrote, and torch reads what ckptmap writes."""

from __future__ import annotations

import argparse
import os
import pickle
import shlex
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.core.state_tree import ListIndex, nest
from ckptmap.errors import PlanError, SourceError
from ckptmap.formats.detect import look
from ckptmap.formats.torch_save.format import TorchZip, TorchZipWriter
from ckptmap.protocols import Index, OutState, OutTensor
from ckptmap.sharding.full import Full
from ckptmap.tensors import ITEMSIZE, Box, Opaque, StoredTensor, TensorInfo
from tests.support.container_io import info_of, materialise, out_tensors, read_leaf, same


def index(path: Path) -> Index:
    place = look(path)
    assert TorchZip().claims(place)
    return TorchZip().index(place)


def save(path: Path, tree: Any) -> Index:
    torch.save(tree, path)
    return index(path)


def sample(dtype: str, *shape: int) -> torch.Tensor:
    """Arbitrary bits of the dtype."""
    numel = int(torch.tensor(shape).prod())
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (numel * ITEMSIZE[dtype],))
    return raw.to(torch.uint8).view(getattr(torch, dtype)).reshape(shape)


# ------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("dtype", [d for d in ITEMSIZE if d != "float4_e2m1fn_x2"])
def test_every_dtype_and_shape(tmp_path: Path, dtype: str) -> None:
    tree = {"2d": sample(dtype, 3, 5), "0d": sample(dtype, 1)[0].clone()}
    tree["empty"] = torch.empty(0, 4, dtype=getattr(torch, dtype))
    leaves = save(tmp_path / "x.pt", tree).leaves
    for name, tensor in tree.items():
        leaf = leaves[(name,)]
        assert isinstance(leaf, StoredTensor) and leaf.info == info_of(tensor)
        assert same(read_leaf(leaf), tensor)
        assert leaf.chunks[0].crc32 is not None


def test_views_and_ties(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tree = {
        "base": base,
        "tied": base,
        "transposed": base.t(),
        "rows": base[1:3],
        "columns": base[:, 2:4],
        "every other": base[::2, ::3],
        "expanded": base[0, :1].expand(5, 7),
        "parameter": nn.Parameter(base),
        "buffer": nn.Buffer(base[2]),
    }
    leaves = save(tmp_path / "x.pt", tree).leaves
    for name, tensor in tree.items():
        assert same(read_leaf(leaves[(name,)]), tensor.detach().contiguous()), name
    shares = {name: leaves[(name,)].share for name in tree}
    assert shares["base"] == shares["tied"] == shares["parameter"]
    assert len(set(shares.values())) == len(tree) - 2
    covered = {name for name in tree if leaves[(name,)].chunks[0].crc32 is not None}
    assert covered == {"base", "tied", "parameter"}, "the CRC is that of the whole storage"


def test_nesting_and_plain_values(tmp_path: Path) -> None:
    w = torch.ones(2)
    tree = {
        "model": OrderedDict({"layers.0.w": w}),
        "ema": [w, {"b": w}],
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
        "empty": {},
        "step": 7,
        "odd keys": {(1, 2): 3},
        "args": argparse.Namespace(lr=1),
    }
    leaves = save(tmp_path / "x.pt", tree).leaves
    assert list(leaves) == [
        ("model", "layers.0.w"),
        ("ema", 0),
        ("ema", 1, "b"),
        ("optimizer", "state", 0, "step"),
        ("optimizer", "param_groups"),
        ("empty",),
        ("step",),
        ("odd keys",),
        ("args",),
    ]
    assert leaves["optimizer", "param_groups"] == [{"lr": 0.1}]
    assert leaves[("odd keys",)] == {(1, 2): 3} and leaves[("empty",)] == {}
    assert isinstance(leaves[("args",)], Opaque)
    kinds = {path: type(path[1]) for path in leaves if len(path) > 1}
    assert kinds["ema", 0] is ListIndex and kinds["optimizer", "state", 0, "step"] is str


def test_numpy_numbers_are_numbers_and_its_arrays_inert(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    tree = {"best": numpy.float64(2.5), "b": numpy.arange(3), "torch": torch.__version__}
    leaves = save(tmp_path / "x.pt", tree).leaves
    assert isinstance(leaves.pop(("b",)), Opaque)
    assert leaves == {("best",): 2.5, ("torch",): str(torch.__version__)}
    assert {type(leaf) for leaf in leaves.values()} == {float, str}


class Scaled(torch.Tensor):
    """A subclass as torchao makes them: no data of its own, inner tensors as attributes."""

    inner: torch.Tensor  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, (8, *inner.shape), dtype=torch.bfloat16)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].inner)
        raise NotImplementedError(func)


class Plain(torch.Tensor):
    """A subclass that is a tensor with a name."""


def test_subclasses_keep_shape_and_inner_tensors(tmp_path: Path) -> None:
    inner = torch.arange(6)
    tree = {
        "wrapper": Scaled(inner),
        "parameter": nn.Parameter(Scaled(inner), requires_grad=False),
        "plain": torch.ones(2).as_subclass(Plain),
    }
    leaves = save(tmp_path / "x.pt", tree).leaves
    for name in ("wrapper", "parameter"):
        leaf = leaves[(name,)]
        assert leaf.name == "Scaled" and leaf.info == TensorInfo((8, 6), "bfloat16")
        assert same(read_leaf(leaf.state["inner"]), inner)
    plain = leaves[("plain",)]
    assert plain.name == "Plain" and plain.info == TensorInfo((2,), "float32")
    assert same(read_leaf(plain.args[0]), torch.ones(2))


def test_tensors_with_python_attributes_are_plain(tmp_path: Path) -> None:
    """FSDP1 full state dicts hold such: `_rebuild_from_type_v2` around an ordinary tensor."""
    tensor, parameter = torch.ones(2), nn.Parameter(torch.ones(2))
    tensor._has_been_cloned = parameter.tag = True  # type: ignore[attr-defined]
    leaves = save(tmp_path / "x.pt", {"t": tensor, "p": parameter}).leaves
    assert all(type(leaf).__mro__[1] is StoredTensor for leaf in leaves.values())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, device="meta"),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "conjugate", "meta", "quantized"],
)
def test_what_is_no_strided_tensor_is_opaque(tmp_path: Path, tensor: torch.Tensor) -> None:
    leaf = save(tmp_path / "x.pt", {"x": tensor}).leaves[("x",)]
    assert isinstance(leaf, Opaque)


def test_what_is_computed_when_it_is_used_is_named(tmp_path: Path) -> None:
    """Conjugated, negated: torch saves the values of before, and that they are not those."""
    file, values = tmp_path / "x.pt", torch.ones(2, dtype=torch.complex64).conj()
    torch.save({"w": values, "n": values.clone().conj().imag, "b": torch.ones(2)}, file)
    unresolved = ckptmap.plan(file, "full").unresolved
    assert [item.key for item in unresolved] == ["w", "n"]
    assert all("resolve_conj().resolve_neg()" in item.reason for item in unresolved)
    torch.save({"w": values}, file)
    with pytest.raises(SourceError, match=r"each tensor is a view that torch conjugates"):
        ckptmap.plan(file, "full")


@pytest.mark.parametrize("protocol", range(6))
def test_legacy_format_is_named(tmp_path: Path, protocol: int) -> None:
    torch.save(
        {"w": torch.ones(2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False,
        pickle_protocol=protocol,
    )  # fmt: skip
    with pytest.raises(SourceError, match=r"before torch 1\.6") as caught:
        TorchZip().index(look(tmp_path / "x.pt"))
    assert caught.value.code == "CKM117"
    with pytest.raises(SourceError, match=r"before torch 1\.6"):
        ckptmap.open(tmp_path / "x.pt")


def test_what_holds_itself_is_refused_in_a_line(tmp_path: Path) -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    run = argparse.Namespace(seen=endless)
    run.run = run
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    twice: list[Any] = [1]
    for _ in range(40):
        twice = [twice, twice]
    fine = [[[1.5] * 1000] * 100]
    extra = {"endless": (endless,), "run": run, "deep": deep, "twice": twice, "fine": fine}
    torch.save({"model": {"w": torch.ones(1)}, **extra}, tmp_path / "x.pt")
    plan = ckptmap.plan(tmp_path / "x.pt", "full")
    said = {item.key: item.reason for item in plan.unresolved}
    assert list(said) == ["endless", "run", "deep", "twice"]
    why = "a value that holds itself, nests deeper than 128, or repeats without end"
    assert said["endless"] == said["deep"] == said["twice"] == why
    assert said["run"] == "an object of unknown class argparse.Namespace"
    dropped = ckptmap.plan(tmp_path / "x.pt", "full", drop=[*said])
    assert not dropped.unresolved


def patched(path: Path, old: bytes, new: bytes) -> None:
    """Change data.pkl in place, its CRC-32 too."""
    raw = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        before = archive.read(f"{path.stem}/data.pkl")
    after = before.replace(old, new)
    assert after != before and len(after) == len(before)
    crcs = [zlib.crc32(data).to_bytes(4, "little") for data in (before, after)]
    path.write_bytes(raw.replace(before, after).replace(crcs[0], crcs[1]))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b"K\x03K\x05\x86", b"K\x04K\x05\x86", r"reaches byte 80 of storage '0', which holds 60"),
        (b"QK\x00", b"QK\x01", "reaches byte 64"),
        (b"cpuq\x06K\x0f", b"cpuq\x06K\x0e", "storage '0' is 14 x float32, its record holds 60"),
        (b"torch\nFloatStorage", b"torch\nShortStorage", "storage '0' is 15 x int16"),
        (b"QK\x00", b"QN\x00", "malformed pickle"),
        (b"storageq", b"storagfq", "unknown persistent id"),
    ],
)
def test_views_that_leave_their_storage(tmp_path: Path, old: bytes, new: bytes, match: str) -> None:
    torch.save({"w": torch.ones(3, 5)}, tmp_path / "x.pt")
    patched(tmp_path / "x.pt", old, new)
    with pytest.raises(SourceError, match=match):
        index(tmp_path / "x.pt")


@pytest.mark.parametrize("size", [2**63, 2**64, 10**400])
def test_sizes_that_torch_cannot_hold(tmp_path: Path, size: int) -> None:
    """Though the tensor is empty and needs no bytes; such sizes were written as they were."""
    torch.save({"w": torch.ones(2, 0)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    before, after = b"QK\x00K\x02K\x00", b"QK\x00" + pickle.dumps(size, 2)[2:-1] + b"K\x00"
    assert before in records["x/data.pkl"], "the offset and the sizes"
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data.replace(before, after))
    with pytest.raises((TypeError, RuntimeError, ValueError), match=r"[Oo]verflow"):
        torch.load(tmp_path / "x.pt")
    with pytest.raises(SourceError, match="exceed 63 bits"):
        index(tmp_path / "x.pt")


def test_absurd_expansion_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4).as_strided((100_000, 100_000), (0, 0))}, tmp_path / "x.pt")
    with pytest.raises(SourceError, match="expands the 16 bytes of storage '0' to 40000000000"):
        index(tmp_path / "x.pt")
    leaves = save(tmp_path / "y.pt", {"w": torch.ones(1).expand(1000, 1000)}).leaves
    assert leaves[("w",)].info.numel == 1_000_000


def test_big_endian_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}.")
        archive.writestr("x/byteorder", b"big")
    with pytest.raises(SourceError, match="holds big-endian tensors, expected little"):
        index(tmp_path / "x.pt")


def test_a_nesting_bomb_is_refused(tmp_path: Path) -> None:
    tree: Any = {"w": torch.ones(1)}
    for _ in range(100):
        tree = {"a": tree, "b": tree}
    with pytest.raises(SourceError, match="nested deeper"):
        save(tmp_path / "x.pt", tree)
    wide: Any = [torch.ones(1)]
    for _ in range(40):
        wide = [wide, wide]
    with pytest.raises(SourceError, match="holds more than 100000 leaves"):
        save(tmp_path / "y.pt", wide)


def outcome(path: Path, names: list[str]) -> list[Any] | str:
    """Values by name as read with every check the file allows, or the code of the error."""
    try:
        leaves = index(path).leaves
        if sorted(map(str, leaves)) != sorted(map(str, names)):
            return "other names"
        found = []
        for name in names:
            leaf = leaves[name]  # type: ignore[index]
            if isinstance(leaf, StoredTensor):
                [chunk] = leaf.chunks
                raw = path.read_bytes()[chunk.region.offset :][: chunk.region.span_nbytes]
                if chunk.crc32 not in (None, zlib.crc32(raw)):
                    return "CRC"
                found.append((leaf.info, raw, chunk.region.strides))
            else:
                found.append(leaf)
        return found
    except SourceError as error:
        return error.code


def test_every_flipped_bit_is_equal_or_noticed(tmp_path: Path) -> None:
    """Two bits of each byte in turn: the same values, an error of ours, or a CRC that differs."""
    path, flipped = tmp_path / "x.pt", tmp_path / "flip" / "x.pt"
    flipped.parent.mkdir()
    torch.save({"w": torch.arange(6, dtype=torch.int16).reshape(2, 3).t(), "n": 3}, path)
    good = bytearray(path.read_bytes())
    names: list[Any] = [("w",), ("n",)]
    truth = outcome(path, names)
    assert isinstance(truth, list)
    noticed = 0
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("x/data/0").header_offset
    for at in range(4, len(good)):
        for bit in (at % 8, (at + 3) % 8):
            good[at] ^= 1 << bit
            flipped.write_bytes(good)
            good[at] ^= 1 << bit
            found = outcome(flipped, names)
            data = start <= at < start + 200  # a storage seen by a transposed view has no CRC
            assert found == truth or isinstance(found, str) or data, (at, bit, found)
            noticed += isinstance(found, str)
    assert noticed > len(good) // 2


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(6)}, path)
    whole = path.read_bytes()
    for nbytes in range(4, len(whole), 7):
        path.write_bytes(whole[:nbytes])
        with pytest.raises(SourceError, match="truncated"):
            index(path)


# ------------------------------------------------------------------------------ writing


def written(tmp_path: Path, state: OutState, tensors: Any, name: str = "out.pt") -> Path:
    materialise(TorchZipWriter().files(state, name), tmp_path, tensors)
    return tmp_path / name


def test_round_trip_of_every_dtype(tmp_path: Path) -> None:
    tensors = {}
    for dtype in ITEMSIZE:
        tensors["model", f"{dtype}.2d"] = sample(dtype, 3, 5)
        tensors["model", f"{dtype}.0d"] = sample(dtype, 1)[0].clone()
        tensors["model", f"{dtype}.empty"] = torch.empty(0, 4, dtype=getattr(torch, dtype))
    extra = {("step",): 7, ("args", "betas"): (0.9, 0.95), ("args", "none"): None}
    state = OutState(out_tensors(tensors, Full()), extra, {"w": {"scheme": "x"}})  # type: ignore[arg-type]
    path = written(tmp_path, state, tensors)
    for mmap in (True, False):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert list(found) == ["model", "step", "args"]
        assert found["args"] == {"betas": (0.9, 0.95), "none": None}
        for (_, name), tensor in tensors.items():
            assert same(found["model"][name], tensor), name
            assert found["model"][name].stride() == tensor.stride()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    again = index(path)
    assert again.records == {"w": {"scheme": "x"}}
    for key, tensor in tensors.items():
        assert same(read_leaf(again.leaves[key]), tensor)
        assert again.leaves[key].chunks[0].region.offset % 64 == 0


def test_ties_share_a_storage(tmp_path: Path) -> None:
    tensors = {("a",): torch.arange(6.0)}
    [first] = out_tensors(tensors, Full())  # type: ignore[arg-type]
    tied = OutTensor(("b",), first.info, first.chunks, alias_of=("a",))
    path = written(tmp_path, OutState([first, tied]), tensors)
    found = torch.load(path, weights_only=True, mmap=True)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    leaves = index(path).leaves
    assert leaves[("a",)].share == leaves[("b",)].share


def test_manifest_does_not_disturb_torch(tmp_path: Path) -> None:
    tensors = {("a",): torch.arange(6.0)}
    [out] = TorchZipWriter().files(OutState(out_tensors(tensors, Full())), "m.pt")  # type: ignore[arg-type]
    data = tensors[("a",)].numpy().tobytes()
    path = tmp_path / "m.pt"
    with path.open("wb") as file:
        pieces = [*out.seal([zlib.crc32(data)], b'{"schema": 1}'), (out.slots[0].offset, data)]
        for offset, piece in pieces:
            os.pwrite(file.fileno(), piece, offset)
    assert torch.equal(torch.load(path, weights_only=True, mmap=True)["a"], tensors[("a",)])
    with zipfile.ZipFile(path) as archive:
        assert archive.read("m/ckptmap.manifest.json") == b'{"schema": 1}'
        assert archive.testzip() is None
    manifest = index(path).manifest
    assert manifest is not None and manifest() == b'{"schema": 1}'
    path.write_bytes(path.read_bytes().replace(b'{"schema": 1}', b'{"schema": 2}'))
    with pytest.raises(
        SourceError, match=r"manifest\.json: damaged: expected CRC-32 \w{8}, found \w{8}"
    ):
        index(path)


def test_lists_and_int_keys_come_back(tmp_path: Path) -> None:
    tree = {"ema": [torch.ones(2), torch.zeros(1)], "state": {0: {"m": torch.ones(3)}}, "s": 1}
    leaves = save(tmp_path / "in.pt", tree).leaves
    tensors = {path: read_leaf(x) for path, x in leaves.items() if isinstance(x, StoredTensor)}
    state = OutState(out_tensors(tensors, Full()), {("s",): 1})
    found = torch.load(written(tmp_path, state, tensors), weights_only=True)
    assert isinstance(found["ema"], list) and torch.equal(found["ema"][1], torch.zeros(1))
    assert list(found["state"]) == [0] and found["s"] == 1


def test_a_list_with_a_hole_keeps_its_places() -> None:
    assert nest([(("x", ListIndex(2)), 5), (("x", ListIndex(0)), 3)]) == {"x": [3, None, 5]}
    for far in (1 << 40, -1):  # a file of others may count anywhere
        assert nest([(("x", ListIndex(far)), 5), (("x", ListIndex(0)), 3)]) == {"x": {far: 5, 0: 3}}


def test_values_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    opaque = Opaque("argparse", "Namespace")
    with pytest.raises(PlanError, match=r"args\.0: <argparse\.Namespace> cannot be written"):
        TorchZipWriter().files(OutState([], {("args",): [opaque]}), "x.pt")


def test_keys_that_collide_are_refused() -> None:
    info = TensorInfo((1,), "float32")
    outs = [OutTensor(path, info, [(0, Box.whole((1,)))]) for path in (("a",), ("a", "b"))]
    with pytest.raises(PlanError, match=r"a\.b: would lie where a already is"):
        TorchZipWriter().files(OutState(outs), "x.pt")
    with pytest.raises(PlanError, match="a: would lie where a already is"):
        TorchZipWriter().files(OutState(outs[:1], {("a",): 1}), "x.pt")


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    tensors = {("b",): torch.ones(3), ("a",): torch.zeros(2)}
    state = OutState(out_tensors(tensors, Full()), {("s",): {"z", "y", "x"}})  # type: ignore[arg-type]
    first = written(tmp_path / "1", state, tensors).read_bytes()
    assert written(tmp_path / "2", state, tensors).read_bytes() == first
    assert list(torch.load(tmp_path / "1" / "out.pt", weights_only=True)) == ["b", "a", "s"]


@pytest.mark.parametrize("kind", ["script", "export", "npz", "legacy"])
def test_the_command_for_a_file_of_another_kind_works(kind: str, tmp_path: Path) -> None:
    """As it is printed; what it saves is read, with the same values."""
    model = torch.nn.Linear(3, 2)
    file = tmp_path / f"a model.{'npz' if kind == 'npz' else 'pt'}"
    state = {key: value.detach() for key, value in model.state_dict().items()}
    if kind == "script":
        torch.jit.save(torch.jit.trace(model, torch.ones(1, 3)), file)  # type: ignore[no-untyped-call]
    elif kind == "export":
        file = file.with_suffix(".pt2")
        torch.export.save(torch.export.export(model, (torch.ones(1, 3),)), file)
    elif kind == "npz":
        np.savez(file, **{key: value.numpy() for key, value in state.items()})
    else:
        torch.save(state, file, _use_new_zipfile_serialization=False)
    with pytest.raises(SourceError) as refused:
        ckptmap.open(file)
    words = shlex.split(refused.value.hint.partition(": ")[2])
    assert words[:2] == ["python", "-c"] and len(words) == 3
    exec(words[2], {})
    with ckptmap.open(tmp_path / "a model.new.pt") as ckpt:
        assert set(ckpt) == set(state)
        assert all(torch.equal(ckpt[key].read(), value) for key, value in state.items())


@pytest.mark.parametrize("end", ["pt", "ckpt"])
def test_an_optimizer_in_a_file_of_its_own_is_named(end: str, tmp_path: Path) -> None:
    """SpeechBrain saves `model.ckpt` and `optimizer.ckpt`; loops of people's own do so with `.pt`."""
    torch.save({"w": torch.ones(2)}, tmp_path / f"model.{end}")
    torch.save({"state": {}, "param_groups": []}, tmp_path / f"optimizer.{end}")
    with ckptmap.open(tmp_path) as ckpt:
        assert ckpt.notes == [
            f"opened model.{end}, the only checkpoint in the directory",
            f"left behind: optimizer.{end}",
        ]
