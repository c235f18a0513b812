"""An index whose lines are compared gives the answers of one that is parsed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import SourceError
from ckptmap.formats.huggingface.shard_index import (
    SEPARATOR,
    ShardIndex,
    _as_written,
    _general,
    parse_index,
)
from ckptmap.protocols.file_systems import Mounts

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
KEYS = (["b.weight", "a.10.w", "a.w_scale", "a.w"], ["a.9.w", "c"])
MAP = {key: shard for shard, keys in zip(SHARDS, KEYS, strict=True) for key in keys}


def text(weight_map: dict[str, str], **more: object) -> str:
    tree = {"metadata": {"total_size": 12}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps({**tree, **more}, indent=2) + "\n"


def read(path: Path, content: str) -> tuple[ShardIndex | None, ShardIndex]:
    path.write_text(content)
    return _as_written(path.read_bytes(), str(path)), _general(path.read_bytes(), str(path))


def test_an_index_as_transformers_writes_it_is_not_parsed(tmp_path: Path) -> None:
    for content in (text(MAP), text(MAP).rstrip(), text(MAP, other=[1])):
        quick, general = read(tmp_path / "i.json", content)
        assert quick is not None
        assert quick.weight_map == general.weight_map == MAP
        for index in (quick, general, parse_index(str(tmp_path / "i.json"), Mounts())):
            both = list(zip(SHARDS, KEYS, strict=True))
            assert index.ordered(dict(both)) == index.ordered(dict(both[::-1])) == index.shards
            assert (index.count, index.total_nbytes) == (6, 12)
            assert index.shards == [*dict.fromkeys(dict(sorted(MAP.items())).values())]


@pytest.mark.parametrize(
    "change",
    [
        lambda keys: (keys[0][:-1], keys[1]),
        lambda keys: (keys[0], [*keys[1], "d"]),
        lambda keys: (keys[0][:-1], [*keys[1], keys[0][-1]]),
        lambda keys: ([*keys[0][:-1], "a.v"], keys[1]),
        lambda keys: ([*keys[0][:-1], keys[0][0]], keys[1]),
    ],
)
def test_shards_that_hold_something_else_are_not_listed(
    change: Callable[[object], tuple[list[str], list[str]]], tmp_path: Path
) -> None:
    for index in read(tmp_path / "i.json", text(MAP)):
        assert index is not None
        assert index.ordered(dict(zip(SHARDS, change(KEYS), strict=True))) is None


@pytest.mark.parametrize("is_sorted", [True, False])
def test_shards_whose_names_lie_among_each_other(tmp_path: Path, is_sorted: bool) -> None:
    draw = random.Random(7)
    for _ in range(40):
        names = {
            ".".join(draw.choices(["a", "a b", "a!", "10", "9", "w_"], k=3)) for _ in range(12)
        }
        weight_map = {name: f"{draw.choice('xyz')}.safetensors" for name in names}
        lines = sorted(weight_map.items(), reverse=not is_sorted)
        keys: dict[str, list[str]] = {shard: [] for shard in weight_map.values()}
        for name, shard in weight_map.items():
            keys[shard].append(name)
        moved = draw.choice(list(names))
        other = {
            shard: [*(n for n in held if n != moved), *([moved] if moved not in held else [])]
            for shard, held in keys.items()
        }
        for index in read(tmp_path / "i.json", json.dumps({"weight_map": dict(lines)}, indent=2)):
            assert index is not None
            assert index.ordered(keys) == index.shards == [*dict.fromkeys(s for _, s in lines)]
            assert index.ordered(other) is None


@pytest.mark.parametrize("names", ["aab", "baa"])
def test_a_name_in_two_shards_is_not_listed_by_an_index_that_has_it_twice(names: str) -> None:
    shards = ("x.safetensors", "y.safetensors", "x.safetensors")
    lines = [f'"{name}": "{shard}"' for name, shard in zip(names, shards, strict=True)]
    index = _as_written(
        f'{{\n  "weight_map": {{\n    {SEPARATOR.join(lines)}\n  }}\n}}'.encode(), "i"
    )
    keys: dict[str, list[str]] = {shard: [] for shard in shards}
    for name, shard in zip(names, shards, strict=True):
        keys[shard].append(name)
    assert index is not None and index.count == 3
    assert index.ordered(keys) is None
    assert index.ordered({shard: held[:1] for shard, held in keys.items()}) is None


def test_an_index_in_another_order_and_shards_of_other_lengths(tmp_path: Path) -> None:
    weight_map = {"z": "one.safetensors", "a": "two-long.safetensors", "b": "one.safetensors"}
    content = json.dumps({"weight_map": weight_map}, indent=2)
    quick, general = read(tmp_path / "i.json", content)
    for index in (quick, general):
        assert index is not None
        assert index.shards == ["one.safetensors", "two-long.safetensors"]
        assert (
            index.ordered({"two-long.safetensors": ["a"], "one.safetensors": ["b", "z"]})
            == index.shards
        )


@pytest.mark.parametrize(
    "content",
    [
        text(MAP).replace("a.w_scale", "a.w\\u005fscale"),
        text(MAP).replace('"a.w_scale"', '"a.w_scale":1, "x"'),
        text(MAP).replace("  ", " "),
        json.dumps({"metadata": {"weight_map": MAP}, "weight_map": MAP}, indent=2),
        text(MAP, metadata={"note": '"weight_map": {'}),
        text(MAP).replace("{\n", '{\n  "weight_map": {},\n', 1),
        text({}),
        text(MAP)[:-4],
        text(MAP).replace('"c": "', '"c": ""'),
    ],
)
def test_any_other_index_is_parsed(content: str, tmp_path: Path) -> None:
    file = tmp_path / "i.json"
    file.write_text(content)
    assert _as_written(file.read_bytes(), str(file)) is None


@pytest.mark.parametrize("content", [text(MAP).replace('": "', '": 1"', 1), text(MAP)[:-4]])
def test_damage_is_refused_when_the_files_are_asked_for(content: str, tmp_path: Path) -> None:
    (tmp_path / "i.json").write_text(content)
    with pytest.raises(SourceError, match="is not an index"):
        _ = parse_index(str(tmp_path / "i.json"), Mounts()).shards


def saved(folder: Path, shards: dict[str, list[str]], listed: dict[str, str] | None = None) -> Path:
    """Save one-byte tensors as these shards, with an index of them or of `listed`."""
    for shard, keys in shards.items():
        save_file({key: torch.zeros(1, dtype=torch.uint8) for key in keys}, folder / shard)
    home = {key: shard for shard, keys in shards.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(text(listed or home))
    return folder


@pytest.mark.parametrize("name", ["model-{:05}-of-000002", "model-{}-of-2", "m-{:05}-of-00002"])
def test_a_numbered_set_is_proven_and_its_index_not_cut(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (f"{name.format(number)}.safetensors" for number in (1, 2))
    folder = saved(tmp_path, {first: ["b", "c"], second: ["a", "d"]})
    monkeypatch.setattr(ShardIndex, "shards", property(lambda self: pytest.fail("was cut")))
    opened = ckptmap.open(folder)
    assert list(opened) == ["a", "d", "b", "c"], "in the order in which the index names the files"
    assert [Path(file).name for file in opened.index.files][:2] == [second, first]


def test_a_set_that_the_index_does_not_list_whole_is_read_as_listed(tmp_path: Path) -> None:
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    shards = {names[0]: ["b"], names[1]: ["a"], names[2]: ["c"]}
    folder = saved(tmp_path, shards, {"a": names[1], "b": names[0]})
    opened = ckptmap.open(folder)
    assert list(opened) == ["a", "b"]
    assert f"not read, because no index lists it: {names[2]}" in opened.notes
    (folder / names[2]).write_bytes(b"no safetensors at all")
    assert list(ckptmap.open(folder)) == ["a", "b"], "a file that is not listed may be damaged"


def test_a_name_in_two_shards_of_a_set_is_refused(tmp_path: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    folder = saved(tmp_path, {names[0]: ["a", "b"], names[1]: ["b", "c"]})
    with pytest.raises(SourceError, match=f"'b' is stored in '{names[0]}' and in '{names[1]}'"):
        ckptmap.open(folder)


@pytest.mark.parametrize("content", [text(MAP).replace("a.10.w", "a.w"), text(MAP)[:-4]])
def test_a_key_twice_and_damage_are_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "i.json"
    file.write_text(content)
    index = _as_written(file.read_bytes(), str(file))
    assert index is None or index.ordered(dict(zip(SHARDS, KEYS, strict=True))) is None
    with pytest.raises(SourceError, match="is not an index"):
        _ = (index or parse_index(str(file), Mounts())).weight_map
