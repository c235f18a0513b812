"""Rank files of one shape are parsed once; any other file is read, or refused, as it would be alone."""

from __future__ import annotations

import pickle
import pickletools
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ckptmap.core.row_chunks import RowChunks
from ckptmap.core.state_tree import flatten
from ckptmap.errors import SourceError
from ckptmap.formats.detect import look
from ckptmap.formats.pickle.reader import load as read_pickle
from ckptmap.formats.pickle.template import Hole, Template, opcodes
from ckptmap.formats.rank_files import rank_trees
from ckptmap.formats.rank_files.dtensor_fast_join import join_regular
from ckptmap.formats.rank_files.dtensor_layout import DTensorLayout
from ckptmap.formats.rank_files.rank_trees import RankReader, RankValues
from ckptmap.formats.rank_files.reader import RankFiles
from ckptmap.formats.torch_save.reader import load
from ckptmap.formats.zip.reader import read_records
from ckptmap.protocols import Index
from ckptmap.storage.files import Files
from ckptmap.tensors import Opaque, PerRank, StoredTensor
from tests.corpus import names
from tests.support.examples import examples

RANK_CASES = names(container="ranks")

Change = Callable[[bytes], bytes]


def index(path: Path) -> Index:
    return RankFiles().index(look(path))


def plain(value: Any) -> Any:
    """A leaf as nested lists that can be compared: tensors by their places, objects by state."""
    if isinstance(value, StoredTensor):
        return ["tensor", value.info, list(value.chunks), value.share]
    if isinstance(value, Opaque) and not isinstance(value, type):
        return [value.class_name, *(plain(v) for v in (value.args, value.state, value.info))]
    if isinstance(value, dict):
        return [dict, *([plain(key), plain(item)] for key, item in value.items())]
    if isinstance(value, list | tuple):
        return [type(value), *map(plain, value)]
    return value


def rank_files(path: Path) -> list[Path]:
    """Of the weights, in rank order."""
    return sorted(path.rglob("*model*rank*")) or sorted(path.rglob("*rank*"))


# ------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize("name", RANK_CASES)
def test_every_leaf_is_what_the_file_alone_says(corpus: Any, name: str) -> None:
    files, reader = Files(), RankReader()
    for file in rank_files(corpus[name].path):
        tree = reader.read(files, str(file))
        alone = load(files, str(file))
        leaves = flatten(alone.tree, str(file), alone.pickle_nbytes)
        assert list(tree.parsed.leaves) == list(leaves)
        for path, leaf in leaves.items():
            assert plain(tree.get(path)) == plain(leaf), path


@pytest.mark.parametrize("name", ["fsdp2_ranks_w4", "hsdp_ranks_w4"])
def test_alike_files_are_parsed_once(corpus: Any, name: str) -> None:
    """Ranks that hold other sizes, of uneven tensors, are of another kind."""
    files, reader = Files(), RankReader()
    trees = [reader.read(files, str(file)) for file in rank_files(corpus[name].path)]
    assert len({id(tree.parsed) for tree in trees}) == 2 < len(trees)


@pytest.mark.parametrize("name", ["fsdp2_ranks_w4", "hsdp_ranks_w4", "fsdp2_ranks_tied_w2"])
def test_the_quick_join_is_the_general_one(corpus: Any, name: str) -> None:
    layout, quick, by_rows, shares = DTensorLayout(), 0, 0, {}
    for path, leaf in index(corpus[name].path).leaves.items():
        if not isinstance(leaf, PerRank) or not isinstance(leaf.values, RankValues):
            continue
        mine, general = join_regular(leaf.values, "k"), layout.join(list(leaf.values), "k")
        assert isinstance(general, StoredTensor)
        if mine is not None:
            quick += 1
            by_rows += type(mine.place) is RowChunks
            assert mine.info == general.info
            assert list(mine.chunks) == list(general.chunks)
            assert list(mine.replicas) == list(general.replicas)
            shares.setdefault(mine.share, set()).add(general.share)
            assert len(shares[mine.share]) == 1, path
    assert quick > 1
    assert by_rows > 1
    assert sum(map(len, shares.values())) == len(set().union(*shares.values()))


# ------------------------------------------------------------------------------ tampered files


def rewritten(file: Path, change: Change) -> None:
    """The same zip with another pickle, its CRC-32 right."""
    with zipfile.ZipFile(file) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(file, "w") as new:
        for name, data in members.items():
            new.writestr(name, change(data) if name.endswith("data.pkl") else data)


def outcome(path: Path) -> Any:
    """All that is read of a directory, joined; or the error."""
    try:
        leaves = index(path).leaves
        layout, found = DTensorLayout(), {}
        for key, leaf in leaves.items():
            values = leaf.values if isinstance(leaf, PerRank) else (leaf,)
            joined = layout.join(values, str(key))
            found[key] = plain(list(values)), joined and plain(joined)[:3]
        return found
    except SourceError as error:
        return error.code, error.message


def both(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The outcome, and that of parsing every file in full."""
    found = outcome(path)
    with monkeypatch.context() as patch:
        patch.setattr(rank_trees, "MAX_PARSED", 0)
        return found, outcome(path)


@pytest.fixture
def four(corpus: Any, tmp_path: Path) -> Path:
    """A copy of the rank files of 4 ranks, to be spoiled; ranks 0 to 2 are alike."""
    return Path(shutil.copytree(corpus["fsdp2_ranks_w4"].path, tmp_path / "four"))


def swapped(old: bytes, new: bytes) -> Change:
    """The first occurrence."""

    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return change


COORDINATE = b"_coordinate_on_dim"


def at_coordinate(new: bytes) -> Change:
    """Another opcode for rank 2's coordinate."""

    def change(data: bytes) -> bytes:
        at = data.index(b"K\2\x85", data.index(COORDINATE))
        return data[:at] + new + data[at + 2 :]

    return change


TAMPERED = {
    "coordinate outside": (at_coordinate(b"K\x09"), "CKM112"),
    "coordinate of another rank": (at_coordinate(b"K\x01"), "CKM112"),
    "negative coordinate": (at_coordinate(b"J\xff\xff\xff\xff"), "CKM112"),
    "huge coordinate": (at_coordinate(b"\x8a\x09" + b"\x7f" * 9), "CKM112"),
    "coordinate is text": (at_coordinate(b"X\1\0\0\0002"), "CKM112"),
    "coordinate is not UTF-8": (at_coordinate(b"X\1\0\0\0\xff"), "CKM106"),
    "coordinate is True": (at_coordinate(b"\x88"), "CKM112"),
    "coordinate is a float": (at_coordinate(b"G" + b"\0" * 8), "CKM112"),
    "coordinate wider": (at_coordinate(b"M\x02\0"), None),
    "another placement": (swapped(b"placement_types\nShard\n", b"placement_types\nSharx\n"), "CKM112"),
    "another class": (swapped(b"ctorch.distributed.tensor\nDTensor\n", b"ctorch.distributed.tensor\nDTensox\n"), "CKM113"),
    "a call": (swapped(b"ctorch\ndevice\n", b"cposix\nsystem\n"), "CKM106"),
    "another dtype": (swapped(b"ctorch\nfloat32\n", b"ctorch\nint32\n"), "CKM113"),
    "cut short": (lambda data: data[:-40], "CKM106"),
    "one opcode": (swapped(b"\x85q", b"\x86q"), "CKM106"),
    "a memo that nothing put": (swapped(b"h\x04", b"h\xf4"), "CKM106"),
    "another key": (swapped(b"_coordinate_on_dim", b"_coordinate_on_dix"), "CKM112"),
    "longer by a comment": (lambda data: data + b"K\1", None),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_sibling_is_taken_as_by_itself(
    four: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    change, code = TAMPERED[what]
    rewritten(rank_files(four)[2], change)
    found, alone = both(four, monkeypatch)
    assert found == alone
    assert (found[0] if isinstance(found, tuple) else None) == code


def test_constants_of_another_width_are_alike(four: Path) -> None:
    """Python's hash of a mesh has 8 bytes, or 7; the pickle's size, in the zip, goes with it."""
    names = rank_files(four)
    rewritten(names[2], at_coordinate(b"\x8a\x03\2\0\0"))
    reader = RankReader()
    trees = [reader.read(Files(), str(file)) for file in names]
    assert len({id(tree.parsed) for tree in trees}) == 2


@pytest.mark.parametrize("spoil", [0, 1])
def test_a_tampered_first_file_spoils_no_other(
    four: Path, monkeypatch: pytest.MonkeyPatch, spoil: int
) -> None:
    """A size of what the first, or second, file holds: the others do not take it over."""

    def change(data: bytes) -> bytes:
        at = data.index(b"K", data.index(b"_rebuild_tensor_v2"))
        return data[: at + 1] + bytes([data[at + 1] ^ 1]) + data[at + 2 :]

    rewritten(rank_files(four)[spoil], change)
    found, alone = both(four, monkeypatch)
    assert found == alone


def test_members_of_other_sizes_are_no_siblings(four: Path) -> None:
    """The pickle is alike, a storage is not: it is found out as in a file alone."""
    file = rank_files(four)[1]
    with zipfile.ZipFile(file) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(file, "w") as new:
        for name, data in members.items():
            new.writestr(name, data[:-2] if name.endswith("data/0") else data)
    with pytest.raises(SourceError, match=r"storage '0' is .* its record holds") as caught:
        index(four)
    assert caught.value.code == "CKM106"


@examples(
    60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rank=st.integers(0, 3), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_flipped_bit(
    corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, at: float, bit: int
) -> None:
    def change(data: bytes) -> bytes:
        place = int(at * len(data))
        return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]

    folder = tmp_path / "flipped"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(corpus["fsdp2_ranks_w4"].path, folder)
    rewritten(rank_files(folder)[rank], change)
    found, alone = both(folder, monkeypatch)
    assert found == alone


def test_starts_are_those_of_each_member(tmp_path: Path) -> None:
    file = tmp_path / "rank_1.pt"
    torch.save({f"w{n}": torch.rand(n, 9) for n in range(70)}, file)
    records = read_records(Files(), str(file))
    starts = records.starts("data/")
    assert starts == {n[5:]: records.locate(n)[0] for n in records if n.startswith("data/")}
    assert len(starts) == 70


# ------------------------------------------------------------------------------ constants


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=12,
)


@given(value=VALUES, protocol=st.integers(0, 5))
def test_opcodes_are_those_of_pickletools(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    starts = [at for _, _, at in pickletools.genops(data)]
    assert [start for start, _ in opcodes(data)] == starts


@given(a=st.tuples(st.integers(), st.text()), b=st.tuples(st.integers(), st.text()))
def test_constants_are_read_from_a_pickle_that_is_alike(
    a: tuple[int, str], b: tuple[int, str]
) -> None:
    """Whatever their width. Text that occurs twice is in the memo and is one constant."""
    mine, other = (pickle.dumps({"at": [x, 7], "name": y, "again": y}, 2) for x, y in (a, b))
    template = Template.of(mine).widened(other)
    if template is None:  # an integer of more than 255 bytes, or two constants that are one
        assert len(mine) > 255 or len(other) > 255 or a[1] in ("at", "name", "again", "")
        return
    found = template.constants(other)
    assert found is not None
    pickled, holes = template.with_persistent_ids()
    tree = read_pickle(pickled, "here", persistent_load=holes)
    filled = [found[v.index] if type(v) is Hole else v for v in (*tree["at"], tree["name"])]
    assert filled == [b[0], 7, b[1]]
    assert template.constants(mine) is not None


@pytest.mark.parametrize("call", [
    "}(?X\1\0\0\0au",  # a key
    "cbuiltins\nrange\n(?tR",
    "cbuiltins\nset\n(](?etR",
    "ctorch\ndevice\n(X\4\0\0\0cuda?tR",  # into a text
    "ccollections\nOrderedDict\n(?tR",
])  # fmt: skip
def test_a_constant_that_is_looked_at_makes_no_template(call: str) -> None:
    head, tail = call.encode().split(b"?")
    one, two = (b"\x80\x02" + head + constant + tail + b"." for constant in (b"K\1", b"K\2"))
    template = Template.of(one).widened(two)
    assert template is not None
    pickled, holes = template.with_persistent_ids()
    with pytest.raises(SourceError, match=r"decides what they hold|interpreted|built from Hole"):
        read_pickle(pickled, "here", persistent_load=holes)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_without_a_dict_beside_one_with_it(odd: int, tmp_path: Path) -> None:
    """A dict that is damaged in one key is one value with no name, and has no place among names."""
    for rank in range(2):
        model = {None: torch.ones(4)} if rank == odd else {"w": torch.ones(4)}
        torch.save(model, tmp_path / f"model_rank_{rank}.pt")
    with pytest.raises(SourceError, match=rf"model_rank_{odd}\.pt: holds no dict of names") as told:
        index(tmp_path)
    assert told.value.code == "CKM113"
