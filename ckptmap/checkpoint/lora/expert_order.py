"""Tell how peft took the matrices of a stack of experts, where they are square and no shape tells.

    peft release     a stack [e, a, b] is
    0.17, 0.18       [e, in, out], whatever the model
    0.19.0           [e, out, in] where the module says `is_transposed`, else [e, in, out]
    0.19.1 and later [e, in, out] where the module says `is_transposed`, else [e, out, in]

Source: peft's ParamWrapper (`get_delta_weight`, `update_layer`) in each of these releases. `is_transposed` is an attribute
of the module, which transformers sets for few families and since a release that no file states: for those nothing tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptmap.checkpoint.lora.adapter_config import LoraConfig
from ckptmap.mapping.detect import model_types
from ckptmap.mapping.memory_names import SPLIT_ON_DISK

_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
NOT_TRANSPOSED = SPLIT_ON_DISK | {"llama4", "llama4_text"}
"""Model types whose experts no release of transformers calls transposed; Llama 4 has none of the attribute, though it
stores [e, in, out]."""


def stored_in_out(config: LoraConfig, model: Mapping[str, object] | None) -> bool | None:
    """Return whether peft took stacks of experts as [e, in, out]; None: the files do not tell.

    model  the base's config.json
    """
    release = _RELEASE.fullmatch(config.peft_version)
    if release is None:  # before 0.18, of another program, or between two releases
        return None
    version = tuple(map(int, release.groups()))
    if version < (0, 19, 0):
        return True
    if not NOT_TRANSPOSED.intersection(model_types(model)):
        return None
    return version == (0, 19, 0)


def order_notes(config: LoraConfig, in_out: bool | None) -> list[str]:
    """Return a note where square matrices were taken by the release of peft; None: shapes told."""
    if in_out is None:
        return []
    order = "[e, in, out]" if in_out else "[e, out, in]"
    return [f"square matrices of experts are taken as {order}, as peft {config.peft_version} does"]
