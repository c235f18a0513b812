"""DeepSeek's block-scaled float8 (fine-grained fp8 in transformers): e4m3 codes in tiles of 128 x 128.

    fc.weight [out, in] T  ->  fc.weight           e4m3 [out, in]
                               fc.weight_scale_inv f32 [ceil(out/128), ceil(in/128)]

    w'[i, j] = code[i, j] * scale_inv[i // 128, j // 128]

Despite its name the scale is multiplied (transformers 5, integrations/finegrained_fp8.py). A single scale
covers the whole tensor. DeepSeek-V4 names it `.scale`, Mistral `.qscale_weight`; some store exponents only
(float8_e8m0fnu). The file does not record the dtype of the weights: it is that of the dense tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.protocols.file_systems import Mounts, ReadsFiles
from ckptmap.quantization.blockwise.block_geometry import fits, grid_shape
from ckptmap.quantization.blockwise.group_checks import DAMAGED, check_parts, malformed
from ckptmap.quantization.blockwise.model_dtype import model_dtype
from ckptmap.quantization.blockwise.read_config import quantization_config
from ckptmap.quantization.blockwise.rounding_rules import FinegrainedFloat8, RoundingRule
from ckptmap.quantization.blockwise.scaled_encoding import ScaledEncoding
from ckptmap.quantization.blockwise.scaled_record import read_record
from ckptmap.quantization.linear_weights import LinearLayerScheme, is_linear_module
from ckptmap.tensors import StoredTensor, TensorInfo

BLOCK = (128, 128)
CODES = "float8_e4m3fn"
_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
_NAMES = ("weight_scale_inv", "qscale_weight", "scale")
"""The last segment of the scale's name in place of `weight`: DeepSeek-V3, Mistral, DeepSeek-V4."""
_ENDINGS = ("_scale_inv", ".qscale_weight", ".scale")


@dataclass(frozen=True)
class Fp8(ScaledEncoding):
    """Block-scaled float8.

    scale_name    the last segment of the scale's key
    scale_stored  the stored shape of the scale where it is not the grid's
    """

    name: ClassVar[str] = "fp8"
    scheme: ClassVar[str] = "fp8"
    codes_part: ClassVar[str] = ""
    scale_part: ClassVar[str] = "scale_inv"
    codes_dtype: ClassVar[str] = CODES

    scale_name: str = "weight_scale_inv"
    scale_stored: tuple[int, ...] | None = None

    def part_key(self, key: str, part: str) -> str:
        if not part:
            return key
        stem, dot, last = key.rpartition(".")
        if self.scale_name == "weight_scale_inv":
            return f"{stem}{dot}{last}_{part}"
        return f"{stem}{dot}{self.scale_name}"

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return super().scale_shape(info) if self.scale_stored is None else self.scale_stored

    def rule(self, info: TensorInfo) -> RoundingRule:
        return FinegrainedFloat8()

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        stored = None if self.scale_stored is None else list(self.scale_stored)
        return {"native": "transformers", "scale_name": self.scale_name, "scale_stored": stored}


class Fp8Scheme(ReadsFiles, LinearLayerScheme):
    """Recognizes block-scaled float8, and quantizes the weights of linear layers to it."""

    name = "fp8"
    suffix = "fp8"
    live = "float8"

    def group(
        self, stored: Mapping[str, StoredTensor], records: Mapping[str, Mapping[str, object]]
    ) -> list[tuple[Group, Sequence[str]]]:
        """Return the groups of weights and scales. Raises SourceError CKM115 where scales do not fit."""
        mine = {fqn: r for fqn, r in records.items() if r.get("scheme") == self.name}
        groups = [_recorded(fqn, record, stored) for fqn, record in mine.items()]
        return [*groups, *_found(stored, mine, self.mounts)]

    def target(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """Return the encoding for the weight of a linear layer that whole tiles cover, else None.

        transformers neither writes nor decodes other weights in this format.
        """
        if not is_linear_module(fqn, info) or any(
            n % b for n, b in zip(info.shape, BLOCK, strict=True)
        ):
            return None
        return Fp8(BLOCK)

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        if len(info.shape) != 2:
            return Refusal(f"quantizes tiles of matrices, found shape {list(info.shape)}")
        encoding = Fp8(BLOCK)
        return encoding.refusal(info) or encoding

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """Return the encoding if the codes are in tiles of 128 x 128, else None."""
        return Fp8(BLOCK).keeping(info, grid)

    def quantization_config(
        self, encoded: Mapping[str, TensorInfo], dense: Collection[str]
    ) -> Mapping[str, object]:
        """Return the config as transformers' `FineGrainedFP8Config` writes it."""
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            "modules_to_not_convert": sorted(dense),
        }


def _recorded(
    fqn: str, record: Mapping[str, object], stored: Mapping[str, StoredTensor]
) -> tuple[Group, Sequence[str]]:
    read = read_record(fqn, record, "fp8")
    shape = record.get("scale_stored")
    if shape is not None and not (isinstance(shape, list) and all(n == 1 for n in shape)):
        raise malformed(fqn, f"fp8 record: scale_stored {str(shape)[:40]}", DAMAGED)
    name = read.text("scale_name")
    encoding = Fp8(
        read.block,
        read.scale_dtype,
        scale_name=name,
        scale_stored=None if shape is None else tuple(shape),
    )
    return _group(fqn, read.info, encoding, stored)


def _found(
    stored: Mapping[str, StoredTensor], known: Collection[str], mounts: Mounts
) -> Iterator[tuple[Group, Sequence[str]]]:
    """Yield the groups of other writers, recognized by a scale's name beside e4m3 codes."""
    pairs = dict(_pairs(stored))
    if not pairs.keys() - set(known):
        return
    dtype = model_dtype(stored, {key for key, _ in pairs.values()})
    config = quantization_config(stored[next(iter(pairs))], mounts)
    for fqn, (key, name) in pairs.items():
        if fqn in known:
            continue
        codes, scale = stored[fqn], stored[key]
        info = TensorInfo(codes.info.shape, dtype)
        block = _block(fqn, info, scale.info, config)
        grid = grid_shape(info.shape, block)
        odd = None if scale.info.shape == grid else scale.info.shape
        encoding = Fp8(block, scale.info.dtype, scale_name=name, scale_stored=odd)
        yield _group(fqn, info, encoding, stored)


def _pairs(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (FQN of e4m3 codes, (key of their scale, its name)).

    Keys are tested first: most checkpoints have no scales, and there may be 100,000 keys.
    """
    for key in stored:
        if not key.endswith(_ENDINGS):
            continue
        name = next(
            name for name, ending in zip(_NAMES, _ENDINGS, strict=True) if key.endswith(ending)
        )
        fqn = (
            key.removesuffix("_scale_inv")
            if name == _NAMES[0]
            else f"{key.rpartition('.')[0]}.weight"
        )
        codes = stored.get(fqn)
        good = codes is not None and codes.info.dtype == CODES and codes.info.shape != ()
        if good and stored[key].info.dtype in _SCALES:
            yield fqn, (key, name)


def _block(
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
    if math.prod(scale.shape) == 1 and fits(scale.shape, (1,) * ndim):
        return info.shape
    same = len(scale.shape) == ndim and 0 not in scale.shape
    if same and not any(n % g for n, g in zip(info.shape, scale.shape, strict=True)):
        return tuple(n // g for n, g in zip(info.shape, scale.shape, strict=True))
    raise malformed(
        fqn, f"scales {scale} of {info} fit no known tiles, expected tiles of 128 x 128",
        "put the config.json with weight_block_size beside the weights",
    )  # fmt: skip


def _group(
    fqn: str, info: TensorInfo, encoding: Fp8, stored: Mapping[str, StoredTensor]
) -> tuple[Group, Sequence[str]]:
    expected = encoding.parts(info)
    if isinstance(expected, Refusal):
        raise malformed(fqn, f"fp8: {expected.reason}", DAMAGED)
    keys = {part: encoding.part_key(fqn, part) for part in expected}
    tensors = {part: stored.get(key) for part, key in keys.items()}
    return Group(fqn, info, encoding, check_parts(fqn, "fp8", expected, tensors)), tuple(
        keys.values()
    )
