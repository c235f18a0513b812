"""Layers of SigLIP with packed codes: transformers fails when it loads them.

The initialization of its towers fills `q_proj.weight`, `fc1.weight` and their siblings, and runs although the
file holds the layer, for a layer whose codes are packed has no parameter `weight`. Source: transformers 5.23,
models/siglip/modeling_siglip.py (`_init_weights`). Gemma 3, PaliGemma and ColPali hold such a tower.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ckptmap.errors import PlanError
from ckptmap.protocols import Encoding, Refusal
from ckptmap.tensors import TensorInfo

SIGLIP = frozenset({
    "siglip", "siglip_text_model", "siglip_vision_model",
    "siglip2", "siglip2_text_model", "siglip2_vision_model",
})  # fmt: skip
"""Their `model_type` in config.json, at its root or within."""
_LAYER = re.compile(r"(?P<stem>.+?)\.(?:self_attn\.(?:q|k|v|out)_proj|mlp\.fc[12])\.weight")

Encodings = Mapping[str, tuple[Encoding, TensorInfo]]


def require_initializable(
    encodings: Encodings, settings: object, model_types: Collection[str]
) -> None:
    """Raise PlanError CKM203 where a layer of SigLIP would hold no parameter `weight`.

    `settings` is the output's `quantization_config`: other libraries keep codes in `weight` once loaded.
    """
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    present = sorted(SIGLIP.intersection(model_types))
    if not present or method != "compressed-tensors":
        return
    for fqn, (encoding, info) in encodings.items():
        layer = _LAYER.fullmatch(fqn)
        if layer and _is_siglip(layer["stem"], encodings) and _is_packed(encoding, info):
            above = re.split(r"\.?\b(encoder|head)\b", layer["stem"], maxsplit=1)
            tower = above[0] or above[1]
            raise PlanError(
                "CKM203",
                f"{fqn}: cannot be {encoding.name} beside a config.json with {present[0]}: transformers fills"
                " its weight before it loads it, which fails where the codes are packed",
                f"leave the tower as it is with --no-encode '{tower}.*', or choose --to hf-ct-fp8, which keeps"
                " codes in `weight`",
            )


def _is_siglip(stem: str, names: Collection[str]) -> bool:
    """Return whether the layer has the names of SigLIP's; those of a language model have `o_proj`."""
    return (
        f"{stem}.self_attn.out_proj.weight" in names or f"{stem}.attention.in_proj_weight" in names
    )


def _is_packed(encoding: Encoding, info: TensorInfo) -> bool:
    """Return whether no part of the encoding is stored by the name of the weight itself."""
    parts = encoding.parts(info)
    return not isinstance(parts, Refusal) and "" not in parts
