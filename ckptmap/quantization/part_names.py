"""How libraries name the parts of quantized weights; see the modules of the encodings for their sources.

`stray_parts` finds by it what is left of weights that are not whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

from ckptmap.quantization.nf4.parts import PARTS as NF4_PARTS


@dataclass(frozen=True)
class PartNames:
    """How a library names the parts of one quantized weight; every name is the end of a key, after the stem.

    methods      `quant_method` of the configs that state the form
    parts        scales and settings of the weight
    codes        names that its codes may have -> names of which one must stand beside them, as their scale
    dtypes       dtypes that codes have under a name that a dense weight has, too
    activations  parts that concern the layer's activations
    certain      sets of parts that together no other form has
    lacks        what is missing where parts of it are left, for a form without `codes`
    schemes      `scheme` of the encoding records that state the form
    """

    methods: tuple[str, ...]
    parts: tuple[str, ...]
    codes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dtypes: frozenset[str] = frozenset()
    activations: tuple[str, ...] = ()
    certain: tuple[frozenset[str], ...] = ()
    lacks: str = ""
    schemes: frozenset[str] = frozenset()


STATE = ".quant_state.bitsandbytes__"
FP8 = frozenset({"float8_e4m3fn"})
_ACTIVATIONS = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale",
    ".output_zero_point",
)  # fmt: skip
_STATIC = ("_activation_scale", ".activation_scale", ".input_scale", ".qscale_act")
_NF4 = tuple(f".{part}" for part in NF4_PARTS)
_HQQ = (
    ".nbits", ".group_size", ".axis", ".shape", ".packing", ".compute_dtype", ".view_as_float",
    ".unpack_view_dtype", ".quant_scale", ".quant_zero", ".channel_wise",
)  # fmt: skip
FORMS = (
    PartNames(
        ("compressed-tensors",),
        (".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx",
         ".weight_global_scale", *_ACTIVATIONS),
        {".weight_packed": (".weight_scale",), ".weight": (".weight_scale",),
         ".weight.compressed": (), ".compressed": ()},
        FP8 | {"int8"}, _ACTIVATIONS, (frozenset({".weight_scale", ".weight_shape"}),),
        schemes=frozenset({"ct-packed", "ct-int8-plain", "ct-fp8"}),
    ),
    PartNames(
        ("fp8",), ("_scale_inv", ".qscale_weight", *_STATIC),
        {".weight": (".weight_scale_inv", ".qscale_weight", ".scale", ".weight_scale"),
         "": ("_scale_inv",)},
        FP8, _STATIC, schemes=frozenset({"fp8"}),
    ),
    PartNames(
        ("bitsandbytes",), (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE),
        certain=(frozenset({".absmax", ".quant_map"}), frozenset({STATE})),
        lacks="no quant_state.bitsandbytes__nf4 or __fp4 that describes them",
    ),
    PartNames(
        ("bitsandbytes",), (".SCB", ".weight_format"), {".weight": (".SCB",)}, frozenset({"int8"}),
        schemes=frozenset({"bnb-int8"}),
    ),
    PartNames(
        ("gptq", "awq"), (".qzeros", ".scales", ".g_idx"), {".qweight": (".scales",)},
        certain=(frozenset({".qzeros", ".scales"}),),
    ),
    PartNames(("mxfp4",), ("_scales",), {"_blocks": ("_scales",)}),
    PartNames(
        ("quanto",), (".weight._scale", ".weight._shift"),
        {".weight._data": (".weight._scale",), ".weight._data._data": (".weight._scale",)},
        certain=(frozenset({".weight._scale"}), frozenset({".weight._shift"})),
    ),
    PartNames(
        ("hqq",), (".scale", ".zero", *_HQQ), {".W_q": (".scale",)},
        certain=(frozenset({".nbits", ".packing"}), frozenset({".group_size", ".view_as_float"})),
    ),
    PartNames(
        (), _NF4, certain=tuple(map(frozenset, combinations(_NF4, 2))),
        lacks="not all five parts of NF4 and their record", schemes=frozenset({"nf4"}),
    ),
)  # fmt: skip
