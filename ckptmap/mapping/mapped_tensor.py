"""From what a tensor is made of to a tensor that can be moved or read.

Dense sources are rearranged: bytes move from where they lie to where they go. Of quantized sources the
parts (codes, scales) are rearranged, if whole blocks move together; if not, or if values change, the
tensor is read through its sources, decoded, box by box.
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
    made: MappedTensor, sources: Mapping[str, LazyTensor], dense: Encoding
) -> Group | StoredTensor | DerivedTensor:
    """A dense tensor as it is stored, a quantized one as a group of its parts, or one that must be
    decoded first, which is then `dense`."""
    if made.source is not None and not made.ops:
        group = sources[made.source].group
        return group.parts[""] if group.encoding == dense else group._replace(fqn=made.name)
    if not made.ops and all(lazy.encoding_ == dense for lazy in sources.values()):
        stored = {key: lazy.parts[""] for key, lazy in sources.items()}
        return rearranged(made.info, made.pieces, stored, made.zeros)
    parts = None if made.ops else _parts(made, sources)
    if parts is None:
        return derive(made, sources, dense)
    return Group(made.name, made.info, next(iter(sources.values())).encoding_, parts)


# --------------------------------------------------------------------------------- parts


def _parts(made: MappedTensor, sources: Mapping[str, LazyTensor]) -> dict[str, StoredTensor] | None:
    """Its codes and scales out of those of the sources, as they are; None: blocks would be torn."""
    lazies = list(sources.values())
    encoding = lazies[0].encoding_
    if any(lazy.encoding_ != encoding for lazy in lazies) or made.zeros is not None:
        return None
    expected = encoding.parts(made.info)
    unit = rows_together(made)
    if unit is None or isinstance(expected, Refusal) or set(expected) != set(lazies[0].parts):
        return None
    found: dict[str, StoredTensor] = {}
    for part, info in expected.items():
        stored = {key: lazy.parts[part] for key, lazy in sources.items()}
        if len(lazies) == 1 and _is_shared(lazies[0], part, made.info):
            found[part] = next(iter(stored.values()))
            continue
        per_unit = {_per_unit(lazy, part, unit) for lazy in lazies}
        rows = per_unit.pop()
        if per_unit or rows is None or info.shape[0] * unit != made.info.shape[0] * rows:
            return None
        pieces = [part_piece(piece, unit, rows, info.shape) for piece in made.pieces]
        found[part] = rearranged(info, pieces, stored)
    return found


def _is_shared(lazy: LazyTensor, part: str, target: TensorInfo) -> bool:
    """Does every row need the whole part, as a table or a mean? Or none of it, as of a record of
    the shape: then it is of use to a tensor of that shape only."""
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
    """Rows of a part for each unit of rows of the tensor; None: blocks do not end with them."""
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
