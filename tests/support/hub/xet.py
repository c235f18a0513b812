"""The content store that hf_xet speaks to, as far as a client needs it to fetch and to publish.

By the Xet protocol specification (https://huggingface.co/docs/xet): a file is a list of terms, each
a run of chunks of a xorb. What was pushed over HTTP is cut into chunks when it is asked for; what
hf_xet pushes is put together from its xorbs, by the shard that describes it.
"""

from __future__ import annotations

import hashlib
import re
import struct
from typing import TYPE_CHECKING, Any

from tests.support.hub.endpoints import Refused, answer, ranged

if TYPE_CHECKING:
    from tests.support.hub.server import Handler

CHUNK = 64 << 10
HEADER = 8
"""Bytes before a chunk: version, 3 of its length as stored, how it is compressed, 3 of its length."""


def token(ask: Handler, name: str, revision: str) -> Any:
    if not ask.hub.cas:
        raise Refused(404, "", f"no such endpoint: {ask.route}")
    ask._repo(name, write="write" in ask.route)
    url, expires = ask.hub.endpoint, 4_000_000_000
    about = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": "cas", "X-Xet-Token-Expiration": expires}
    headers = {key: str(value) for key, value in about.items()}
    return answer({"casUrl": url, "accessToken": "cas", "exp": expires}, **headers)


def reconstruction(ask: Handler, file: str) -> Any:
    """One term: the chunks of one xorb, that of the file's own name, which hold the range."""
    content = _content(ask, file)
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", ask.headers.get("Range") or "bytes=0-")
    assert match is not None
    start, stop = int(match[1]), min(int(match[2] or len(content)) + 1, len(content))
    if start >= len(content):
        return 416, b"", {}
    first, last = start // CHUNK, -(-stop // CHUNK)
    nbytes = min(last * CHUNK, len(content)) - first * CHUNK
    chunks = {"start": first, "end": last}
    at = {"start": first * (CHUNK + HEADER), "end": first * CHUNK + nbytes + last * HEADER - 1}
    where = {"range": chunks, "url": f"{ask.hub.endpoint}/xorb/{file}", "url_range": at}
    return answer(
        {
            "offset_into_first_range": start - first * CHUNK,
            "terms": [{"hash": file, "unpacked_length": nbytes, "range": chunks}],
            "fetch_info": {file: [where]},
        }
    )


def xorb(ask: Handler, file: str) -> Any:
    content = _content(ask, file)
    chunks = (content[at : at + CHUNK] for at in range(0, len(content), CHUNK))
    return ranged(ask, b"".join(_uncompressed(chunk) for chunk in chunks), {})


def _uncompressed(chunk: bytes) -> bytes:
    length = len(chunk).to_bytes(3, "little")
    return b"\0" + length + b"\0" + length + chunk


def _content(ask: Handler, file: str) -> bytes:
    found = (repo.lfs_stored.get(file) for repo in ask.hub.repos.values())
    content = next((content for content in found if content is not None), None)
    if content is None:
        raise Refused(404, "", f"no file {file}")
    return content


# ------------------------------------------------------------------------------- publishing


def unknown(ask: Handler, chunk: str) -> Any:
    """Nothing is known before: every chunk is to be sent."""
    raise Refused(404, "", "no such chunk")


def put_xorb(ask: Handler, name: str) -> Any:
    ask.hub.xorbs[name] = _chunks(ask.body)
    return answer({"was_inserted": True})


def put_shard(ask: Handler) -> Any:
    """Files as runs of chunks: from here on they can be committed by their SHA-256, anywhere."""
    entries = iter(ask.body[at : at + 48] for at in range(48, len(ask.body), 48))
    while not (head := next(entries)).startswith(b"\xff" * 32):
        flags, count = struct.unpack_from("<II", head, 32)
        content = b"".join(_run(ask, next(entries)) for _ in range(count))
        for _ in range(bool(flags & 1 << 31) * count + bool(flags & 1 << 30)):
            next(entries)  # hashes of the runs, and of the file
        for repo in ask.hub.repos.values():
            repo.lfs_stored[hashlib.sha256(content).hexdigest()] = content
    return answer({"result": 1})


def _run(ask: Handler, entry: bytes) -> bytes:
    name = "".join(f"{number:016x}" for number in struct.unpack_from("<4Q", entry))
    first, stop = struct.unpack_from("<II", entry, 40)
    return b"".join(ask.hub.xorbs[name][first:stop])


def _chunks(xorb: bytes) -> list[bytes]:
    found, at = [], 0
    while at + HEADER <= len(xorb) and xorb[at] == 0:
        stored = int.from_bytes(xorb[at + 1 : at + 4], "little")
        found.append(_plain(xorb[at + 4], xorb[at + HEADER : at + HEADER + stored]))
        assert len(found[-1]) == int.from_bytes(xorb[at + 5 : at + 8], "little")
        at += HEADER + stored
    return found


def _plain(kind: int, data: bytes) -> bytes:
    """As it is, LZ4, or LZ4 of each fourth byte, each next fourth byte, and so on."""
    if kind == 0:
        return data
    grouped = _lz4_frame(data)
    if kind == 1:
        return grouped
    plain, at = bytearray(len(grouped)), 0
    for i in range(4):
        nbytes = len(plain[i::4])
        plain[i::4] = grouped[at : at + nbytes]
        at += nbytes
    return bytes(plain)


def _lz4_frame(data: bytes) -> bytes:
    """By the LZ4 frame format: magic, flags, blocks of u32 length, the highest bit for plain ones."""
    flags, out = data[4], bytearray()
    at = 7 + 8 * bool(flags & 8)
    while nbytes := int.from_bytes(data[at : at + 4], "little"):
        block = data[at + 4 : at + 4 + (nbytes & 0x7FFFFFFF)]
        if nbytes >> 31:
            out += block
        else:
            _lz4_block(block, out)
        at += 4 + len(block) + 4 * bool(flags & 16)
    return bytes(out)


def _lz4_block(block: bytes, out: bytearray) -> None:
    at = 0

    def length(short: int) -> int:
        nonlocal at
        total, more = short, short == 15
        while more:
            total, more, at = total + block[at], block[at] == 255, at + 1
        return total

    while at < len(block):
        token, at = block[at], at + 1
        literals = length(token >> 4)
        out += block[at : at + literals]
        at += literals
        if at >= len(block):
            return
        back, at = int.from_bytes(block[at : at + 2], "little"), at + 2
        for _ in range(length(token & 15) + 4):
            out.append(out[-back])


XET_ROUTES = (
    (r"GET /api/models/([^/]+/[^/]+)/xet-(?:read|write)-token/(.+)", token),
    (r"GET /v1/reconstructions/(\w+)", reconstruction),
    (r"GET /xorb/(\w+)", xorb),
    (r"GET /v1/chunks/[\w-]+/(\w+)", unknown),
    (r"POST /v1/xorbs/default/(\w+)", put_xorb),
    (r"POST /v1/shards", put_shard),
)
