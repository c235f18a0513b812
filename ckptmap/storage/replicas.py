"""Copies of a box that several ranks have saved: whoever reads one of them relies on all being alike.

By CRC-32 where both have one for exactly the box, which costs no read; else byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptmap.core.rearranged_tensors import Assembled
from ckptmap.errors import RunError
from ckptmap.storage.box_reader import fill, row_major_boxes
from ckptmap.storage.files import Files
from ckptmap.tensors import Box, Chunk, StoredTensor

COMPARE_NBYTES = 1 << 20
"""Bytes of a tensor and of its replica held at once."""
HINT = "the ranks did not hold the same values: find out which is right, or drop the key"


def require_alike(
    files: Files, key: str, stored: StoredTensor, within: Sequence[Box] | None = None
) -> None:
    """Raise RunError CKM310 where a replica of what is read differs from it; where only bytes can
    tell, those in the boxes `within` do (default: all)."""
    if isinstance(stored, Assembled):
        for source in stored.sources:
            require_alike(files, key, source)
        return
    crcs = {chunk.box: chunk.crc32 for chunk in stored.chunks} if stored.replicas else {}
    hint = f"find out which is right, or convert it with --exclude '{key}'"
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
    """The same of one replica; `crc32` is that of the tensor's chunk with its box, where it has
    one. `alive` is called now and then."""
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
