"""bitsandbytes' blockwise 8-bit optimizer state: four tensors that are one moment.

    state1 u8 [shape], absmax1 f32 [ceil(n/256)], qmap1 f32 [256]  ->  exp_avg
    state2, absmax2, qmap2                                         ->  exp_avg_sq

`state_dict()` of bitsandbytes 0.45 and later hides them in a dict of their own,
`__bnb_optimizer_quant_state__`. Small tensors are float32 and have state1 and state2 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptmap.optim.lowbit import CODES, LOGICAL, QMAP, SCALE, LowBit, LowBitScheme, malformed
from ckptmap.protocols import Group
from ckptmap.tensors import Box, Chunk, Path, Region, StoredTensor, TensorInfo

HIDDEN = "__bnb_optimizer_quant_state__"
BLOCK = 256
MOMENTS = {"1": "exp_avg", "2": "exp_avg_sq"}


class Bnb8bit(LowBitScheme):
    """Known by its record; a foreign file's by the names of its tensors, see `moments`."""

    name = "bnb8bit"


def moments(leaves: Mapping[Path, Any]) -> Mapping[Path, Any]:
    """Leaves of optimizer state with bitsandbytes' tensors put together as moments, where some
    are: a Group in place of three or four. Raises SourceError CKM115."""
    if not any(path[-1] in ("state1", "state2") for path in leaves if path):
        return leaves
    found: dict[Path, Any] = {}
    taken = set[Path]()
    for path, leaf in leaves.items():
        number = path[-1][-1:] if isinstance(path[-1], str) else ""
        if path[-1] != f"state{number}" or number not in MOMENTS:
            continue
        around = path[:-1]
        home = around[:-1] if around and around[-1] == HIDDEN else around
        keys = {name: (*around, f"{name}{number}") for name in ("absmax", "qmap")}
        parts = {name: leaves.get(key) for name, key in keys.items()}
        taken |= {path, *keys.values()}
        found[(*home, MOMENTS[number])] = (
            leaf if parts["absmax"] is None else _group(path, leaf, parts)
        )
    kept = {path: leaf for path, leaf in leaves.items() if path not in taken}
    return {**kept, **found}


def _group(path: Path, codes: Any, parts: Mapping[str, Any]) -> Group:
    title = ".".join(map(str, path))
    stored = (codes, parts["absmax"], parts["qmap"])
    if not all(isinstance(part, StoredTensor) for part in stored):
        raise malformed(title, "bitsandbytes state, expected plain state, absmax and qmap")
    absmax, qmap = parts["absmax"], parts["qmap"]
    info = TensorInfo(codes.info.shape, LOGICAL)
    encoding = LowBit("bnb8bit", BLOCK, path[-1] == "state1")
    wanted = encoding.parts(info)
    assert isinstance(wanted, Mapping)
    flat = StoredTensor(wanted[CODES], lambda: _flat(codes, title))
    held = {CODES: flat, SCALE: absmax, QMAP: qmap}
    for name, part in held.items():
        if part.info != wanted[name]:
            raise malformed(title, f"{name}, expected {wanted[name]}, found {part.info}")
    return Group(title, info, encoding, held)


def _flat(codes: StoredTensor, title: str) -> list[Chunk]:
    (chunk,) = codes.chunks
    if not chunk.region.is_contiguous:
        raise malformed(title, "codes in pieces, expected one row-major tensor")
    region = chunk.region
    numel = codes.info.numel
    flat = Region.contiguous(region.file, region.offset, (numel,), region.itemsize)
    return [Chunk(Box((0,), (numel,)), flat, chunk.crc32)]
