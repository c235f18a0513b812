"""A long `.metadata` is compacted before it is parsed; the result is that of the full pickle."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptmap.errors import SourceError
from ckptmap.formats.dcp import metadata_reader as dcp_metadata
from ckptmap.formats.dcp.metadata_compaction import shortened
from ckptmap.formats.dcp.metadata_reader import read_metadata
from ckptmap.formats.dcp.metadata_records import Metadata, Whole
from tests.corpus import Corpus, names

RANKS = ("fsdp2_dcp_w2", "fsdp2_dcp_w4", "fsdp1_dcp_w2", "fsdp1_dcp_bf16_w2")


CASES: dict[str, dict[str, object]] = {
    "flat": {},
    "nested": {"optimizer": {"state": {"w": {"exp_avg": torch.ones(2, 3)}}}},
    "values": {"step": 7, "history": ["a", {"b": 2}]},
    "empty": {"none": torch.empty(0, 4)},
}


def metadata_of(path: Path) -> bytes:
    return (path / ".metadata").read_bytes()


def in_full(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Metadata | str:
    with monkeypatch.context() as patch:
        patch.setattr(dcp_metadata, "LONG_NBYTES", 1 << 40)
        return outcome(data)


def shorter(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Metadata | str:
    with monkeypatch.context() as patch:
        patch.setattr(dcp_metadata, "LONG_NBYTES", 0)
        return outcome(data)


def outcome(data: bytes) -> Metadata | str:
    try:
        return read_metadata(data, "x")
    except SourceError as error:
        return str(error)


def assert_same(one: Metadata | str, other: Metadata | str) -> None:
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        return
    assert list(one.tensors.items()) == list(other.tensors.items())
    assert list(one.values.items()) == list(other.values.items())
    keys = (*one.tensors, *one.values)
    assert [one.path(key) for key in keys] == [other.path(key) for key in keys]


def save_many(path: Path, layers: int = 60, **more: object) -> bytes:
    """Two shapes and dtypes and a 0-d, names of different lengths."""
    state: dict[str, object] = {}
    for i in range(layers):
        state[f"layers.{i}.w"] = torch.full((2, 3), float(i))
        state[f"layers.{i}.expert.\u00d4weight"] = torch.full((300,), i, dtype=torch.float64)
        state[f"layers.{i}.b"] = torch.tensor(i * 0.5)
    dcp_save({**state, **more}, checkpoint_id=path, no_dist=True)
    return metadata_of(path)


@pytest.mark.parametrize("name", names(container="dcp"))
def test_real_metadata_says_the_same_shortened(
    corpus: Corpus, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = metadata_of(corpus[name].path)
    assert_same(shorter(data, monkeypatch), in_full(data, monkeypatch))
    short = shortened(data)
    if name in RANKS:
        assert short is not None, "torch's own way to write it is not known"
        assert short.forms, "no place was taken out"


@pytest.mark.parametrize("kind", CASES)
def test_tensors_alike_are_read_as_columns(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = save_many(tmp_path / "m", **CASES[kind])
    short = shortened(data)
    assert short is not None and len(short.forms) > 150 and len(short.pickle) < len(data) / 2
    found = shorter(data, monkeypatch)
    assert_same(found, in_full(data, monkeypatch))
    assert isinstance(found, Metadata) and isinstance(found.tensors, Whole) == (
        kind == "flat" or kind == "nested"
    )


def test_damage_is_read_as_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = save_many(tmp_path / "m", layers=20, step=7)
    short = shortened(data)
    assert short is not None and len(short.forms) > 50
    chance, taken = random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        found = shorter(bytes(damaged), monkeypatch)
        assert_same(found, in_full(bytes(damaged), monkeypatch))
        taken += isinstance(found, Metadata)
    assert taken, "no damage was to a name or an offset, which may be any"


def test_a_place_that_is_there_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = save_many(tmp_path / "m")
    metadata: TorchMetadata = pickle.loads(data)
    places = metadata.storage_data
    for changed in (
        {key: place for key, place in places.items() if key.fqn != "layers.9.b"},
        {
            **places,
            type(next(iter(places)))("stranger", torch.Size([0])): places[next(iter(places))],
        },
    ):
        metadata.storage_data = changed
        damaged = pickle.dumps(metadata)
        assert_same(shorter(damaged, monkeypatch), in_full(damaged, monkeypatch))
