"""The dtypes in which llama.cpp wants tensors, by their names.

    blk.0.attn_norm.weight     norms, biases and all of one dim: fp32
    blk.0.ffn_gate_inp.weight  what chooses experts: fp32
    blk.0.attn_q.weight        any type

Source: llama.cpp, convert_hf_to_gguf.py (`ModelBase.prepare_tensors`). Tensors of other names are of a model that
llama.cpp does not run, and keep their dtype.
"""

from __future__ import annotations

import re

from ckptmap.formats.gguf.block_types import BY_NAME
from ckptmap.tensors import FLOATING, TensorInfo

NAMES = re.compile(r"(blk\.\d+\.|token_embd|output|rope_f)[\w.]*")
"""Names of llama.cpp's."""
ALWAYS_FP32 = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
DTYPES = {each.dtype: each for each in BY_NAME.values() if each.dtype}
"""dtype -> the type in which it is stored as it is."""
BLOCKS = "gguf-"


class GgufDemands:
    """Says which tensors of a GGUF file are fp32, and which dtypes and encodings it has a type for."""

    def dtype(self, name: str, info: TensorInfo) -> str | None:
        if not NAMES.fullmatch(name) or info.dtype not in FLOATING:
            return None
        small = len(info.shape) < 2 or not name.endswith(".weight") or name.endswith(ALWAYS_FP32)
        return "float32" if small else None

    def refusal(self, encoding: str, dtype: str) -> str | None:
        if encoding != "dense":
            known = encoding == BLOCKS.rstrip("-") or encoding.startswith(BLOCKS)
            return None if known else f"a GGUF file holds blocks of ggml's, and none of {encoding}"
        return None if dtype in DTYPES else f"GGUF has no type of tensor for {dtype}"
