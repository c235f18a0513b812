"""Quantized tensors of schemes that this release carries as bytes only, recognised by their keys.

Their payload and their scales may move as they are; a cast or another encoding would destroy them
without a word, so a plan that asks for one refuses them by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    """A scheme by the key that gives it away; `members` are all keys of one tensor, from its stem."""

    name: str
    mark: re.Pattern[str]
    members: tuple[str, ...]


def _scheme(name: str, mark: str, *members: str) -> Foreign:
    return Foreign(name, re.compile(rf"(?P<stem>.*){mark}"), members)


# Keys as written by each library; the stem is what stands before the mark.
SCHEMES = (
    _scheme("bitsandbytes 4-bit", r"\.quant_state\.bitsandbytes__(nf4|fp4)", "", ".absmax",
            ".quant_map", ".nested_absmax", ".nested_quant_map",
            ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
    _scheme("bitsandbytes int8", r"\.SCB", ".weight", ".SCB", ".weight_format"),
    _scheme("GPTQ or AWQ", r"\.qweight", ".qweight", ".qzeros", ".scales", ".g_idx"),
    _scheme("compressed-tensors", r"\.weight_packed", ".weight_packed", ".weight_scale",
            ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    _scheme("scaled int8 or fp8", r"\.weight_scale", ".weight", ".weight_scale",
            ".weight_zero_point", ".input_scale"),
    _scheme("block-scaled fp8", r"_scale_inv", "", "_scale_inv"),
    _scheme("MXFP4", r"_blocks", "_blocks", "_scales"),
    _scheme("torchao safetensors", r"\._weight_qdata", "._weight_qdata", "._weight_scale",
            "._weight_zero_point"),
)  # fmt: skip


def foreign_tensors(keys: Collection[str]) -> dict[str, str]:
    """Key -> name of the scheme that it is a part of."""
    known = set(keys)
    found: dict[str, str] = {}
    for key in keys:
        for scheme in SCHEMES:
            match = scheme.mark.fullmatch(key)
            if match:
                stem = match["stem"]
                members = [stem + member for member in scheme.members if stem + member in known]
                if len(members) > 1:
                    found.update({member: scheme.name for member in members})
    return found
