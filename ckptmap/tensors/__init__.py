"""Values that describe tensors without their data: shapes, boxes, and the places of bytes in files.

Nothing here reads a file or imports torch. `sizes` and `offsets` count elements; `nbytes`, and the
`offset` and `strides` of a region of a file, count bytes.
"""

from __future__ import annotations

from ckptmap.tensors.boxes import (
    FLOATING,
    ITEMSIZE,
    Box,
    Chunk,
    Extent,
    Region,
    TensorInfo,
    contiguous_strides,
)
from ckptmap.tensors.stated_sums import StatedSum, Sum
from ckptmap.tensors.stored import (
    BUFFERS,
    PARAMETERS,
    Cut,
    Index,
    Leaf,
    Opaque,
    Path,
    PerRank,
    Places,
    PlainValue,
    StateNote,
    StoredTensor,
    as_inert,
    in_saved_order,
)

__all__ = [
    "BUFFERS", "FLOATING", "ITEMSIZE", "PARAMETERS", "Box", "Chunk", "Cut", "Extent", "Index",
    "Leaf", "Opaque", "Path", "PerRank", "Places", "PlainValue", "Region", "StateNote",
    "StatedSum", "StoredTensor", "Sum", "TensorInfo", "as_inert", "contiguous_strides", "in_saved_order",
]  # fmt: skip
