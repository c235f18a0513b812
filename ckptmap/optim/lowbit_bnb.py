"""Read bitsandbytes' blockwise 8-bit optimizer state, where three tensors are one moment.

    state1 u8 [shape], absmax1 f32 [ceil(n/256)], qmap1 f32 [256]  ->  exp_avg
    state2, absmax2, qmap2                                         ->  exp_avg_sq
    state1 [2, shape] and absmax1 [2, blocks] of AdEMAMix          ->  exp_avg, exp_avg_slow
    state1 alone                                                   ->  as the groups tell, see `_ONE`

`state_dict()` of bitsandbytes 0.45 and later hides them in a dict of their own,
`__bnb_optimizer_quant_state__`. Small tensors are float32 and have state1 and state2 alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptmap.optim.lowbit import CODES, LOGICAL, QMAP, SCALE, LowBit, LowBitScheme, malformed
from ckptmap.optim.state import GROUPS
from ckptmap.protocols import Group
from ckptmap.tensors import Box, Chunk, Path, Region, StoredTensor, TensorInfo

HIDDEN = "__bnb_optimizer_quant_state__"
BLOCK = 256
FIRST, SLOW, SECOND = "exp_avg", "exp_avg_slow", "exp_avg_sq"
UNNAMED = "state1"
"""The name of a moment if the file does not say which moment it is."""


class Bnb8bit(LowBitScheme):
    """Moments known by their record, or in files of bitsandbytes by tensor names: see `moments`."""

    name = "bnb8bit"

    def moments(self, leaves: Mapping[Path, object]) -> Mapping[Path, object]:
        """Return the leaves with a Group for each three tensors of bitsandbytes.

        Raises SourceError CKM115.
        """
        return _group_moments(leaves)


def _group_moments(leaves: Mapping[Path, object]) -> Mapping[Path, object]:
    if not any(path[-1] in ("state1", "state2") for path in leaves if path):
        return leaves
    single_name = _one_state(leaves)
    gathered: dict[Path, object] = {}
    for path, leaf in leaves.items():
        name, parent = path[-1], path[:-1]
        hidden = bool(parent) and parent[-1] == HIDDEN
        state_path = parent[:-1] if hidden else parent
        number = str(name)[-1:]
        if name in ("state1", "state2"):
            parts = [leaves.get((*parent, f"{part}{number}")) for part in ("absmax", "qmap")]
            other = leaves.get((*parent, "state2")) if name == "state1" else None
            names = (SECOND,) if number == "2" else _names(leaf, other, single_name)
            gathered |= {
                (*state_path, key): v for key, v in _moments(path, names, leaf, parts).items()
            }
        elif not _is_part(path, leaves):
            gathered[(*state_path, name) if hidden else path] = leaf
    return gathered


def _is_part(path: Path, leaves: Mapping[Path, object]) -> bool:
    """Return whether the leaf is the scale or the code table of a state beside it."""
    name = str(path[-1])
    is_scale_or_table = name[:-1] in ("absmax", "qmap") and name[-1] in "12"
    return is_scale_or_table and (*path[:-1], f"state{name[-1]}") in leaves


def _names(first: object, second: object, single_name: str) -> tuple[str, ...]:
    """Return the moments that `state1` holds: AdEMAMix's has a row for each of two averages."""
    if second is None:
        return (single_name,)
    shapes = [getattr(getattr(leaf, "info", None), "shape", ()) for leaf in (first, second)]
    return (FIRST, SLOW) if shapes[0] == (2, *shapes[1]) else (FIRST,)


def _moments(
    path: Path, names: tuple[str, ...], leaf: Any, parts: Sequence[object]
) -> dict[str, StoredTensor | Group]:
    if len(names) == 1:
        return {names[0]: leaf if parts[0] is None else _group(path, leaf, *parts)}
    rows = [_row(leaf, number) for number in range(len(names))]
    absmax, qmap = parts
    if absmax is None:
        return dict(zip(names, rows, strict=True))
    if not isinstance(absmax, StoredTensor):
        raise malformed(".".join(map(str, path)), f"absmax, expected a tensor, found {absmax!r}")
    scales = [_row(absmax, number) for number in range(len(names))]
    return {
        name: _group(path, row, scale, qmap)
        for name, row, scale in zip(names, rows, scales, strict=True)
    }


def _row(stored: StoredTensor, number: int) -> StoredTensor:
    """Return one index of the first dim as a tensor."""

    def chunks() -> list[Chunk]:
        shape = stored.info.shape
        row = Box((number, *(0 for _ in shape[1:])), (1, *shape[1:]))
        row_chunks = []
        for chunk in stored.chunks:
            common = chunk.box.intersect(row)
            if common is not None:
                region = chunk.region.crop(common.relative_to(chunk.box.offsets))
                inner = _without_first(region)
                row_chunks.append(Chunk(Box(common.offsets[1:], common.sizes[1:]), inner))
        return row_chunks

    return StoredTensor(TensorInfo(stored.info.shape[1:], stored.info.dtype), chunks)


def _without_first(region: Region) -> Region:
    """Return the region without its first dim, which has one element."""
    return region._replace(sizes=region.sizes[1:], strides=region.strides[1:])


ONE_STATE = ("momentum_buffer", "square_avg", "sum", FIRST)
"""Names of a state that stands alone."""
_ONE = {"SGD": "momentum_buffer", "RMSprop": "square_avg", "Adagrad": "sum", "Lion": FIRST}
"""Algorithm -> the name that torch or others give to its one state."""
LION_BETA = 0.9
"""A second beta above this is Lion's; below it may be the dampening of an SGD."""


def _one_state(leaves: Mapping[Path, object]) -> str:
    """Return the name of a state that stands alone, if all groups are of one algorithm."""
    algorithms = {_algorithm(group) for group in _groups(leaves)}
    return _ONE.get(algorithms.pop(), UNNAMED) if len(algorithms) == 1 else UNNAMED


def _groups(leaves: Mapping[Path, object]) -> list[Mapping[object, object]]:
    groups: dict[Path, dict[object, object]] = {}
    for path, leaf in leaves.items():
        if path == (GROUPS,) and isinstance(leaf, list):
            groups |= {(n,): dict(g) for n, g in enumerate(leaf) if isinstance(g, Mapping)}
        elif path[0] == GROUPS and len(path) > 2:
            groups.setdefault(path[1:-1], {})[path[-1]] = leaf
    return list(groups.values())


def _algorithm(group: Mapping[object, Any]) -> str:
    """Return the algorithm of a group, by how bitsandbytes fills Adam's fields; "": it is not known.

    SGD has (momentum, dampening) for betas and eps 0, RMSprop (alpha, momentum), Adagrad zeros, Lion
    two betas and eps 0.
    """
    betas, eps = group.get("betas"), group.get("eps")
    numbers = isinstance(betas, list | tuple) and all(isinstance(b, int | float) for b in betas)
    if not numbers or len(betas) != 2 or not isinstance(eps, int | float):  # type: ignore[arg-type]
        return ""
    first, second = betas  # type: ignore[misc]
    if eps > 0:
        return "RMSprop" if first else "Adagrad"
    if not second:
        return "SGD"
    return "Lion" if second > LION_BETA else ""


def _group(path: Path, codes: object, absmax: object, qmap: object) -> Group:
    title = ".".join(map(str, path))
    if not (
        isinstance(codes, StoredTensor)
        and isinstance(absmax, StoredTensor)
        and isinstance(qmap, StoredTensor)
    ):
        raise malformed(title, "bitsandbytes state, expected plain state, absmax and qmap")
    info = TensorInfo(codes.info.shape, LOGICAL)
    encoding = LowBit("bnb8bit", BLOCK, path[-1] == "state1")
    expected = encoding.parts(info)
    assert isinstance(expected, Mapping)
    flat = StoredTensor(expected[CODES], lambda: _flat(codes, title))
    parts = {CODES: flat, SCALE: absmax, QMAP: qmap}
    for name, part in parts.items():
        if part.info != expected[name]:
            raise malformed(title, f"{name}, expected {expected[name]}, found {part.info}")
    return Group(title, info, encoding, parts)


def _flat(codes: StoredTensor, title: str) -> list[Chunk]:
    (chunk,) = codes.chunks
    if not chunk.region.is_contiguous:
        raise malformed(title, "codes in pieces, expected one row-major tensor")
    region = chunk.region
    numel = codes.info.numel
    flat = Region.contiguous(region.file, region.offset, (numel,), region.itemsize)
    return [Chunk(Box((0,), (numel,)), flat, chunk.crc32)]
