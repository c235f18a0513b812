"""Compare what a compressed-tensors config states about a weight with the weight as it is stored.

    "num_bits": 8    and    weight_packed of 2 bits a code    ->  SourceError CKM115

compressed-tensors decodes by the config, and ckptmap by the shapes and dtypes of the stored tensors. The two
give other values where they contradict each other. Source of the fields and their defaults:
`QuantizationArgs` in quantization/quant_args.py of compressed-tensors 0.20.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckptmap.quantization.blockwise.block_geometry import grid_shape
from ckptmap.quantization.blockwise.group_checks import contradiction
from ckptmap.quantization.compressed_tensors.config_json import groups_said
from ckptmap.tensors import StoredTensor, TensorInfo

METHOD = "compressed-tensors"
PACKED_FORMAT = "pack-quantized"
PLAIN_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")


class Stored(NamedTuple):
    """What the stored tensors of one weight show.

    info         logical shape and dtype
    kind         "int" or "float"
    codes, scale, zero_point, column_groups
                 the stored tensors; None: there is none
    """

    info: TensorInfo
    kind: str
    bits: int
    is_packed: bool
    codes: StoredTensor
    scale: StoredTensor
    zero_point: StoredTensor | None = None
    column_groups: StoredTensor | None = None


Pair = tuple[str, str, StoredTensor]
"""(the config's statement, what the stored tensor shows, that tensor)."""


def kept_modules(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the lists of modules that are not quantized, if the config is of this library."""
    return ("ignore",) if config.get("quant_method", METHOD) == METHOD else ()


def require_agreement(fqn: str, stored: Stored, config: Mapping[str, object]) -> None:
    """Raise SourceError CKM115 where every group of the config that may be the weight's contradicts it."""
    if config.get("quant_method", METHOD) != METHOD:
        return
    first: Pair | None = None
    for group in groups_said(config, fqn.rpartition(".")[0]):
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            continue
        form = group.get("format") or config.get("format")
        pair = next(_contradictions(stored, weights, form), None)
        if pair is None:
            return
        first = first or pair
    if first is not None:
        said, shown, tensor = first
        raise contradiction(fqn, f"config.json states {said}", shown, tensor)


def _contradictions(stored: Stored, weights: Mapping[str, object], form: object) -> Iterator[Pair]:
    codes, scale, zero = stored.codes, stored.scale, stored.zero_point
    shape = list(stored.info.shape)
    bits, kind = weights.get("num_bits"), weights.get("type")
    symmetric = weights.get("symmetric", True)  # the default of QuantizationArgs
    if bits is not None and bits != stored.bits:
        yield (
            f"num_bits {bits}",
            f"the codes {codes.info} of {shape} have {stored.bits} bits",
            codes,
        )
    if kind is not None and kind != stored.kind:
        yield f"type {kind!r}", f"the codes {codes.info} are of type {stored.kind!r}", codes
    if stored.is_packed and form in PLAIN_FORMATS:
        yield f"format {form!r}", f"the codes {codes.info} are packed", codes
    if not stored.is_packed and form == PACKED_FORMAT:
        yield f"format {form!r}", f"the codes {codes.info} are not packed", codes
    want = _scale_shape(stored.info.shape, weights)
    if want is not None and not _same_grid(want, scale.info.shape):
        stated = ", ".join(f"{key} {weights[key]!r}" for key in _SIZES if weights.get(key))
        yield stated, f"weight_scale {scale.info} of {shape} is not of shape {list(want)}", scale
    # Old releases store the zero points of symmetric weights, unpacked and all zero.
    if symmetric is True and zero is not None and zero.info.dtype == "int32":
        yield "symmetric true", f"weight_zero_point {zero.info} is stored", zero
    # Old releases leave out a single zero point of 0.
    if symmetric is False and zero is None and scale.info.numel > 1:
        yield "symmetric false", "no weight_zero_point is stored", scale
    order = weights.get("actorder")
    if order in ("weight", "static") and stored.column_groups is not None:
        info = stored.column_groups.info
        yield f"actorder {order!r}", f"weight_g_idx {info} is stored", stored.column_groups


_SIZES = ("strategy", "group_size", "block_structure")


def _scale_shape(shape: tuple[int, ...], weights: Mapping[str, object]) -> tuple[int, ...] | None:
    """Return the shape of the scales that a config states; None: it states none."""
    size, tile, strategy = (
        weights.get(key) for key in ("group_size", "block_structure", "strategy")
    )
    if len(shape) < 2:
        return None
    if strategy is None and type(size) is int:
        strategy = "group" if size > 0 else "channel"
    if strategy == "tensor":
        return (1,)
    if strategy == "channel":
        return (*shape[:-1], 1)
    if strategy in ("group", "tensor_group") and type(size) is int and size > 0:
        return (*shape[:-1], -(-shape[-1] // size))
    good = isinstance(tile, list) and len(tile) == 2 and all(type(n) is int and n > 0 for n in tile)
    if strategy == "block" and isinstance(tile, list) and good:
        return (*shape[:-2], *grid_shape(shape[-2:], tile))
    return None


def _same_grid(want: tuple[int, ...], have: tuple[int, ...]) -> bool:
    """Return whether the scales are stored in the wanted shape; a single scale may have any."""
    return want == have or math.prod(want) == math.prod(have) == 1
