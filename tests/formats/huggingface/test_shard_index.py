"""An index whose lines are compared gives the answers of one that is parsed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmap.errors import SourceError
from ckptmap.formats.huggingface.shard_index import ShardIndex, _as_written, _general, parse_index
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
            assert index.lists(SHARDS, KEYS) and index.lists(SHARDS[::-1], KEYS[::-1])
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
        assert index is not None and not index.lists(SHARDS, change(KEYS))


def test_an_index_in_another_order_and_shards_of_other_lengths(tmp_path: Path) -> None:
    weight_map = {"z": "one.safetensors", "a": "two-long.safetensors", "b": "one.safetensors"}
    content = json.dumps({"weight_map": weight_map}, indent=2)
    quick, general = read(tmp_path / "i.json", content)
    for index in (quick, general):
        assert index is not None
        assert index.shards == ["one.safetensors", "two-long.safetensors"]
        assert index.lists(index.shards, [["b", "z"], ["a"]])


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
        text(MAP).replace('": "', '": 1"', 1),
    ],
)
def test_any_other_index_is_parsed(content: str, tmp_path: Path) -> None:
    file = tmp_path / "i.json"
    file.write_text(content)
    assert _as_written(file.read_bytes(), str(file)) is None


@pytest.mark.parametrize("content", [text(MAP).replace("a.10.w", "a.w"), text(MAP)[:-4]])
def test_a_key_twice_and_damage_are_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "i.json"
    file.write_text(content)
    index = _as_written(file.read_bytes(), str(file))
    assert index is None or not index.lists(SHARDS, KEYS)
    with pytest.raises(SourceError, match="is not an index"):
        _ = (index or parse_index(str(file), Mounts())).weight_map
