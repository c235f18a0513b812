"""Readers take headers with many similar tensors as columns, with the same result as one by one."""

from __future__ import annotations

import random
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import save as dcp_save

import ckptmap
from ckptmap.core.columns import by_object, distinct, distinct_at, each
from ckptmap.core.tensor_columns import Extents, PlainTensors
from ckptmap.errors import SourceError
from ckptmap.execution import manifest
from ckptmap.formats.pickle.byte_columns import group_pieces
from ckptmap.formats.safetensors.header import Header, _parse_general, _parse_regular
from ckptmap.formats.torch_save.flat_state_dict import plain_tensors
from ckptmap.formats.torch_save.reader import open_zip, parse
from ckptmap.formats.zip.reader import Records
from ckptmap.operations.check_structure import check_structure
from ckptmap.storage.files import Files
from ckptmap.tensors import Extent, TensorInfo

COUNT = 400


def many() -> dict[str, torch.Tensor]:
    """Of three shapes and two dtypes, names of different lengths."""
    state: dict[str, torch.Tensor] = {}
    for i in range(COUNT // 4):
        state[f"layers.{i}.w"] = torch.full((2, 3), float(i))
        state[f"layers.{i}.expert.weight"] = torch.full((300,), i, dtype=torch.float64)
        state[f"layers.{i}.b"] = torch.tensor(i * 0.5)
        state[f"layers.{i}.norm.weight"] = torch.full((2, 3), -float(i))
    return state


def columns_of(records: Records, data: bytes) -> PlainTensors | None:
    return plain_tensors(records, data, lambda part, n: parse(records, part, of_nbytes=n))


def saved(state: Any, path: Path) -> tuple[Records, bytes]:
    torch.save(state, path)
    return open_zip(Files(), str(path))


def assert_as_read(found: PlainTensors, records: Records, data: bytes) -> None:
    """Names, infos and places are those that the whole pickle gives."""
    tree, located = parse(records, data), found.extents()
    assert located is not None and list(found.names) == list(tree)
    assert list(found.infos) == [tensor.info for tensor in tree.values()]
    assert list(located) == [t.place for t in tree.values()]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_flat_state_dict_is_read_as_columns(kind: type, tmp_path: Path) -> None:
    state = kind(many())
    if kind is OrderedDict:
        state._metadata = OrderedDict({"": {"version": 1}, "layers": {"version": 1}})
    records, data = saved(state, tmp_path / "m.pt")
    found = columns_of(records, data)
    assert found is not None, "the entries were not taken for alike"
    assert_as_read(found, records, data)
    ckptmap.convert(tmp_path / "m.pt", tmp_path / "out.pt", to="full")
    records, data = open_zip(Files(), str(tmp_path / "out.pt"))
    again = columns_of(records, data)
    assert again is not None, "nor those that we write"
    assert_as_read(again, records, data)
    with ckptmap.open(tmp_path / "out.pt") as ckpt:
        assert all(torch.equal(ckpt[name].read(), tensor) for name, tensor in many().items())


def test_entries_as_long_with_numbers_elsewhere(tmp_path: Path) -> None:
    """70000 takes five bytes, and another dimension's 300 and 2 as many: the tuples end elsewhere."""
    shapes = ((300, 2), (70000,))
    state = {f"w.{i}": torch.full(shapes[i % 9 == 8], i % 99, dtype=torch.int8) for i in range(150)}
    records, data = saved(state, tmp_path / "m.pt")
    ends = {data.index(b"QK\0" + size) for size in (b"J\x70\x11\1\0\x85r", b"M\x2c\1K\2\x86r")}
    assert len(ends) == 2, "they are no longer pickled so"
    found = columns_of(records, data)
    assert found is not None
    assert_as_read(found, records, data)


@pytest.mark.parametrize("what", ["tie", "view", "value", "nested", "transposed", "twice"])
def test_tensors_that_are_not_alike_are_read_one_by_one(what: str, tmp_path: Path) -> None:
    state: dict[str, Any] = dict(many())
    if what == "tie":
        state["z"] = state["layers.5.w"]
    elif what == "view":
        state["z"] = torch.arange(10.0)[2:6]
    elif what == "value":
        state["step"] = 7
    elif what == "nested":
        state = {"model": state}
    elif what == "transposed":
        state["z"] = torch.arange(6.0).view(2, 3).t()
    records, data = saved(state, tmp_path / "m.pt")
    if what == "twice":  # the later of two entries of one name is the one that counts
        data = data.replace(b"layers.70.w", b"layers.71.w")
    assert columns_of(records, data) is None


def test_a_damaged_pickle_is_never_read_otherwise(tmp_path: Path) -> None:
    records, data = saved(many(), tmp_path / "m.pt")
    chance, taken = random.Random(0), 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 1, 2))):
            damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        found = columns_of(records, bytes(damaged))
        if found is not None:
            taken += 1
            assert_as_read(found, records, bytes(damaged))
    assert taken, "no damage was to a name, which may be any"


@pytest.mark.parametrize("at", [b"tr", b"Rr", b"\x85r"])
def test_memo_numbers_must_count_on(at: bytes, tmp_path: Path) -> None:
    """A number that is given twice may be asked for later: then it means something else."""
    records, data = saved(many(), tmp_path / "m.pt")
    place = data.index(at, len(data) // 2) + len(at)
    changed = data[:place] + (5).to_bytes(4, "little") + data[place + 4 :]
    assert columns_of(records, data) is not None
    assert columns_of(records, changed) is None


def outcome(read: Any) -> Header | str | None:
    try:
        return read()
    except SourceError as error:
        return error.code


@pytest.mark.parametrize("number", [-1, 1 << 32, 1 << 40])
def test_a_number_that_four_bytes_do_not_hold_is_in_no_piece(number: int) -> None:
    """As the memo number that a damaged opcode of the first entry makes of all others."""
    (group,) = group_pieces([b"r\1\0\0\0", b"r\2\0\0\0"], lambda _: (1,), most=1) or ()
    assert group.hold_numbers(0, [1, 2])
    assert not group.hold_numbers(0, [1, number])


def test_a_header_as_writers_write_it_is_read_as_any_other(tmp_path: Path) -> None:
    save_file(many(), tmp_path / "m.safetensors", {"format": "pt", "a": 'b"}{'})
    whole = (tmp_path / "m.safetensors").read_bytes()
    raw, nbytes = whole[8 : 8 + int.from_bytes(whole[:8], "little")], len(whole)
    one, other = _parse_regular(raw, nbytes, "x"), _parse_general(raw, nbytes, "x")
    assert one is not None and one.tensors == other.tensors and one.metadata == other.metadata
    chance = random.Random(1)
    for _ in range(300):
        damaged = bytearray(raw)
        damaged[chance.randrange(len(raw))] = chance.choice(b'0159{}[],:"\\ xU\x7f\xc3')
        quick = outcome(partial(_parse_regular, bytes(damaged), nbytes, "x"))
        if quick is not None:
            general = outcome(partial(_parse_general, bytes(damaged), nbytes, "x"))
            if isinstance(quick, Header):
                assert isinstance(general, Header) and quick.tensors == general.tensors
            else:
                assert quick == general


@pytest.mark.parametrize(
    "text",
    [
        '{"a],"data_offsets":[F32","shape":[1":{"dtype":"0,4]}}',
        '{"a":{"dtype":"F32","shape":[1]},"0,4],"data_offsets":[}}',
        '{"a\n":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        '{"a\r":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"b":0}}',
        '{"a":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}',
        '{"__metadata__":{"k":["v"]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        '{"__metadata__":{"k":"v"}"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    ],
)
@pytest.mark.parametrize("name", ["a", "x.a", 'x".a', 'x.b".a', "x\x7f.a", "x.a\\u0020"])
def test_marks_of_a_header_in_other_places_are_refused(text: str, name: str) -> None:
    raw = text.replace('"a', f'"{name}').encode()
    assert _parse_regular(raw, 12 + len(raw), "x") is None
    assert outcome(partial(_parse_general, raw, 12 + len(raw), "x")) == "CKM107"


@pytest.mark.parametrize("container", ["hf", "pt", "dcp"])
def test_a_tensor_of_columns_is_made_when_asked_for(container: str, tmp_path: Path) -> None:
    state = many()
    path = tmp_path / container
    if container == "hf":
        path.mkdir()
        save_file(state, path / "model.safetensors", {"format": "pt"})
    elif container == "pt":
        torch.save(state, path)
    else:
        dcp_save(state, checkpoint_id=path, no_dist=True)
    with ckptmap.open(path) as ckpt:
        columns = ckpt.columns()
        assert columns is not None and not columns._rows.created
        assert (
            set(ckpt) == set(state) and ("layers.1.w",) in columns and "layers.1.w" not in columns
        )
        assert torch.equal(ckpt["layers.7.w"].read(), state["layers.7.w"])
        assert len(columns._rows.created) == 1
        with pytest.raises(ckptmap.errors.MissingKeyError, match="no tensor 'nope'"):
            ckpt["nope"]


@pytest.mark.parametrize("to", ["hf", "full"])
@pytest.mark.parametrize("change", ["offset", "name", "shape", "more"])
def test_a_changed_output_is_found_by_its_columns(change: str, to: str, tmp_path: Path) -> None:
    """The structure of an output is compared with its plan, column by column and one by one."""
    torch.save(many(), tmp_path / "m.pt")
    plan = ckptmap.plan(tmp_path / "m.pt", to)
    ckptmap.convert(tmp_path / "m.pt", tmp_path / "out", to=to)
    digests = [["0" * 16] * len(file.slots) for file in plan.files]
    document = manifest.build(plan, type("Done", (), {"digests": digests})())
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert check_structure(ckpt, document) == []
        leaves = ckpt.index.leaves
        assert isinstance(leaves, PlainTensors)
        located = leaves.extents()
        assert located is not None
        names, infos = list(leaves.names), list(leaves.infos)
        files, offsets = list(located.files), list(located.offsets)
        if change == "offset":
            offsets[3] += 8
        elif change == "name":
            names[3] = "other"
        elif change == "shape":
            infos[3] = TensorInfo((7, 1), infos[3].dtype)
        else:
            names, infos = [*names, "more"], [*infos, infos[0]]
            files, offsets = [*files, files[0]], [*offsets, 1]
        changed = PlainTensors(names, infos, Extents(files, offsets, [None] * len(files)))
        object.__setattr__(ckpt.index, "leaves", changed)
        assert check_structure(ckpt, document), change


def test_columns_and_each() -> None:
    info, other = TensorInfo((2,), "float32"), TensorInfo((2,), "float32")
    run = PlainTensors(["a", "b"], [info, other], Extents(["f", "f"], [0, 8], [1, None]))
    assert list(run) == [("a",), ("b",)] and run[("b",)].place == Extent("f", 8, None)
    assert run.renamed({"a": "x", "b": "y"})[("x",)].place == Extent("f", 0, 1)
    with pytest.raises(KeyError, match="c"):
        run[("c",)]
    calls: list[TensorInfo] = []
    assert each([info, other, info], lambda i: calls.append(i) or i.nbytes) == [8, 8, 8]
    assert len(calls) == 2 == len(distinct([info, other, info]))


@pytest.mark.parametrize("order", ["", "a", "aaa", "aba", "aabbaa", "abcabc", "n", "nnan", "ann"])
def test_different_objects_are_met_once_in_runs_and_by_turns(order: str) -> None:
    objects = {
        "a": TensorInfo((2,), "float32"),
        "b": TensorInfo((2,), "float32"),
        "c": 7,
        "n": None,
    }
    values = [objects[letter] for letter in order]
    letters = list(dict.fromkeys(order))
    assert list(distinct(values)) == [id(objects[letter]) for letter in letters]
    assert distinct_at(values) == [(order.index(letter), objects[letter]) for letter in letters]
    calls: list[object] = []
    assert each(values, lambda value: calls.append(value) or id(value)) == list(map(id, values))
    assert list(map(id, calls)) == list(distinct(values))
    numbers = [(id(value), list(at)) for value, at in by_object(values)] if values else []
    assert numbers == [
        (id(objects[letter]), [at for at, one in enumerate(order) if one == letter])
        for letter in letters
    ]
