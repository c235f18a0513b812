"""The types of tensors in GGUF files: how many values a block holds, in how many bytes.

Source: ggml, include/ggml.h (`ggml_type`), src/ggml-common.h (the blocks), and docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockType:
    """One type.

    numel   values of a block, which runs along a row
    nbytes  bytes of a block
    dtype   the dtype of the values, where a block is one of them as it is; empty: a block is codes and scales
    decoded whether the values of a block can be computed here
    """

    number: int
    name: str
    numel: int
    nbytes: int
    dtype: str = ""
    decoded: bool = True


_TYPES = (
    BlockType(0, "F32", 1, 4, "float32"),
    BlockType(1, "F16", 1, 2, "float16"),
    BlockType(2, "Q4_0", 32, 18),
    BlockType(3, "Q4_1", 32, 20),
    BlockType(6, "Q5_0", 32, 22),
    BlockType(7, "Q5_1", 32, 24),
    BlockType(8, "Q8_0", 32, 34),
    BlockType(9, "Q8_1", 32, 40, decoded=False),
    BlockType(10, "Q2_K", 256, 84),
    BlockType(11, "Q3_K", 256, 110),
    BlockType(12, "Q4_K", 256, 144),
    BlockType(13, "Q5_K", 256, 176),
    BlockType(14, "Q6_K", 256, 210),
    BlockType(15, "Q8_K", 256, 292, decoded=False),
    BlockType(16, "IQ2_XXS", 256, 66),
    BlockType(17, "IQ2_XS", 256, 74),
    BlockType(18, "IQ3_XXS", 256, 98),
    BlockType(19, "IQ1_S", 256, 50),
    BlockType(20, "IQ4_NL", 32, 18),
    BlockType(21, "IQ3_S", 256, 110),
    BlockType(22, "IQ2_S", 256, 82),
    BlockType(23, "IQ4_XS", 256, 136),
    BlockType(24, "I8", 1, 1, "int8"),
    BlockType(25, "I16", 1, 2, "int16"),
    BlockType(26, "I32", 1, 4, "int32"),
    BlockType(27, "I64", 1, 8, "int64"),
    BlockType(28, "F64", 1, 8, "float64"),
    BlockType(29, "IQ1_M", 256, 56),
    BlockType(30, "BF16", 1, 2, "bfloat16"),
    BlockType(34, "TQ1_0", 256, 54),
    BlockType(35, "TQ2_0", 256, 66),
    BlockType(39, "MXFP4", 32, 17),
    BlockType(40, "NVFP4", 64, 36),
    BlockType(41, "Q1_0", 128, 18, decoded=False),
)
BY_NUMBER: Mapping[int, BlockType] = {each.number: each for each in _TYPES}
BY_NAME: Mapping[str, BlockType] = {each.name: each for each in _TYPES}
REMOVED: Mapping[int, str] = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
"""Numbers of types that ggml had once."""
