"""Read what HQQ says about a weight: small tensors in its module, made by `encode_safetensor_type`.

    numbers  int32 [], or float32 [] for 1.58 bits      truth values  u8 []
    text     u8 [n], a character each                   the shape     int64 [2]

Source: hqq 0.2.8, core/utils.py and `HQQLinear.state_dict`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptmap.core.stored_parts import StoredParts
from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.blockwise.group_checks import DAMAGED, malformed
from ckptmap.quantization.blockwise.read_config import read_each_small
from ckptmap.quantization.blockwise.scaled_encoding import DTYPES
from ckptmap.storage.files import Files
from ckptmap.tensors import StoredTensor

CODES = "W_q"
_COUNTS = ("group_size", "axis")
_TRUTHS = ("view_as_float", "quant_scale", "quant_zero", "channel_wise")
_TEXTS = ("packing", "compute_dtype")
_NEEDED = ("nbits", "shape", *_COUNTS, *_TRUTHS, *_TEXTS)
_UNUSED = (
    "unpack_view_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "optimize",
    "round_zero",
)  # fmt: skip
_MOST = 64
"""The bytes of the longest: text of a dtype."""
_BITS: Mapping[str, Sequence[float]] = {
    "8bit_u8": (8, 6, 5), "4bit_u8": (4,), "3bit_32": (3,), "2bit_u8": (2, 1.58), "1bit_u8": (1,),
}  # fmt: skip


@dataclass(frozen=True)
class HqqMetadata:
    """What is stated of a weight; `names` are those of the tensors that state it, after the module.

    is_float  whether words are stored as floats
    """

    shape: tuple[int, int]
    dtype: str
    packing: str
    group: int
    axis: int
    is_float: bool
    names: tuple[str, ...]


def metadata_of(
    stems: Sequence[str], stored: Mapping[str, StoredTensor], mounts: Mounts
) -> dict[str, HqqMetadata]:
    """Return the metadata of each module whose weight can be read; `stems` end in a dot.

    Others are left out: those with quantized scales, or one scale of the whole. Raises SourceError CKM115
    where two statements contradict each other, or a value is none.
    """
    complete = [stem for stem in stems if _is_complete(stem, stored)]
    small = [stem + name for stem in complete for name in _NEEDED]
    files = Files(mounts=mounts)
    try:
        parts = StoredParts.of(stored)
        read = read_each_small(parts, parts.table.numbers_of(small), files)
        data = dict(zip(small, read, strict=True))
    finally:
        files.close()
    found = {}
    for stem in complete:
        metadata = _parsed(stem, {name: data[stem + name] for name in _NEEDED}, stored)
        if metadata is not None:
            found[stem] = metadata
    return found


def _is_complete(stem: str, stored: Mapping[str, StoredTensor]) -> bool:
    needed = [stored.get(stem + name) for name in _NEEDED]
    return all(t is not None and 0 < t.info.nbytes <= _MOST for t in needed)


def _parsed(
    stem: str, data: Mapping[str, bytes], stored: Mapping[str, StoredTensor]
) -> HqqMetadata | None:
    fqn = f"{stem}weight"
    for name, kinds in (
        ("nbits", ("int32", "float32")), ("shape", ("int64",)),
        *((name, ("int32",)) for name in _COUNTS), *((name, ("uint8",)) for name in _TRUTHS),
        *((name, ("uint8",)) for name in _TEXTS),
    ):  # fmt: skip
        info = stored[stem + name].info
        if info.dtype not in kinds or (name not in _TEXTS and info.numel != 1 + (name == "shape")):
            raise malformed(fqn, f"{name}, expected {' or '.join(kinds)}, found {info}", DAMAGED)
    view, scale, zero, by_channel = (data[name][0] for name in _TRUTHS)
    if scale or zero or not by_channel or not _has_scales(stem, stored):
        return None
    group, axis = (struct.unpack("<i", data[name])[0] for name in _COUNTS)
    height, width = struct.unpack("<2q", data["shape"])
    packing, compute = (data[name].decode("latin-1") for name in _TEXTS)
    dtype, bits = compute.removeprefix("torch."), _bits(stem, data["nbits"], stored)
    if min(group, height, width) < 1 or axis not in (0, 1) or dtype not in DTYPES:
        said = (
            f"group_size {group}, shape {[height, width]}, axis {axis}, compute_dtype {compute!r}"
        )
        raise malformed(fqn, f"{said[:160]}: expected sizes, 0 or 1, and a floating dtype", DAMAGED)
    if bits not in _BITS.get(packing, ()):
        raise malformed(fqn, f"nbits {bits:g} and packing {packing!r} do not fit", DAMAGED)
    names = tuple(name for name in (*_NEEDED, *_UNUSED) if stem + name in stored)
    return HqqMetadata((height, width), dtype, packing, group, axis, bool(view), names)


def _has_scales(stem: str, stored: Mapping[str, StoredTensor]) -> bool:
    return f"{stem}scale" in stored and f"{stem}zero" in stored


def _bits(stem: str, data: bytes, stored: Mapping[str, StoredTensor]) -> float:
    if stored[f"{stem}nbits"].info.dtype == "int32":
        return float(struct.unpack("<i", data)[0])
    return round(float(struct.unpack("<f", data)[0]), 2)
