"""The schemes of bitsandbytes NF4 and FP4: single quantized and, with `-dq`, double quantized.

They decide which tensors become 4-bit, and how config.json declares them to transformers. Each quantized
tensor records its own block size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.core.weight_columns import Groups
from ckptmap.protocols import Encoding, Refusal
from ckptmap.protocols.encodings import Records
from ckptmap.protocols.file_systems import ReadsFiles
from ckptmap.quantization.bnb.fourbit import BLOCKS, FourBit, Nested
from ckptmap.quantization.bnb.fourbit_reader import find_fourbit
from ckptmap.quantization.linear_weights import (
    CONV1D,
    LinearLayerScheme,
    is_conv1d_weight,
    is_expert,
    is_wide,
)
from ckptmap.tensors import StoredTensor, TensorInfo


class FourBitScheme(ReadsFiles, LinearLayerScheme):
    """A scheme with blocks of 64 and codes in u8; subclasses choose NF4 or FP4, single or double.

    `Conv1D` weights of GPT-2 are held as [in, out], and bitsandbytes quantizes their transpose.
    """

    name: str
    suffix: str
    kind: str
    double: bool
    live = "bitsandbytes 4-bit"

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups of this kind. Raises SourceError CKM115 where parts are missing or do not fit."""
        return find_fourbit(stored, records, self.kind, self.double, self.mounts)

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        encoding = FourBit(self.kind, nested=Nested() if self.double else None)
        parts = encoding.parts(info)
        return parts if isinstance(parts, Refusal) else encoding

    def across(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """Return the encoding for a `Conv1D`: see `planning.weight_encodings.TakesConv1D`."""
        encoding = self.encoding(info)
        if not is_conv1d_weight(fqn, info) or not isinstance(encoding, FourBit):
            return None
        return replace(encoding, transposed=True)

    def takes(self, fqn: str) -> bool:
        """Return whether transformers can load the tensor in 4 bits.

        It cannot load embeddings, experts, modules kept in fp32, and `Conv1D`, whose transpose it expects.
        """
        segments = fqn.lower().split(".")
        if is_expert(fqn) or is_wide(fqn) or any("embed" in segment for segment in segments):
            return False
        return not CONV1D.intersection(segments[-2:-1])

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """Return the encoding with the same blocks if bitsandbytes has that size; `exact`: single quantized."""
        block = grid.block[0] * 2
        if grid.name != self.kind or block not in BLOCKS:
            return None
        encoding = FourBit(self.kind, block, Nested() if self.double and not exact else None)
        return None if encoding.recoder(info, grid, "cpu") is None else encoding

    def exactly(self, encoding: Encoding, info: TensorInfo) -> Encoding:
        assert isinstance(encoding, FourBit), f"{encoding} is not an encoding of {self.name}"
        return replace(encoding, nested=None)

    def quantization_config(
        self, encoded: Mapping[str, TensorInfo], dense: Collection[str]
    ) -> dict[str, object]:
        """Return the config as transformers writes it; block sizes are in each tensor's own JSON."""
        dtypes = {info.dtype for info in encoded.values()}
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.kind,
            "bnb_4bit_use_double_quant": self.double,
            "bnb_4bit_compute_dtype": min(dtypes),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": sorted(dense),
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_threshold": 6.0,
        }


class BnbNF4(FourBitScheme):
    name = suffix = "bnb-nf4"
    kind, double = "nf4", False


class BnbNF4Double(FourBitScheme):
    name = suffix = "bnb-nf4-dq"
    kind, double = "nf4", True


class BnbFP4(FourBitScheme):
    name = suffix = "bnb-fp4"
    kind, double = "fp4", False


class BnbFP4Double(FourBitScheme):
    name = suffix = "bnb-fp4-dq"
    kind, double = "fp4", True
