"""The decoder of each type of block: blocks u8 [n, bytes of a block] -> out f32 [n, values of a block]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from ckptmap.formats.gguf.block_types import BY_NAME
from ckptmap.quantization.blockwise.chunks import chunk_numel
from ckptmap.quantization.gguf import iq_quants, k_quants, small_blocks

if TYPE_CHECKING:
    import torch

Decoder: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], None]"

CHUNK_NUMEL = 512 * 1024
"""Elements at a time on a CPU: what they need stays in its cache."""
DECODERS: Mapping[str, Decoder] = {
    "Q4_0": small_blocks.q4_0,
    "Q4_1": small_blocks.q4_1,
    "Q5_0": small_blocks.q5_0,
    "Q5_1": small_blocks.q5_1,
    "Q8_0": small_blocks.q8_0,
    "IQ4_NL": small_blocks.iq4_nl,
    "MXFP4": small_blocks.mxfp4,
    "NVFP4": small_blocks.nvfp4,
    "Q2_K": k_quants.q2_k,
    "Q3_K": k_quants.q3_k,
    "Q4_K": k_quants.q4_k,
    "Q5_K": k_quants.q5_k,
    "Q6_K": k_quants.q6_k,
    "TQ1_0": k_quants.tq1_0,
    "TQ2_0": k_quants.tq2_0,
    "IQ2_XXS": iq_quants.iq2_xxs,
    "IQ2_XS": iq_quants.iq2_xs,
    "IQ2_S": iq_quants.iq2_s,
    "IQ3_XXS": iq_quants.iq3_xxs,
    "IQ3_S": iq_quants.iq3_s,
    "IQ1_S": iq_quants.iq1_s,
    "IQ1_M": iq_quants.iq1_m,
    "IQ4_XS": iq_quants.iq4_xs,
}


def decode(name: str, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Fill out f32 [n, values of a block], contiguous, from blocks u8 [n, bytes of a block] of a type.

    Besides them, it holds a few times CHUNK_NUMEL values.
    """
    decoder = DECODERS[name]
    step = max(1, chunk_numel(out.device, CHUNK_NUMEL) // BY_NAME[name].numel)
    for first in range(0, blocks.shape[0], step):
        decoder(blocks[first : first + step], out[first : first + step])
