"""Read torchao's safetensors flattening: the keys of the parts, and the JSON that describes them.

    0.weight: Int8Tensor -> 0._weight_qdata, 0._weight_scale
    __metadata__: {"0.weight": {"_type", "_data", "_tensor_data_names"}, "tensor_names": [...]}

torchao/prototype/safetensors writes it since 0.15. `formats.safetensors.torchao_metadata` reads the header
into records, and converts what 0.14 wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptmap.formats.safetensors.torchao_metadata import SCHEME, part_key
from ckptmap.protocols.encodings import Record
from ckptmap.quantization.blockwise import block_geometry
from ckptmap.quantization.blockwise.group_checks import (
    DAMAGED,
    contradiction,
    malformed,
    read_sizes,
    refuse_unstated,
)
from ckptmap.quantization.torchao.subclass_reader import PARTS, TorchaoParts
from ckptmap.tensors import ITEMSIZE, StoredTensor, TensorInfo

__all__ = ["FlatEntry", "flat_of", "flat_parts", "part_key"]


@dataclass(frozen=True)
class FlatEntry:
    """One tensor's entry in torchao's metadata."""

    fqn: str
    kind: str
    names: tuple[str, ...]
    data: Mapping[str, object]


def flat_of(fqn: str, record: Record, kinds: Sequence[str]) -> FlatEntry | None:
    """Return a record as an entry, None for another scheme or for a class that is not in `kinds`."""
    if record.get("scheme") != SCHEME or record.get("kind") not in kinds:
        return None
    data, names = record.get("data"), record.get("names")
    named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not isinstance(data, Mapping) or not isinstance(names, list | tuple) or not named:
        raise malformed(fqn, f"malformed torchao metadata {str(dict(record))[:120]}", DAMAGED)
    return FlatEntry(fqn, str(record["kind"]), tuple(names), data)


def flat_parts(
    flat: FlatEntry, stored: Mapping[str, StoredTensor]
) -> tuple[tuple[str, ...], TorchaoParts]:
    """Return the stored keys of an entry, and its parts as of a pickled object. Raises CKM115."""
    keys = {name: _key(flat.fqn, name, stored) for name in flat.names}
    unstated = {part: part_key(flat.fqn, part) for part in PARTS if part not in keys}
    refuse_unstated(flat.fqn, "torchao's metadata", unstated, stored)
    parts = {name: stored[key] for name, key in keys.items()}
    codes, scale, zero = (parts.get(name) for name in ("qdata", "scale", "zero_point"))
    if codes is None or scale is None:
        raise malformed(flat.fqn, f"torchao metadata names {list(flat.names)}, no qdata and scale")
    dtype = flat.data.get("dtype")
    name = dtype.get("_data") if isinstance(dtype, Mapping) else None
    if not isinstance(name, str) or name not in ITEMSIZE:
        raise malformed(flat.fqn, f"torchao metadata gives dtype {str(dtype)[:60]}", DAMAGED)
    info = TensorInfo(codes.info.shape, name)
    given = flat.data.get("block_size")
    block = read_sizes(flat.fqn, given, "block_size") if given else info.shape
    if len(block) != len(info.shape):
        raise malformed(flat.fqn, f"block_size {list(block)} of {list(info.shape)}", DAMAGED)
    if any(size > extent for size, extent in zip(block, info.shape, strict=True)):
        stated = f"torchao's metadata states block_size {list(block)}"
        raise contradiction(flat.fqn, stated, f"its codes are {codes.info}, which is less", codes)
    grid = block_geometry.grid_shape(info.shape, block)
    by_dims = flat.kind == "Float8Tensor"  # torchao spreads its scales as dims of the codes
    for part in (scale, zero):
        if part is None:
            continue
        is_flat = by_dims and part.info.numel > 1 and len(part.info.shape) != len(grid)
        if is_flat or not block_geometry.fits(part.info.shape, grid):
            stated = f"torchao's metadata states block_size {list(block)} of {list(info.shape)}"
            raise contradiction(
                flat.fqn, stated, f"scales, expected shape {list(grid)}, found {part.info}", part
            )
    attributes = {k: v for k, v in flat.data.items() if k not in ("block_size", "dtype")}
    extra = {k: v for k, v in parts.items() if k not in ("qdata", "scale", "zero_point")}
    return tuple(keys.values()), TorchaoParts(
        flat.kind, info, block, codes, block_geometry.reshaped(scale, grid),
        None if zero is None else block_geometry.reshaped(zero, grid), extra, attributes,
    )  # fmt: skip


def _key(fqn: str, part: str, stored: Mapping[str, StoredTensor]) -> str:
    key = part_key(fqn, part)
    if key in stored:
        return key
    raise malformed(fqn, f"torchao's part {part!r} is missing, expected {key!r}")
