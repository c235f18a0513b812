"""Read what only a `quantization_config` in config.json or a small stored tensor says about a quantized tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.box_reader import fill
from ckptmap.storage.files import Files
from ckptmap.storage.json_file import read_json
from ckptmap.tensors import Box, StoredTensor

MAX_NBYTES = 16 << 20


def quantization_config(stored: StoredTensor, mounts: Mounts) -> Mapping[str, object]:
    """Return the `quantization_config` of the config.json beside a tensor's file.

    It is only a hint: where the file is missing or cannot be read, the result is empty.
    """
    place = next(iter(stored.chunks), None)
    if place is None:
        return {}
    file = Path(place.region.file).parent / "config.json"
    try:
        config = read_json(file, mounts, max_nbytes=MAX_NBYTES)
    except (OSError, ValueError):
        return {}
    for holder in (config, config.get("text_config") if isinstance(config, dict) else None):
        section = holder.get("quantization_config") if isinstance(holder, dict) else None
        if isinstance(section, dict):
            return section
    return {}


def read_small(stored: StoredTensor, files: Files, where: str) -> bytes:
    """Return all bytes of a tensor of a few elements, such as a format number or a shape."""
    if stored.info.nbytes > 4096:
        raise SourceError(
            "CKM115",
            f"{where}: expected a few numbers, found {stored.info}",
            "the checkpoint is damaged: copy it again, or save it again",
        )
    data = bytearray(stored.info.nbytes)
    fill(files, stored, Box.whole(stored.info.shape), memoryview(data))
    return bytes(data)
