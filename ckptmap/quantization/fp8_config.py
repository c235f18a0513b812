"""What a config.json with quant_method "fp8" states of the scales of its weights.

{"weight_block_size": [128, 128], "activation_scheme": "dynamic"}                transformers
{"weight_scale_method": "row", "weight_scale_semantics": "inverse"}              gptqmodel 7.7
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ckptmap.protocols import Group
from ckptmap.quantization.blockwise.block_geometry import clamped, fits, grid_shape
from ckptmap.quantization.blockwise.group_checks import contradiction, malformed
from ckptmap.quantization.blockwise.scaled_encoding import ScaledEncoding
from ckptmap.tensors import TensorInfo

BLOCK = (128, 128)
_SEMANTICS = "weight_scale_semantics"
_INVERSE_CONFIG: Mapping[str, object] = {"format": "float8_e4m3fn", _SEMANTICS: "inverse"}


def is_inverse(config: Mapping[str, object]) -> bool:
    """Return whether a config states that codes are divided by their scales."""
    return config.get(_SEMANTICS) == "inverse"


def inverse_config(stored: tuple[int, ...] | None, tile: object) -> Mapping[str, object]:
    """Return what gptqmodel's config states of scales of this stored shape; None: in tiles."""
    if stored is None:
        return {**_INVERSE_CONFIG, "weight_scale_method": "block", "weight_block_size": tile}
    method = "row" if math.prod(stored) > 1 else "tensor"
    return {**_INVERSE_CONFIG, "weight_scale_method": method}


def tile_of(
    fqn: str, info: TensorInfo, scale: TensorInfo, config: Mapping[str, object]
) -> tuple[int, ...]:
    """Return the tile: that of config.json, else 128 x 128, else what divides; one scale is of the whole."""
    said = config.get("weight_block_size")
    tries = (
        [tuple(said)]
        if isinstance(said, list) and all(type(n) is int and n > 0 for n in said)
        else []
    )
    tries += [BLOCK, (1, 128)]
    ndim = len(info.shape)
    for block in (b for b in tries if len(b) <= ndim):
        whole = (*(1 for _ in range(ndim - len(block))), *block)
        if scale.shape == grid_shape(info.shape, whole):
            return whole
    if ndim == 2 and is_inverse(config) and scale.shape == info.shape[:1]:
        return 1, info.shape[1]
    if math.prod(scale.shape) == 1 and fits(scale.shape, (1,) * ndim):
        return clamped(info.shape, info.shape)
    same = len(scale.shape) == ndim and 0 not in scale.shape
    if same and not any(n % g for n, g in zip(info.shape, scale.shape, strict=True)):
        return tuple(n // g for n, g in zip(info.shape, scale.shape, strict=True))
    raise malformed(
        fqn, f"scales {scale} of {info} fit no known tiles, expected tiles of 128 x 128",
        "put the config.json with weight_block_size beside the weights",
    )  # fmt: skip


def require_agreement(group: Group, config: Mapping[str, object]) -> None:
    """Raise SourceError CKM115 where config.json states other tiles than the scales have, or none at all."""
    if "weight_block_size" not in config:
        return
    said, shape, scale = config["weight_block_size"], group.info.shape, group.parts["scale_inv"]
    tile = shape[-2:] if said is None else said
    if len(shape) < 2 or not isinstance(tile, list | tuple) or len(tile) != 2:
        return
    if not all(type(n) is int and n > 0 for n in tile):
        return
    grid = grid_shape(shape, (*(1 for _ in shape[2:]), *tile))
    single = scale.info.numel == 1 and (said is None or math.prod(grid) == 1)
    stated = "null" if said is None else str(list(tile))
    if scale.info.shape == grid or single:
        encoding = group.encoding
        assert isinstance(encoding, ScaledEncoding)
        tiles = [clamped(block, shape[-2:]) for block in (tile, encoding.block_of(group.info)[-2:])]
        if tiles[0] == tiles[1]:
            return
        raise contradiction(
            group.fqn, f"config.json states weight_block_size {stated}",
            f"its encoding record states tiles of {list(tiles[1])}", scale,
        )  # fmt: skip
    raise contradiction(
        group.fqn, f"config.json states weight_block_size {stated}, scales of shape {list(grid)}",
        f"the scales of {group.info} are {scale.info}", scale,
    )  # fmt: skip
