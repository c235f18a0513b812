"""Read what only a `quantization_config` in config.json or a small stored tensor says about a quantized tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from operator import add, sub
from pathlib import Path

from ckptmap.core.stored_parts import StoredParts
from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.blockwise.model_dtype import FLOATS
from ckptmap.storage.files import Files
from ckptmap.storage.json_file import read_json
from ckptmap.tensors import ITEMSIZE, Box, StoredTensor

MAX_NBYTES = 16 << 20


def quantization_config(stored: StoredTensor, mounts: Mounts) -> Mapping[str, object]:
    """Return the `quantization_config` of the config.json beside a tensor's file.

    It is only a hint: where the file is missing or cannot be read, the result is empty.
    """
    for holder in _holders(stored, mounts):
        section = holder.get("quantization_config")
        if isinstance(section, dict):
            return section
    return {}


def stated_dtype(stored: StoredTensor, mounts: Mounts) -> str:
    """Return the dtype that config.json beside a tensor's file states for the model; "" where it states none.

    Raise SourceError CKM115 for the name of a dtype that torch does not have: transformers stops there.
    """
    for holder in _holders(stored, mounts):
        said = holder.get("dtype") or holder.get("torch_dtype")
        if said in FLOATS:
            return str(said)
        if isinstance(said, str) and said not in (*ITEMSIZE, "auto"):
            raise SourceError(
                "CKM115",
                f"{_config_beside(stored)}: dtype {said[:40]!r}, expected one of torch's such as {', '.join(FLOATS)}",
                "correct it, or download config.json again",
            )
    return ""


def model_type(stored: StoredTensor, mounts: Mounts) -> str:
    """Return the `model_type` of the config.json beside a tensor's file; "" where it states none."""
    kinds = [str(holder.get("model_type") or "") for holder in _holders(stored, mounts)]
    return kinds[0] if kinds else ""


def _config_beside(stored: StoredTensor) -> Path | None:
    """Return the path of the config.json beside a tensor's file; None for a tensor without elements."""
    place = next(iter(stored.chunks), None)
    return None if place is None else Path(place.region.file).parent / "config.json"


def _holders(stored: StoredTensor, mounts: Mounts) -> list[Mapping[str, object]]:
    """Return the config.json beside a tensor's file, and its part for text; neither where there is none."""
    file = _config_beside(stored)
    if file is None:
        return []
    try:
        config = read_json(file, mounts, max_nbytes=MAX_NBYTES)
    except (OSError, ValueError):
        return []
    inner = config.get("text_config") if isinstance(config, dict) else None
    return [holder for holder in (config, inner) if isinstance(holder, dict)]


NEAR = 4096
"""Up to so many bytes between two small tensors are read and dropped: one call costs more."""
MOST = 1 << 20
"""Bytes of small tensors that are read at once, or little more."""


def read_each_small(parts: StoredParts, numbers: Sequence[int], files: Files) -> list[bytes]:
    """Return all bytes of each of many small tensors by number; neighbours in a file are read at once, equal values are
    one object.

    The caller has looked at their sizes. Raise as `Files.read_into` does.
    """
    homes, offsets, sizes = parts.places(numbers)
    found: list[bytes] = [b""] * len(numbers)
    by_file: dict[str, list[int]] = {}
    begin = 0
    for file, run in groupby(homes):
        end = begin + len(list(run))
        by_file.setdefault(file, []).extend(range(begin, end))
        begin = end
    are_small = bool(numbers) and "" not in by_file and min(sizes) > 0 and max(sizes) <= NEAR
    known: dict[bytes, bytes] = {}
    for file, every in by_file.items():
        small = every if are_small else [at for at in every if file and 0 < sizes[at] <= NEAR]
        for at in every if len(small) < len(every) else ():
            if not file or not 0 < sizes[at] <= NEAR:
                found[at] = _read(parts.table.tensors[numbers[at]], files)
        small.sort(key=offsets.__getitem__)
        begins, lengths = (list(map(column.__getitem__, small)) for column in (offsets, sizes))
        values = _read_runs(file, begins, lengths, files) if small else []
        for at, value in zip(small, map(known.setdefault, values, values), strict=True):
            found[at] = value
    return found


def _read_runs(
    file: str, offsets: Sequence[int], sizes: Sequence[int], files: Files
) -> list[bytes]:
    """Return the bytes of small tensors of a file, whose offsets rise."""
    if min(map(sub, offsets[1:], map(add, offsets, sizes)), default=0) > NEAR:
        return files.read_runs(file, offsets, sizes)  # no two are neighbours
    ends = list(accumulate(map(add, offsets, sizes), max))
    begins = [
        at
        for at, (end, before, offset) in enumerate(zip(ends, offsets, offsets[1:], strict=False), 1)
        if offset > end + NEAR or (offset >= end and offset // MOST != before // MOST)
    ]
    stops = [*begins, len(offsets)]
    begins.insert(0, 0)
    starts = list(map(offsets.__getitem__, begins))
    lengths = [ends[stop - 1] - start for stop, start in zip(stops, starts, strict=True)]
    read = files.read_runs(file, starts, lengths)
    return [
        data[offset - start : offset - start + nbytes]
        for data, start, begin, stop in zip(read, starts, begins, stops, strict=True)
        for offset, nbytes in zip(offsets[begin:stop], sizes[begin:stop], strict=True)
    ]


def _read(stored: StoredTensor, files: Files) -> bytes:
    from ckptmap.storage.box_reader import fill

    data = bytearray(stored.info.nbytes)
    fill(files, stored, Box.whole(stored.info.shape), memoryview(data))
    return bytes(data)
