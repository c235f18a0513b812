"""Items of equal constants are parsed once, and what is read is what each of them holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptmap
from ckptmap.errors import SourceError
from ckptmap.formats.dcp import item_reader
from ckptmap.formats.dcp.reader import Dcp
from ckptmap.formats.detect import look

VALUES: list[Any] = [
    1,
    1.0,
    True,
    -0.0,
    0.0,
    float("nan"),
    "1",
    "",
    b"1",
    None,
    (0.9, 0.99),
    (1,),
    (True,),
]
LISTS: list[Any] = [[0.9], ([1],)]


def saved(path: Path, groups: int) -> Path:
    """Many groups with the same settings, as of an optimizer with a group for each parameter."""
    named = {str(number): value for number, value in enumerate(VALUES + LISTS)}
    tree = {"model": {"w": torch.ones(2)}, "groups": {str(n): named for n in range(groups)}}
    dcp.save(tree, checkpoint_id=path, no_dist=True)
    return path


def test_equal_constants_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parsed, load = saved(tmp_path / "a", 5), [], item_reader.load
    monkeypatch.setattr(item_reader, "load", lambda *args: parsed.append(args) or load(*args))
    place = look(path)
    values = Dcp().index(place).leaves
    stated = [one for sums in place.mounts.stated.values() for one in sums]
    for number in range(5):
        for index, value in enumerate(VALUES + LISTS):
            found = values["groups", str(number), str(index)]
            assert repr(found) == repr(value) and type(found) is type(value)
    constants = len(VALUES)
    assert len(parsed) <= constants + 5 * len(LISTS) + 1, "the tensor, too"
    lists = [values["groups", str(number), str(constants)] for number in range(5)]
    assert len(set(map(id, lists))) == 5, "whoever changes one list changes no other"
    places = {(one.offset, one.nbytes) for one in stated}
    assert len(places) >= 2 * 5 * (constants + len(LISTS)), "pickle and byte order of each item"


def test_a_damaged_one_of_equal_items_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", 5)
    (file,) = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    places = [found.start() for found in re.finditer(rb"G\?\xec\xcc", data)]  # 0.9 as a double
    assert len(places) >= 5
    data[places[3] + 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(SourceError, match="CRC-32"):
        ckptmap.open(path)
