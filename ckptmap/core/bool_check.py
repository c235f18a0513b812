"""Check bool tensors: every byte must be 0 or 1.

torch treats any other byte as True, and writes 1 when it copies the tensor. numpy, a C++ kernel or
a bitwise operation may treat it differently. So the meaning of such a byte is unknown, and it is
refused, not copied.
"""

from __future__ import annotations

from ckptmap.errors import RunError
from ckptmap.protocols import Slot
from ckptmap.tensors import Box, Path, StoredTensor

BOOL = "bool"
PIECE_NBYTES = 1 << 20


_NEXT = "save it again as tensor.clone(), which torch makes of 0 and 1"


class NotBool(RunError):
    """A BOOL tensor holds another byte. `path` is the tensor's in the output."""

    def __init__(self, code: str, message: str, hint: str, path: Path) -> None:
        super().__init__(code, message, hint)
        self.path = path


def check_bools(source: StoredTensor, slot: Slot, at: int, data: memoryview) -> None:
    """Raise NotBool CKM318, which names the element, if a byte of `data` is neither 0 nor 1.

    `data` holds bytes of the slot, from its byte `at` on; `source` is for the name of the file.
    """
    for start in range(0, data.nbytes, PIECE_NBYTES):
        piece = bytes(data[start : start + PIECE_NBYTES])
        invalid = piece.translate(None, b"\0\1")
        if invalid:
            index = _index_of(slot, at + start + piece.index(invalid[:1]))
            element = Box(index, (1,) * len(index))
            file = next(region.file for _, region in source.pieces(element))
            raise NotBool(
                "CKM318",
                f"{file}: {'.'.join(map(str, slot.path))}: BOOL element {list(index)}"
                f" is the byte {invalid[0]}, expected 0 or 1",
                _NEXT,
                slot.path,
            )


def _index_of(slot: Slot, element: int) -> tuple[int, ...]:
    """Return the index, in the tensor, of element number `element` of a slot in row-major order."""
    index = []
    for offset, extent in zip(reversed(slot.box.offsets), reversed(slot.box.sizes), strict=True):
        index.append(offset + element % extent)
        element //= extent
    return tuple(index[::-1])
