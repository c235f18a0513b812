"""Experts beside compressed-tensors' codes: transformers stacks them, and decodes them while it does.

It decodes all experts as one group of the config says, so that dense ones are not found beside packed codes,
and of two forms it takes the codes and passes over a scale. Source: transformers 5.23,
integrations/compressed_tensors.py (`CompressedTensorsDequantize.convert`). Programs that read experts one by
one, such as vLLM, do not need this.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptmap.errors import PlanError
from ckptmap.protocols import Encoding
from ckptmap.quantization.linear_weights import is_expert
from ckptmap.tensors import TensorInfo

MISREAD = {
    "ct-nvfp4": "without the scale of the tensor",
    "ct-mxfp8": "with exponents in place of scales",
}
"""Forms whose stacked experts transformers decodes to other values, and how."""
_PACKED = "pack-quantized"

Encodings = Mapping[str, tuple[Encoding, TensorInfo]]


def require_experts_found(encodings: Encodings, settings: object) -> None:
    """Raise PlanError CKM203 where the config says packed codes, and experts are dense."""
    form = str(settings.get("format")) if isinstance(settings, Mapping) else ""
    if not form.endswith(_PACKED):
        return
    for fqn, (encoding, info) in encodings.items():
        if encoding.name == "dense" and len(info.shape) == 2 and is_expert(fqn):
            raise PlanError(
                "CKM203",
                f"{fqn}: cannot stay dense beside {form}: transformers stacks the experts of a layer, and"
                " finds only those that are packed, too",
                "choose --to hf-ct-int8, hf-ct-mxfp4 or hf-ct-fp8; or, for programs that read experts one by"
                " one, name all weights to encode: --encode '*_proj.weight' --encode '*.experts.*.weight'",
            )


def misread_experts(encodings: Encodings) -> list[str]:
    """Return a note for each form whose experts transformers decodes to other values."""
    first: dict[str, str] = {}
    for fqn, (encoding, _) in encodings.items():
        if encoding.name in MISREAD and is_expert(fqn):
            first.setdefault(encoding.name, fqn)
    return [
        f"{fqn} and other experts: transformers 5.23 stacks them, and decodes {name} {MISREAD[name]}, to other"
        " values; for programs that read experts one by one"
        for name, fqn in sorted(first.items())
    ]
