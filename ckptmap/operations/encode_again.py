"""Encode a tensor once more, as a conversion does: to compare with what was written, or to measure it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from ckptmap.protocols import Encoder, Encoding, LooksFirst, Write
from ckptmap.protocols.offers import offers
from ckptmap.storage.box_reader import in_multiples, row_major_boxes
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

FEED_NUMEL = 1 << 19
"""Values that an encoder is fed at once."""
Feeds: TypeAlias = Callable[[], Iterable[tuple[int, "torch.Tensor"]]]
"""Returns all values of a tensor, as `Encoder.feed` takes them, each time that it is called."""


def encoded_writes(source: LazyTensor, encoding: Encoding) -> Iterator[Write]:
    """Yield the parts of `source` in this encoding, in the order in which the encoder gives them."""
    encoder = encoding.encoder(source.info, "cpu")
    boxes = list(row_major_boxes(Box.whole(source.shape), FEED_NUMEL))

    def feeds() -> Iterable[tuple[int, torch.Tensor]]:
        values = (source.read(box.offsets, box.sizes) for box in boxes)
        return in_multiples(values, encoder.step)

    return writes_of(encoder, feeds)


def writes_of(encoder: Encoder, feeds: Feeds) -> Iterator[Write]:
    """Yield what an encoder makes of all values, in the order in which it gives it."""
    if offers(encoder, LooksFirst):
        for _, values in feeds():
            encoder.look(values)
    for offset, values in feeds():
        yield from encoder.feed(offset, values)
    yield from encoder.finish()
