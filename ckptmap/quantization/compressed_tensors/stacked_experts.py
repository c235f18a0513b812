"""Experts in compressed-tensors' forms: transformers decodes them itself, while it stacks those of a layer.

It decodes all experts by one group of the config, the first whose targets are a pattern with "experts"; it
multiplies float8 codes with their scales as they are, and of packed weights it takes the codes, the scales and
the shape alone. Source: transformers 5.23, integrations/compressed_tensors.py (`get_experts_scheme`,
`CompressedTensorsDequantize.convert`). Programs that read experts one by one, such as vLLM, do not need this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptmap.protocols import Encoding
from ckptmap.quantization.blockwise.block_geometry import grid_shape
from ckptmap.quantization.blockwise.scaled_encoding import ScaledEncoding
from ckptmap.quantization.linear_weights import is_expert
from ckptmap.tensors import TensorInfo

_MISREAD = {
    "ct-nvfp4": "without the scale of the tensor",
    "ct-mxfp8": "with exponents in place of scales",
}
"""Forms whose stacked experts transformers decodes to other values, and how."""


def misread(fqn: str, encoding: Encoding, info: TensorInfo) -> str:
    """Return how transformers misreads an expert in this encoding; "" where it does not, or it is none."""
    if not is_expert(fqn):
        return ""
    if encoding.name in _MISREAD:
        return _MISREAD[encoding.name]
    if not isinstance(encoding, ScaledEncoding):
        return ""
    if encoding.zero_dtype or getattr(encoding, "ordered", False):
        return "without zero points and the order of columns"
    scales = zip(grid_shape(info.shape, encoding.block_of(info)), info.shape, strict=True)
    if encoding.codes_part == "" and any(count not in (1, extent) for count, extent in scales):
        return "as if a scale of tiles or groups were one of rows"
    return ""


def experts_target(modules: Sequence[str]) -> str:
    """Return a pattern for the `modules` of experts, by which transformers finds their group; "" for others.

    `["l.0.experts.1.up", "l.0.experts.2.up"] -> r"re:.*\\.experts\\.(\\d+\\.up)$"`
    """
    ends = {module.rpartition(".experts.")[2] for module in modules if ".experts." in module}
    if not ends or not all(".experts." in module for module in modules):
        return ""
    shown = sorted({re.sub(r"[0-9]+", r"\\d+", re.escape(end)) for end in ends})
    return rf"re:.*\.experts\.({'|'.join(shown)})$"
