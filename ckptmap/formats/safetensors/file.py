"""Turn parsed safetensors headers into stored tensors and encoding records, and refuse text files
(Git LFS pointers, web pages, JSON) that lie in the place of weights.

An encoding record tells how a quantized tensor is stored: its scheme, shape, dtype and block size.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from ckptmap.core.json_text import parse_json
from ckptmap.core.tensor_columns import Extents, PlainTensors
from ckptmap.errors import SourceError
from ckptmap.formats.safetensors import torchao_metadata
from ckptmap.formats.safetensors.header import MAX_HEADER_NBYTES, Header
from ckptmap.storage.files import Files
from ckptmap.tensors import TensorInfo

RECORDS = "ckptmap"
"""Key in `__metadata__` under which ckptmap stores its encoding records: JSON {fqn: record}."""

_SURROGATE = re.compile("[\ud800-\udfff]")
LFS_MAGIC = b"version https://git-lfs"


def looks_like_safetensors(head: bytes) -> bool:
    """Return True if a file of which these are the first 10 bytes or more is safetensors: a header length,
    then a JSON object. A wrong length before a clear header counts too, so that the error names it."""
    if head[8:10] == b'{"':
        return True
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER_NBYTES


def refuse_text(files: Files, file: str) -> None:
    """Raise SourceError CKM102 or CKM103 for a shard that is text: an LFS pointer, an error page."""
    nbytes = os.stat(file).st_size
    head = files.read(file, 0, min(nbytes, 512))
    if not looks_like_safetensors(head):
        error = not_weights(head, file, nbytes)
        if error is not None:
            raise error


def stored_tensors(headers: Sequence[Header], files: Sequence[str]) -> PlainTensors:
    """Return the tensors of these files, by paths of one segment. Each is one contiguous byte range."""
    keys: list[str] = []
    infos: list[TensorInfo] = []
    begins: list[int] = []
    homes: list[str] = []
    for header, file in zip(headers, files, strict=True):
        keys += torchao_metadata.keys_of(header.metadata, header.keys)
        infos += header.infos
        begins += header.begins
        homes += [file] * len(header.keys)
    return PlainTensors(keys, infos, Extents(homes, begins, [None] * len(homes)))


def records_of(header: Header, file: str) -> dict[str, Mapping[str, object]]:
    """Return the encoding records of a header, by FQN: ckptmap's own, and those made from torchao's
    metadata. Raise SourceError CKM115 for malformed ones."""
    text = header.metadata.get(RECORDS)
    others = torchao_metadata.read(header.metadata, header.keys)
    if text is None:
        return others
    try:
        records = parse_json(text)
    except ValueError as error:
        raise _bad_records(file, f"not JSON: {error}") from error
    if not isinstance(records, dict) or not all(isinstance(r, dict) for r in records.values()):
        raise _bad_records(file, "expected an object of objects")
    for fqn in records.keys() & others.keys():
        _require_same(fqn, records[fqn], others[fqn], file)
    return {**{fqn: r for fqn, r in others.items() if fqn not in records}, **records}


def words_of(header: Header) -> dict[str, str]:
    """Return the metadata of a header that describes no encoding: what its writer says besides.

    Half of a surrogate pair is left out: it is no UTF-8, and no other reader opens a file that has it.
    """
    described = {RECORDS, *torchao_metadata.described(header.metadata)}
    texts = ((k, v) for k, v in header.metadata.items() if k not in described)
    return {k: v for k, v in texts if not _SURROGATE.search(k + v)}


def _require_same(
    fqn: str, record: Mapping[str, object], entry: Mapping[str, object], file: str
) -> None:
    """Raise SourceError CKM115 where ckptmap's record and torchao's entry of one tensor differ."""
    found = torchao_metadata.difference(record, entry)
    if found is not None:
        field, ours, theirs = found
        raise SourceError(
            "CKM115",
            f"{fqn}: its encoding record states {field} {ours[:80]}, but torchao's metadata states"
            f" {theirs[:80]}: {file}",
            "one of the two is damaged or of another save: copy the file again from where it was saved, or"
            " convert the original checkpoint again",
        )


def _bad_records(file: str, problem: str) -> SourceError:
    return SourceError(
        "CKM115",
        f"{file}: the encoding records in its __metadata__[{RECORDS!r}]: {problem}",
        "convert the original checkpoint again",
    )


def not_weights(head: bytes, file: str, nbytes: int) -> SourceError | None:
    """Return the error for a text file in the place of weights (a Git LFS pointer, a web page, JSON); None
    for any other file. `head` is its first bytes, `nbytes` its size."""
    if head.startswith(LFS_MAGIC):
        return SourceError(
            "CKM102",
            f"{file}: a Git-LFS pointer of {nbytes} bytes, expected the weights that it points to",
            "fetch them: `git lfs pull`, or `hf download REPO`",
        )
    if b"\0" in head:
        return None
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        kind = "an HTML or XML page"
    elif text.startswith((b'{"', b"{\n", b"{\r", b"{ ", b"{}", b'["', b"[{", b"[\n")):
        kind = "JSON text"
    else:
        return None
    return SourceError(
        "CKM103",
        f"{file}: {kind} of {nbytes} bytes, expected weights",
        "the download may have saved an error page, or this is a file that lies beside the weights; "
        "download it again, or give the path of the directory",
    )


def held_records(
    records: Mapping[str, Mapping[str, object]], keys: Sequence[str]
) -> dict[str, Mapping[str, object]]:
    """Return the records of tensors that have a part among the keys: that of `a.b.weight` for the key
    `a.b.weight.nf4` or `a.b.SCB`."""
    paths = {path for key in keys for path in _paths(key)}
    return {
        fqn: record
        for fqn, record in records.items()
        if fqn in paths or fqn.rpartition(".")[0] in paths
    }


def _paths(key: str) -> Iterator[str]:
    """Yield a key and its parent: `a.b.c` -> `a.b.c`, `a.b`."""
    yield key
    yield key.rpartition(".")[0]
