"""Read what only a `quantization_config` in config.json or a small stored tensor says about a quantized tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from ckptmap.core.stored_parts import StoredParts
from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.blockwise.model_dtype import FLOATS
from ckptmap.storage.box_reader import fill
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
"""Bytes of small tensors that are read at once."""


def read_each_small(parts: StoredParts, numbers: Sequence[int], files: Files) -> list[bytes]:
    """Return all bytes of each of many small tensors by number; neighbours in a file are read at once, equal values are
    one object.

    The caller has looked at their sizes. Raise as `Files.read_into` does.
    """
    found: list[bytes] = [b""] * len(numbers)
    by_file: dict[str, list[_Small]] = {}
    for at, place in enumerate(parts.places(numbers)):
        if place is None or not 0 < place[2] <= NEAR:
            found[at] = _read(parts.table.tensors[numbers[at]], files)
        else:
            by_file.setdefault(place[0], []).append((place[1], place[2], at))
    known: dict[bytes, bytes] = {}
    for file, small in by_file.items():
        small.sort()
        runs = _runs(small)
        read = files.read_runs(file, [(start, end - start) for start, end in runs])
        held = iter(zip(runs, read, strict=True))
        start, end, data = 0, 0, b""
        for offset, nbytes, at in small:
            if offset >= end:
                (start, end), data = next(held)
            value = data if nbytes == len(data) else data[offset - start : offset - start + nbytes]
            found[at] = known.setdefault(value, value)
    return found


_Small: TypeAlias = tuple[int, int, int]
"""Offset and bytes of a small tensor, and its number."""


def _runs(small: Sequence[_Small]) -> list[tuple[int, int]]:
    """Return where the bytes begin and end that are read at once, of sorted places in a file; no place is in two."""
    runs: list[tuple[int, int]] = []
    start, end = small[0][0], 0
    for offset, nbytes, _ in small:
        if end and offset >= end and (offset > end + NEAR or offset >= start + MOST):
            runs.append((start, end))
            start = offset
        end = max(end, offset + nbytes)
    return [*runs, (start, end)]


def _read(stored: StoredTensor, files: Files) -> bytes:
    data = bytearray(stored.info.nbytes)
    fill(files, stored, Box.whole(stored.info.shape), memoryview(data))
    return bytes(data)
