"""Compare the replicas of a box: the copies that several ranks saved must hold the same bytes.

Two replicas are compared by CRC-32 where both have one for exactly the box, which costs no read;
else byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptmap.core.printable import advised
from ckptmap.core.rearranged_tensors import Assembled
from ckptmap.errors import RunError
from ckptmap.storage.box_reader import fill, row_major_boxes
from ckptmap.storage.files import Files
from ckptmap.tensors import Box, Chunk, StoredTensor

COMPARE_NBYTES = 1 << 20
"""Bytes of a tensor, and as many of its replica, that are in memory at once."""
HINT = "the ranks did not hold the same values: find out which is right, or drop the key"


def require_alike(
    files: Files, key: str, stored: StoredTensor, within: Sequence[Box] | None = None
) -> None:
    """Raise RunError CKM310 if a replica differs from the tensor.

    Where there is no CRC-32, the bytes in the boxes `within` are compared (default: all).
    """
    if isinstance(stored, Assembled):
        for source in stored.sources:
            require_alike(files, key, source)
        return
    crcs = {chunk.box: chunk.crc32 for chunk in stored.chunks} if stored.replicas else {}
    hint = f"find out which is right, or convert it with {advised(exclude=key)}"
    for replica in stored.replicas:
        require_same(files, key, stored, replica, crcs.get(replica.box), within, hint)


def require_same(
    files: Files,
    key: str,
    tensor: StoredTensor,
    replica: Chunk,
    crc32: int | None,
    within: Sequence[Box] | None = None,
    hint: str = HINT,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Raise RunError CKM310 if this replica differs from the tensor.

    `crc32` is that of the tensor's chunk with the same box; None: it has none. `alive` is called
    after each block of bytes.
    """
    if crc32 is not None and replica.crc32 is not None:
        if crc32 != replica.crc32:
            raise _differs(key, tensor, replica, replica.box, hint)
        return
    for window in (replica.box,) if within is None else within:
        common = replica.box.intersect(window)
        if common is not None:
            _require_bytes(files, key, tensor, replica, common, hint, alive)


def _require_bytes(
    files: Files,
    key: str,
    tensor: StoredTensor,
    replica: Chunk,
    window: Box,
    hint: str,
    alive: Callable[[], None],
) -> None:
    other, itemsize = StoredTensor(tensor.info, [replica]), tensor.info.itemsize
    for box in row_major_boxes(window, COMPARE_NBYTES // itemsize):
        ours, theirs = bytearray(box.numel * itemsize), bytearray(box.numel * itemsize)
        fill(files, tensor, box, memoryview(ours))
        fill(files, other, box, memoryview(theirs))
        if ours != theirs:
            raise _differs(key, tensor, replica, box, hint)
        alive()


def _differs(key: str, tensor: StoredTensor, replica: Chunk, box: Box, hint: str) -> RunError:
    file = next(region.file for _, region in tensor.pieces(box))
    return RunError(
        "CKM310",
        f"{key}: the replica at {list(replica.box.offsets)} in {replica.region.file} differs from "
        f"{file}, expected the same bytes",
        hint,
    )
