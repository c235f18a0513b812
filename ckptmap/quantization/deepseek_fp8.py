"""DeepSeek's block-scaled float8 (fine-grained fp8 in transformers): e4m3 codes in tiles of 128 x 128.

    fc.weight [out, in] T  ->  fc.weight           e4m3 [out, in]
                               fc.weight_scale_inv f32 [ceil(out/128), ceil(in/128)]

    w'[i, j] = code[i, j] * scale_inv[i // 128, j // 128]

Despite its name the scale is multiplied (transformers 5, integrations/finegrained_fp8.py). A single scale
covers the whole tensor. DeepSeek-V4 names it `.scale`, Mistral `.qscale_weight`; some store exponents only
(float8_e8m0fnu, or uint8: encoding `fp8-ue8m0`). The file does not record the dtype of the weights: it is that of the dense tensors.
gptqmodel divides by its scales, and states so: `weight_scale_semantics` "inverse" (encoding `fp8-inverse`, read only).
With `activation_scheme: static` a scale of the activations (`fc.activation_scale`) belongs to each weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ckptmap.core.encoding_records import records_of
from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.errors import PlanError
from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.protocols.encodings import Encoded, Record, Records
from ckptmap.protocols.file_systems import Mounts, ReadsFiles
from ckptmap.quantization.blockwise.block_geometry import grid_shape
from ckptmap.quantization.blockwise.exponents import DTYPES as EXPONENTS
from ckptmap.quantization.blockwise.group_checks import (
    DAMAGED,
    group_by_names,
    malformed,
    refuse_kept_modules,
    refuse_unstated,
)
from ckptmap.quantization.blockwise.model_dtype import model_dtype
from ckptmap.quantization.blockwise.read_config import quantization_config
from ckptmap.quantization.blockwise.rounding_rules import (
    FinegrainedExponents,
    FinegrainedFloat8,
    RoundingRule,
)
from ckptmap.quantization.blockwise.scaled_encoding import POWERS, PRODUCTS, ScaledEncoding
from ckptmap.quantization.blockwise.scaled_record import read_record
from ckptmap.quantization.extra_parts import extra_parts
from ckptmap.quantization.fp8_config import (
    BLOCK,
    inverse_config,
    is_inverse,
    require_agreement,
    tile_of,
)
from ckptmap.quantization.linear_weights import LinearLayerScheme, is_linear_module
from ckptmap.quantization.weight_forms import WeightForms, one_of_each_form
from ckptmap.tensors import StoredTensor, TensorInfo

INVERSE = "fp8-inverse"
CODES = "float8_e4m3fn"
_SCALES = ("float32", "bfloat16", "float16", *EXPONENTS)
_ENDINGS = {
    ("_scale_inv", ""): "weight_scale_inv",
    (".qscale_weight", ".weight"): "qscale_weight",
    (".scale", ".weight"): "scale",
}
"""The end of the scale's key, and what stands there in the FQN -> its name: DeepSeek-V3, Mistral, DeepSeek-V4."""
ACTIVATIONS = ("activation_scale", "input_scale", "qscale_act")
"""The names of a static scale of activations: transformers', that of other writers, Mistral's."""


@dataclass(frozen=True)
class Fp8(ScaledEncoding):
    """Block-scaled float8.

    scale_name    the last segment of the scale's key
    scale_stored  the stored shape of the scale where it is not the grid's
    inverse       whether codes are divided by the scales
    """

    scheme: ClassVar[str] = "fp8"
    codes_part: ClassVar[str] = ""
    scale_part: ClassVar[str] = "scale_inv"
    codes_dtype: ClassVar[str] = CODES
    activations: ClassVar[Collection[str]] = ACTIVATIONS

    scale_name: str = "weight_scale_inv"
    scale_stored: tuple[int, ...] | None = None
    inverse: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        if self.inverse:
            return INVERSE
        return "fp8-ue8m0" if self.scale_dtype in EXPONENTS else "fp8"

    @property
    def divides(self) -> bool:  # type: ignore[override]
        return self.inverse

    @property
    def values_name(self) -> str:  # type: ignore[override]
        return POWERS if self.scale_dtype in EXPONENTS else PRODUCTS

    def part_key(self, key: str, part: str) -> str:
        if not part:
            return key
        stem, dot, last = key.rpartition(".")
        if part in ACTIVATIONS:
            return activation_key(key, part)
        if self.scale_name == "weight_scale_inv":
            return f"{stem}{dot}{last}_{part}"
        return f"{stem}{dot}{self.scale_name}"

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return super().scale_shape(info) if self.scale_stored is None else self.scale_stored

    def rule(self, info: TensorInfo) -> RoundingRule:
        if self.scale_dtype in EXPONENTS:
            return FinegrainedExponents(self.scale_dtype)
        return FinegrainedFloat8(self.scale_dtype)

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        if self.inverse:
            return Refusal("codes that are divided by their scales are read, and not made anew")
        return super().cannot_encode(info)

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        """Return the grid of its codes; None where they are divided by their scales."""
        return None if self.inverse else super().grid(info)

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        """Return the recoder, for exponents only where the scales of the grid are powers of two."""
        alike = self.scale_dtype not in EXPONENTS or grid.values == POWERS
        return super().recoder(info, grid, device) if alike else None

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        stored = None if self.scale_stored is None else list(self.scale_stored)
        more: dict[str, object] = {
            "native": "transformers",
            "scale_name": self.scale_name,
            "scale_stored": stored,
        }
        if self.inverse:
            more |= {"native": "gptqmodel", "inverse": True}
        if not self.extra:
            return more
        return more | {"extra": self.extra_record}


def activation_key(fqn: str, name: str) -> str:
    """Return the stored name of a scale of activations, which is beside `weight` or after another name.

    fc.weight -> fc.activation_scale, experts.down_proj -> experts.down_proj_activation_scale
    """
    stem, dot, last = fqn.rpartition(".")
    return f"{stem}{dot}{name}" if last == "weight" else f"{fqn}_{name}"


class Fp8Scheme(ReadsFiles, LinearLayerScheme):
    """Recognizes block-scaled float8, and quantizes the weights of linear layers to it."""

    name = "fp8"
    suffix = "fp8"
    live = "float8"
    declares: Collection[str] = ("fp8", "fp8-ue8m0", INVERSE)
    more_names: Collection[str] = (INVERSE,)
    scale_dtype = "float32"

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups of weights and scales. Raises SourceError CKM115 where scales do not fit."""
        mine = records_of(records, (Fp8.scheme,))
        groups = WeightForms(stored).recorded(mine, _recorded)
        groups += _found(stored, mine, self.mounts)
        config = quantization_config(groups[0][0].parts[""], self.mounts) if groups else {}
        if config.get("quant_method", "fp8") == "fp8":
            refuse_kept_modules(groups, "", ("modules_to_not_convert",), config)
            for group in one_of_each_form(groups):
                require_agreement(group, config)
        return groups

    def target(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """Return the encoding for the weight of a linear layer that whole tiles cover, else None.

        transformers neither writes nor decodes other weights in this format.
        """
        if not is_linear_module(fqn, info) or any(
            n % b for n, b in zip(info.shape, BLOCK, strict=True)
        ):
            return None
        return Fp8(BLOCK, self.scale_dtype)

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        if len(info.shape) != 2:
            return Refusal(f"quantizes tiles of matrices, found shape {list(info.shape)}")
        encoding = Fp8(BLOCK, self.scale_dtype)
        return encoding.refusal(info) or encoding

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """Return the encoding if the codes are in tiles of 128 x 128, else None."""
        return Fp8(BLOCK, self.scale_dtype).keeping(info, grid)

    def quantization_config_of(
        self,
        encoded: Mapping[str, Encoded],
        dense: Collection[str],
        beyond: Mapping[str, object],
    ) -> Mapping[str, object]:
        """Return the config as transformers' `FineGrainedFP8Config` writes it.

        Raises PlanError CKM203 where the weights have scales of several kinds: it can state one.
        """
        kinds = {_declared(encoding, info): fqn for fqn, (encoding, info) in encoded.items()}
        if len(kinds) > 1:
            (first, one), (second, other), *_ = kinds.items()
            raise PlanError(
                "CKM203",
                f"{one} has {first[2]}, {other} has {second[2]}, and one config.json cannot declare both",
                "decode them all with --to hf-bf16, and from that --to hf-fp8; or keep both as they are"
                " where there is no config.json, --to full",
            )
        scheme, tile, _ = next(iter(kinds))
        one_of_them, _ = next(iter(encoded.values()))
        if isinstance(one_of_them, Fp8) and one_of_them.inverse:
            return {"quant_method": "fp8", **inverse_config(one_of_them.scale_stored, tile)}
        return {
            "quant_method": "fp8",
            "activation_scheme": scheme,
            "weight_block_size": None if tile is None else list(tile),
            "modules_to_not_convert": sorted(dense),
            **({"scale_fmt": "ue8m0"} if one_of_them.name == "fp8-ue8m0" else {}),
        }

    def beyond_weights(
        self, config: Mapping[str, object], names: Collection[str]
    ) -> Mapping[str, object]:
        """Return nothing: the config has no settings but those of the weights."""
        return {}


class Fp8ExponentScheme(Fp8Scheme):
    """The same with exponents as scales, as DeepSeek-V4's; `Fp8Scheme`, which is asked first, reads both."""

    name = "fp8-ue8m0"
    suffix = "fp8-ue8m0"
    declares: Collection[str] = ()
    more_names: Collection[str] = ()
    scale_dtype = "float8_e8m0fnu"

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups that are not read yet. Raises as `Fp8Scheme.group`."""
        mine = records_of(records, (Fp8.scheme,))
        return super().group(stored, {fqn: r for fqn, r in mine.items() if fqn in stored})


def _declared(encoding: Encoding, info: TensorInfo) -> tuple[str, tuple[int, ...] | None, str]:
    """Return the activation scheme and the tile that a config states of a weight, and both as text."""
    assert isinstance(encoding, Fp8), f"{encoding} is not an encoding of fp8"
    scheme = "static" if encoding.extra else "dynamic"
    stated = encoding.block[-2:]
    kind = f"{scheme} activations" + (f", as {encoding.name}" if encoding.name != "fp8" else "")
    if encoding.inverse and encoding.scale_stored is not None:
        return (
            scheme,
            None,
            f"scales of shape [{', '.join('n' for _ in encoding.scale_stored)}], {kind}",
        )
    is_whole = encoding.block_of(info)[-2:] == info.shape[-2:]
    if is_whole and (stated != BLOCK or encoding.scale_stored is not None):
        return scheme, None, f"one scale and {kind}"
    return scheme, stated, f"tiles of {list(stated)} and {kind}"


def _recorded(
    fqn: str, record: Record, stored: Mapping[str, StoredTensor]
) -> tuple[Group, Sequence[str]]:
    read = read_record(fqn, record, "fp8")
    shape = record.get("scale_stored")
    inverse = record.get("inverse") is True
    if shape is not None and not (
        isinstance(shape, list) and (inverse or all(n == 1 for n in shape))
    ):
        raise malformed(fqn, f"fp8 record: scale_stored {str(shape)[:40]}", DAMAGED)
    name = read.text("scale_name")
    encoding = Fp8(
        read.block,
        read.scale_dtype,
        extra=read.extra(),
        scale_name=name,
        scale_stored=None if shape is None else tuple(shape),
        inverse=inverse,
    )
    group, keys = group_by_names(fqn, read.info, encoding, stored)
    unstated = {n: activation_key(fqn, n) for n in ACTIVATIONS if n not in group.parts}
    refuse_unstated(fqn, "its encoding record", unstated, stored)
    return group, keys


def _found(stored: Mapping[str, StoredTensor], known: Collection[str], mounts: Mounts) -> Groups:
    """Return the groups of other writers, recognized by a scale's name beside e4m3 codes."""
    parts = StoredParts.of(stored)
    found = _Scaled.of(parts)
    if not found.fqns:
        return Groups([], [])
    scales = found.scales
    if parts.ending(*ACTIVATIONS):
        more = {activation_key(fqn, name) for fqn in found.fqns for name in ACTIVATIONS}
        scales = list({*scales, *parts.table.numbers_of(more)})
    dtype = model_dtype(parts, scales)
    config = quantization_config(parts.table.tensors[parts.table.number(found.fqns[0])], mounts)
    fqns, names = found.without(known)
    return WeightForms(stored).groups(
        fqns, lambda fqn, near: _made(fqn, found.ending(fqn), dtype, config, near), names
    )


def _made(
    fqn: str,
    ending: tuple[str, str],
    dtype: str,
    config: Mapping[str, object],
    stored: Mapping[str, StoredTensor],
) -> Found:
    codes, scale = stored[fqn], stored[fqn.removesuffix(ending[1]) + ending[0]]
    name = _ENDINGS[ending]
    info = TensorInfo(codes.info.shape, dtype)
    block = tile_of(fqn, info, scale.info, config)
    grid = grid_shape(info.shape, block)
    odd = None if scale.info.shape == grid else scale.info.shape
    extra = extra_parts({part: activation_key(fqn, part) for part in ACTIVATIONS}, stored)
    encoding = Fp8(
        block, scale.info.dtype, extra=extra, scale_name=name, scale_stored=odd,
        inverse=is_inverse(config),
    )  # fmt: skip
    return group_by_names(fqn, info, encoding, stored)


class _Scaled(NamedTuple):
    """Weights of e4m3 codes with scales beside them, in the order of the scales.

    scales   the numbers of the scales
    endings  the ends of both, of each weight; one for all where all have the same
    """

    fqns: Sequence[str]
    scales: Sequence[int]
    endings: Mapping[str, tuple[str, str]] | tuple[str, str]

    @classmethod
    def of(cls, parts: StoredParts) -> _Scaled:
        each_end = {}
        for ending in _ENDINGS:
            pairs = parts.pairs(ending[0], ending[1], ending[1], dtypes=_SCALES, fits=_may_scale)
            if pairs.fqns:
                each_end[ending] = pairs
        if len(each_end) < 2:
            return next((cls(p.fqns, p.numbers, e) for e, p in each_end.items()), cls((), (), {}))
        rows = [(*row, e) for e, p in each_end.items() for row in zip(*p, strict=True)]
        last = {fqn: (number, ending) for number, fqn, _, ending in sorted(rows)}
        endings = {fqn: ending for fqn, (_, ending) in last.items()}
        return cls(list(last), [number for number, _ in last.values()], endings)

    def ending(self, fqn: str) -> tuple[str, str]:
        return self.endings if isinstance(self.endings, tuple) else self.endings[fqn]

    def without(self, known: Collection[str]) -> tuple[Sequence[str], list[tuple[str, str]] | None]:
        """Return the weights but those that are known, and the ends of each where they are not the same for all."""
        fqns = [fqn for fqn in self.fqns if fqn not in known] if known else self.fqns
        return fqns, None if isinstance(self.endings, tuple) else list(map(self.ending, fqns))


def _may_scale(scale: TensorInfo, codes: TensorInfo) -> bool:
    return codes.dtype == CODES and codes.shape != ()
