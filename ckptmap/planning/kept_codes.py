"""Quantization codes of one encoding stored in another: the codes bit for bit, the scales encoded anew.

Two 4-bit encodings with the same codes and block size differ in how they store the scales alone: then
no weight is decoded, and none loses precision twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptmap.core.quantized_codes import Coded, CodeGrid, Recodes
from ckptmap.errors import RunError
from ckptmap.protocols import Encoding, Write
from ckptmap.protocols.offers import offers
from ckptmap.storage.box_reader import in_multiples, row_major_boxes
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch


def code_grid(lazy: LazyTensor) -> CodeGrid | None:
    """Return the codes and blocks of a quantized tensor; None where no other encoding could keep them."""
    encoding = lazy.encoding_
    return encoding.grid(lazy.info) if offers(encoding, Coded) else None


def kept_fidelity(lazy: LazyTensor, encoding: Encoding, grid: CodeGrid | None) -> str | None:
    """Return the fidelity at which `encoding` keeps these codes, from headers alone.

    None: it cannot keep them.
    """
    if grid is None or not offers(encoding, Recodes):
        return None
    recoder = encoding.recoder(lazy.info, grid, "cpu")
    return None if recoder is None else recoder.fidelity


def writes_keeping_codes(
    tensor: LazyTensor, encoding: Encoding, grid: CodeGrid, limit: int
) -> Iterator[Write]:
    """Yield the codes and scales to write, at most `limit` codes at a time.

    The scales are in memory as a whole: 4 bytes a block. Raises RunError CKM309 where one is not finite, or
    the encoding cannot hold it.
    """
    recoder = encoding.recoder(tensor.info, grid, "cpu") if offers(encoding, Recodes) else None
    assert recoder is not None, f"{tensor.fqn}: {encoding.name} does not take {grid}"
    scales = _finite_scales(tensor)
    at_once = max(recoder.step, limit // recoder.step * recoder.step)
    for offset, codes in in_multiples(_codes(tensor, grid, at_once), recoder.step):
        yield from recoder.feed(offset, codes, scales)
    yield from recoder.finish(scales)


def _finite_scales(tensor: LazyTensor) -> torch.Tensor:
    scales = tensor.read_scales()
    count = int(scales.isfinite().logical_not_().sum())
    if count:
        raise RunError(
            "CKM309",
            f"expected finite scales, found NaN or infinity in {count} of {scales.numel()}",
            "it was quantized from values that were not finite; leave it as it is with --no-encode",
        )
    return scales


def _codes(tensor: LazyTensor, grid: CodeGrid, at_once: int) -> Iterator[torch.Tensor]:
    """Yield the codes in row-major order, some of them at once."""
    import torch

    for box in row_major_boxes(Box.whole(grid.codes.shape), at_once):
        codes = torch.empty(box.sizes, dtype=getattr(torch, grid.codes.dtype))
        tensor.read_codes(box, codes)
        yield codes
