"""Turn pickled scalars of libraries into plain values: a best loss of numpy, the version of torch.

    numpy.float64(0.25)   numpy._core.multiarray.scalar(dtype('f8'), 8 bytes)    -> 0.25
    torch.__version__     torch.torch_version.TorchVersion('2.13.0+cpu')         -> '2.13.0+cpu'

Source: numpy 2.4, `generic.__reduce__` and `dtype.__reduce__`; before numpy 2 the module is
`numpy.core`. Values are kept exactly, as Python's bool, int, float and str. Scalars that these cannot
hold (longdouble, complex, dates) stay objects of an unknown class.
"""

from __future__ import annotations

import struct

from ckptmap.tensors import Opaque

SCALARS = tuple((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core"))
VERSION = ("torch.torch_version", "TorchVersion")
_FORMATS = {
    "b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q",
    "u8": "Q", "f2": "e", "f4": "f", "f8": "d",
}  # fmt: skip
_ORDERS = {"<": "<", ">": ">", "|": "<"}
"""numpy's byte orders that a file can have, as `struct` spells them."""


def number(args: tuple[object, ...]) -> bool | int | float | None:
    """Return the value of a numpy scalar from its pickled arguments; None: Python has no such number."""
    if len(args) != 2:
        return None
    dtype, data = args
    if not isinstance(data, bytes) or not isinstance(dtype, Opaque):
        return None
    if (dtype.module, dtype.name) != ("numpy", "dtype"):
        return None
    kind = dtype.args[0] if dtype.args else None
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else None
    if not isinstance(kind, str) or not isinstance(order, str):
        return None
    layout = _ORDERS.get(order, "") + _FORMATS.get(kind, "")
    if len(layout) != 2 or len(data) != struct.calcsize(layout):
        return None
    value: bool | int | float = struct.unpack(layout, data)[0]
    return value
