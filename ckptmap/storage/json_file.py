"""Read a JSON file of a checkpoint, on this machine or on a mounted Hub repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckptmap.core.json_text import MAX_NBYTES, as_object, parse_json
from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.resource_limits import unreadable
from ckptmap.tensors import PlainValue


def read_json(
    file: str | Path, mounts: Mounts, *, max_nbytes: int = MAX_NBYTES, allow_nan: bool = True
) -> Any:
    """Return the value of a JSON file.

    By default NaN and Infinity are read: configs and states of frameworks hold them. Raises OSError
    where the file cannot be read, JsonError (a ValueError) where `core.json_text` refuses the text.
    """
    with mounts.local_copy(file).open("rb") as handle:
        data = handle.read(max_nbytes + 1)
    return parse_json(data, max_nbytes=max_nbytes, allow_nan=allow_nan)


def read_object(
    file: str | Path, mounts: Mounts, *, max_nbytes: int = MAX_NBYTES, allow_nan: bool = True
) -> dict[str, object]:
    """Return the JSON object in a file, as `read_json` does. Raises JsonError for any other value."""
    return as_object(read_json(file, mounts, max_nbytes=max_nbytes, allow_nan=allow_nan))


def read_document(file: str | Path, mounts: Mounts, max_nbytes: int = MAX_NBYTES) -> PlainValue:
    """Return the value of a JSON file that is a part of a checkpoint. Raises SourceError CKM101 where it cannot be read,
    CKM103 where it is not JSON."""
    try:
        value: PlainValue = read_json(file, mounts, max_nbytes=max_nbytes)
        return value
    except OSError as error:
        raise unreadable(file, error) from error
    except ValueError as error:
        raise SourceError(
            "CKM103", f"{file}: cannot be read as JSON: {error}", "copy the checkpoint again"
        ) from error


def why_no_file(path: str | Path) -> str:
    """Return what stands at `path` in place of a file; "" for a file, and where there is nothing."""
    if os.path.isfile(path) or not os.path.lexists(path):
        return ""
    return "is a directory" if os.path.isdir(path) else "is a link to a file that is not there"
