"""Find the weights whose values are those of the checkpoint of --as, bit for bit.

The reference is decoded, a change of values by its names (norms of 1 + w) is undone, and it is cast to the dtype
that the source has; then the bits are compared, so that
-0.0 is not 0.0 and a NaN equals the same NaN alone. A weight that differs is read up to the first block
that does. Codes and scales in the reference's own form are compared as bytes first. Nothing is believed by name, size or date.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING

from ckptmap.core.json_text import parse_json
from ckptmap.core.sizes import MIN_MEMORY
from ckptmap.errors import Interrupted
from ckptmap.execution.phases import Phases
from ckptmap.execution.ranks import Ranks
from ckptmap.planning.options import RunOptions
from ckptmap.planning.plan import Plan
from ckptmap.protocols.progress import COMPARING
from ckptmap.storage.box_reader import fill, row_major_boxes
from ckptmap.storage.file_records import DamagedRecord
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.process_guards import one_torch_thread, stopped_by_signals
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

VALUE_NBYTES = 32
"""Bytes of memory for each value that is compared: both values, codes, temporaries of decoding."""
MOST = 1 << 19
"""Values that are compared at once."""


def unchanged_weights(plan: Plan, how: RunOptions, ranks: Ranks) -> frozenset[str]:
    """Return the FQNs of the unchanged weights; every rank compares its share, and gets all.

    Raises SourceError and RunError as reading does, Interrupted CKM307.
    """
    reference = plan.reference
    assert reference is not None, "the plan was made with --as"
    fqns = [fqn for fqn in plan.steps.weights() if fqn in reference.ckpt]
    mine = fqns[ranks.rank :: ranks.world_size]
    threads = max(1, min(how.threads or 4, how.memory // MIN_MEMORY))
    limit = min(MOST, how.memory // threads // VALUE_NBYTES)
    phases, stop = Phases.of(how.progress), threading.Event()
    phases.begin(COMPARING, sum(plan.ckpt[fqn].nbytes for fqn in mine))
    phases.mention_torch()

    def same(fqn: str) -> bool:
        if stop.is_set():
            return False
        ranks.advance(0)
        equal = _compared(plan.ckpt[fqn], reference.ckpt[fqn], limit)
        phases.advance(plan.ckpt[fqn].nbytes, fqn)
        return equal

    with one_torch_thread(True), stopped_by_signals(stop), ThreadPoolExecutor(threads) as pool:
        try:
            found = [fqn for fqn, equal in zip(mine, pool.map(same, mine), strict=True) if equal]
        except BaseException:
            stop.set()
            raise
    if stop.is_set():
        raise Interrupted("CKM307", "stopped before anything was written", "run it again")
    shares = ranks.gather(json.dumps(found).encode())
    return frozenset(fqn for share in shares for fqn in parse_json(share))


def _compared(tensor: LazyTensor, reference: LazyTensor, limit: int) -> bool:
    """Return `has_values_of`; an error names the tensor."""
    try:
        return has_values_of(tensor, reference, limit)
    except DamagedRecord as error:
        both = [(lazy.fqn, stored) for lazy in (tensor, reference) for stored in lazy.beneath]
        raise error.naming(both) from error


def has_values_of(tensor: LazyTensor, reference: LazyTensor, limit: int) -> bool:
    """Return whether the reference, decoded and cast to the dtype in which the tensor is stored, has its bits.

    Reads at most `limit` values at once, where the encodings can be cut so.
    """
    import torch

    if tensor.shape != reference.shape:
        return False
    if _is_stored_as(tensor, reference, limit):
        return True
    for box in _boxes(tensor, reference, limit):
        mine, theirs = (tensor.as_stored(_read(lazy, box)) for lazy in (tensor, reference))
        if not torch.equal(_bits(mine), _bits(theirs)):
            return False
    return True


def _is_stored_as(tensor: LazyTensor, reference: LazyTensor, limit: int) -> bool:
    """Return whether a quantized tensor has the codes and scales of the reference, byte for byte.

    Then its values need no decoding, which would refuse scales that are not finite.
    """
    pair = tensor, reference
    if not all(type(lazy) is LazyTensor and lazy.quantized for lazy in pair):
        return False
    alike = tensor.encoding_ == reference.encoding_ and tensor.info == reference.info
    if not alike or tensor.parts.keys() != reference.parts.keys():
        return False
    for name, part in tensor.parts.items():
        other = reference.parts[name]
        if part.info != other.info:
            return False
        for box in row_major_boxes(Box.whole(part.info.shape), max(1, limit)):
            mine, theirs = (bytearray(box.numel * part.info.itemsize) for _ in pair)
            fill(tensor.files, part, box, memoryview(mine))
            fill(reference.files, other, box, memoryview(theirs))
            if mine != theirs:
                return False
    return True


def _read(lazy: LazyTensor, box: Box) -> torch.Tensor:
    import torch

    out = torch.empty(box.sizes, dtype=lazy.torch_dtype)
    lazy.read_into(box, out)
    return out


def _bits(values: torch.Tensor) -> torch.Tensor:
    import torch

    return values.contiguous().view(-1).view(torch.uint8)


def _boxes(a: LazyTensor, b: LazyTensor, limit: int) -> Iterator[Box]:
    """Yield boxes of at most `limit` elements that tile both; the whole where one cannot be cut.

    An encoded tensor reads whole rows for a few columns.
    """
    whole = Box.whole(a.shape)
    rows = max(1, limit // max(1, prod(a.shape[1:])))
    small = max(1, limit) if a.encoding == b.encoding == "dense" else rows * prod(a.shape[1:])
    boxes = list(row_major_boxes(whole, max(1, small)))
    yield from boxes if _can_cut(a, boxes) and _can_cut(b, boxes) else [whole]


def _can_cut(lazy: LazyTensor, boxes: Sequence[Box]) -> bool:
    cut = lazy.encoding_.part_box
    return all(cut(lazy.info, part, box) is not None for part in lazy.parts for box in boxes)
