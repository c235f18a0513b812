"""The CRC-32 that a zip states twice: 0 in the directory alone is damage, in both places left out."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptmap
from ckptmap.errors import SourceError

WEIGHTS = {"a.weight": torch.arange(3000.0), "b.weight": torch.ones(5, 5)}
ENTRY = struct.Struct("<4s12xI8x3H8xI")
"""An entry of a zip's central directory: signature, CRC-32, lengths of name, extra, comment, header."""


def crc_fields(content: bytes) -> list[int]:
    """Return where the CRC-32 of each stored tensor stands in the directories of the zips in a file."""
    places, at = [], content.find(b"PK\1\2")
    while at >= 0:
        _, crc, name_nbytes, *_ = ENTRY.unpack_from(content, at)
        name = content[at + ENTRY.size : at + ENTRY.size + name_nbytes]
        if crc and b"/data/" in name:
            places.append(at + 16)
        at = content.find(b"PK\1\2", at + 4)
    return places


def zeroed(file: Path) -> list[int]:
    content = bytearray(file.read_bytes())
    places = crc_fields(content)
    content[places[-1] : places[-1] + 4] = bytes(4)
    file.write_bytes(content)
    return places


def test_a_torch_file(tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    torch.save(WEIGHTS, file)
    assert len(zeroed(file)) == 2
    with pytest.raises(SourceError, match="its directory states no CRC-32, the member itself"):
        ckptmap.convert(file, tmp_path / "out", "hf")


def test_an_item_of_a_dcp(tmp_path: Path) -> None:
    dcp.save(
        {f"{i}.weight": torch.full((40, 40), float(i)) for i in range(8)},
        checkpoint_id=tmp_path / "dcp",
    )
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    assert len(zeroed(file)) == 8
    with pytest.raises(SourceError, match="its directory states no CRC-32, the member itself"):
        ckptmap.convert(tmp_path / "dcp", tmp_path / "out", "hf")


def test_what_a_writer_left_out_is_told(tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(WEIGHTS, file)
    finally:
        torch.serialization.set_crc32_options(True)
    report = ckptmap.convert(file, tmp_path / "out", "hf")
    assert any("states no checksum for 11.8 KiB" in note for note in report.notes), report.notes


def test_storages_that_torch_skipped(tmp_path: Path) -> None:
    """Their bytes are filled in later, so torch states no CRC-32 for them, but one for the pickle."""
    file = tmp_path / "w.pt"
    with torch.serialization.skip_data():
        torch.save(WEIGHTS, file)
    report = ckptmap.convert(file, tmp_path / "out", "hf")
    assert any("states no checksum for 11.8 KiB" in note for note in report.notes), report.notes
