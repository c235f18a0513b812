"""The files of a model that is split: `name-00001-of-00003.gguf`, each with a header of its own.

The first has the metadata, the others `split.no` and the tensors that lie in them. Source: llama.cpp,
tools/gguf-split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.errors import SourceError
from ckptmap.formats.gguf.cursor import MAGIC
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.safe_names import blobs_of, inside, is_file

if TYPE_CHECKING:
    from ckptmap.formats.gguf.header import GgufHeader

NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
COUNT, NUMBER = "split.count", "split.no"
TENSORS = "split.tensors.count"
SPLIT_KEYS = (COUNT, NUMBER, TENSORS)
WHOLE = "copy or download all of its files into one directory"


def runs_of(sizes: Sequence[int], limit: int | None) -> list[slice]:
    """Return which tensors lie in each file: as many as fit, in their order, and one at least. None: all in one."""
    ends, filled = [], 0
    for at, nbytes in enumerate(sizes):
        if limit is not None and filled and filled + nbytes > limit:
            ends.append(at)
            filled = 0
        filled += nbytes
    return [slice(*pair) for pair in pairwise([0, *ends, len(sizes)])]


def split_name(stem: str, number: int, count: int) -> str:
    """Return the name of a file, of which the first has number 0."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"


def holds_gguf(path: Path, mounts: Mounts) -> bool:
    """Return whether a path is a GGUF file, or a directory of the files of one split model."""
    if path.is_dir():
        return is_split_set([entry.name for entry in path.iterdir() if entry.suffix == ".gguf"])
    return path.is_file() and mounts.read_head(path, len(MAGIC)) == MAGIC


def is_split_set(names: Sequence[str]) -> bool:
    """Return whether the GGUF files of a directory are those of one split model, all or some of them."""
    files = [name for name in names if name.endswith(".gguf")]
    matches = [match for match in map(NAME.fullmatch, files) if match]
    return bool(files) and len(matches) == len(files) and len({m["stem"] + m["count"] for m in matches}) == 1  # fmt: skip


def files_of(path: Path) -> list[str]:
    """Return the paths of all files of a model, of which one is given, in order.

    Raise SourceError CKM108 where one is missing, CKM116 where a link leads out of the directory.
    """
    match = NAME.fullmatch(path.name)
    if match is None or int(match["count"]) < 2:
        return [str(path)]
    count, root = int(match["count"]), str(path.parent)
    names = [split_name(match["stem"], number, count) for number in range(count)]
    missing = [name for name in names if not is_file(path.parent / name)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SourceError(
            "CKM108", f"{root}: of {count} files of a GGUF model, {missing[0]!r}{more} is missing", WHOLE
        )  # fmt: skip
    return [inside(root, name, root, blobs_of(root)) for name in names]


def check_splits(headers: Sequence[GgufHeader]) -> None:
    """Raise SourceError CKM108 where the headers are not of one split model, in order, or a tensor is twice."""
    homes: dict[str, str] = {}
    for number, header in enumerate(headers):
        count, here = header.count(COUNT) or 1, header.count(NUMBER) or 0
        if (count, here) != (len(headers), number):
            raise SourceError(
                "CKM108",
                f"{header.file}: states that it is file {here + 1} of {count}, expected"
                f" {number + 1} of {len(headers)}, as its name says",
                WHOLE if count > 1 else "give it the name that it had",
            )
        for entry in header.tensors:
            if entry.name in homes:
                raise SourceError(
                    "CKM108", f"{header.file}: tensor {entry.name[:80]!r} lies in {homes[entry.name]}, too", WHOLE
                )  # fmt: skip
            homes[entry.name] = header.file
