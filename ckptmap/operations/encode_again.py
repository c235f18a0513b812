"""Encode a tensor once more, as a conversion does: to compare with what was written, or to measure it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from ckptmap.protocols import Encoding, LooksFirst, Write
from ckptmap.storage.box_reader import row_major_boxes
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

FEED_NUMEL = 1 << 19
"""Values that an encoder is fed at once."""


def encoded_writes(source: LazyTensor, encoding: Encoding) -> Iterator[Write]:
    """Yield the parts of `source` in this encoding, in the order in which the encoder gives them."""
    encoder = encoding.encoder(source.info, "cpu")
    if isinstance(encoder, LooksFirst):
        for _, values in _steps(source, encoder.step):
            encoder.look(values)
    feeds = (encoder.feed(*values) for values in _steps(source, encoder.step))
    yield from chain.from_iterable(chain(feeds, _when_exhausted(encoder.finish)))


def _when_exhausted(finish: Callable[[], Iterable[Write]]) -> Iterator[Iterable[Write]]:
    """Call `finish` only when the iterators before it in a chain are exhausted."""
    yield finish()


def _steps(lazy: LazyTensor, step: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (flat offset, values) in row-major order; all but the last hold a multiple of `step`
    elements."""
    import torch

    offset, rest = 0, torch.empty(0, dtype=lazy.torch_dtype)
    for box in row_major_boxes(Box.whole(lazy.shape), FEED_NUMEL):
        rest = torch.cat([rest, lazy.read(box.offsets, box.sizes).view(-1)])
        whole = len(rest) - len(rest) % step
        yield offset, rest[:whole]
        offset, rest = offset + whole, rest[whole:]
    if len(rest):
        yield offset, rest
