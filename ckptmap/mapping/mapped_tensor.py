"""Present a mapped tensor as stored bytes where possible, else as a tensor that is computed when read.

Dense sources move as bytes: each piece of the target is a region of a source file. Quantized sources
move the same way, part by part (codes, scales), if whole quantization blocks stay together. If a
block would be split, or a value op changes values, the sources are decoded box by box when read.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptmap.core.rearranged_tensors import rearranged
from ckptmap.mapping.derived_tensor import DerivedTensor, derive
from ckptmap.mapping.resolve import MappedTensor
from ckptmap.mapping.row_blocks import part_piece, rows_together
from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, StoredTensor, TensorInfo


def mapped_tensor(
    mapped: MappedTensor, sources: Mapping[str, LazyTensor], dense: Encoding
) -> Group | StoredTensor | DerivedTensor:
    """Return the target `mapped` in the cheapest form that holds the right values.

    That is a StoredTensor for dense sources, a Group of parts for quantized sources whose blocks stay
    whole, else a DerivedTensor, which is decoded when read and written as `dense`.
    """
    if mapped.source is not None and not mapped.ops:
        group = sources[mapped.source].group
        return group.parts[""] if group.encoding == dense else group._replace(fqn=mapped.name)
    if not mapped.ops and all(lazy.encoding_ == dense for lazy in sources.values()):
        stored = {key: lazy.parts[""] for key, lazy in sources.items()}
        return rearranged(mapped.info, mapped.pieces, stored, mapped.zeros)
    parts = None if mapped.ops else _rearrange_parts(mapped, sources)
    if parts is None:
        return derive(mapped, sources, dense)
    return Group(mapped.name, mapped.info, next(iter(sources.values())).encoding_, parts)


# --------------------------------------------------------------------------------- parts


def _rearrange_parts(
    mapped: MappedTensor, sources: Mapping[str, LazyTensor]
) -> dict[str, StoredTensor] | None:
    """Return the target's codes and scales, cut out of those of the sources.

    Return None where the sources differ in encoding or a quantization block would be split.
    """
    lazies = list(sources.values())
    encoding = lazies[0].encoding_
    if any(lazy.encoding_ != encoding for lazy in lazies) or mapped.zeros is not None:
        return None
    expected = encoding.parts(mapped.info)
    unit = rows_together(mapped)
    if unit is None or isinstance(expected, Refusal) or set(expected) != set(lazies[0].parts):
        return None
    parts: dict[str, StoredTensor] = {}
    for part, info in expected.items():
        stored = {key: lazy.parts[part] for key, lazy in sources.items()}
        if len(lazies) == 1 and _is_shared(lazies[0], part, mapped.info):
            parts[part] = next(iter(stored.values()))
            continue
        per_unit = {_per_unit(lazy, part, unit) for lazy in lazies}
        rows = per_unit.pop()
        if per_unit or rows is None or info.shape[0] * unit != mapped.info.shape[0] * rows:
            return None
        pieces = [part_piece(piece, unit, rows, info.shape) for piece in mapped.pieces]
        parts[part] = rearranged(info, pieces, stored)
    return parts


def _is_shared(lazy: LazyTensor, part: str, target: TensorInfo) -> bool:
    """Return whether a part belongs to the tensor as a whole and not to its rows.

    Such a part is a table or a mean, which every row needs. A part that no row needs (the stored
    shape) counts as well if the target has the same shape.
    """
    rows, info = lazy.shape[0], lazy.parts[part].info
    first, last = (
        lazy.encoding_.part_box(lazy.info, part, _row(lazy.info, at, 1)) for at in (0, rows - 1)
    )
    if rows < 2 or first is None or first != last:
        return False
    return first == Box.whole(info.shape) or (first.numel == 0 and target == lazy.info)


def _row(info: TensorInfo, at: int, count: int) -> Box:
    return Box((at, *(0 for _ in info.shape[1:])), (count, *info.shape[1:]))


def _per_unit(lazy: LazyTensor, part: str, unit: int) -> int | None:
    """Return the rows of a part per `unit` rows of the tensor, None where blocks span two units."""
    info, shape = lazy.info, lazy.parts[part].info.shape
    units, torn = divmod(info.shape[0], unit)
    if torn or not shape or not units or shape[0] % units:
        return None
    rows = shape[0] // units
    for at in {0, min(1, units - 1), units - 1}:
        expected = Box((at * rows, *(0 for _ in shape[1:])), (rows, *shape[1:]))
        if lazy.encoding_.part_box(info, part, _row(info, at * unit, unit)) != expected:
            return None
    return rows
