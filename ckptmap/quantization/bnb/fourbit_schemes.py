"""bitsandbytes' NF4 and FP4 as schemes: single quantized and, with `-dq`, double quantized.

Which tensors they take, and how config.json declares them to transformers. Each quantized tensor
states its own block size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.quantization.bnb.fourbit import BLOCKS, FourBit, Nested
from ckptmap.quantization.bnb.fourbit_reader import find_fourbit
from ckptmap.quantization.linear_weights import CONV1D, is_expert, is_single_module, is_wide
from ckptmap.tensors import Cut, Opaque, StoredTensor, TensorInfo


class FourBitScheme:
    """Single or double quantized, blocks of 64, the payload in u8."""

    name: str
    suffix: str
    kind: str
    double: bool
    live = "bitsandbytes 4-bit"

    def group(
        self, stored: Mapping[str, StoredTensor], records: Mapping[str, Mapping[str, object]]
    ) -> list[tuple[Group, Sequence[str]]]:
        """Raises SourceError CKM115 where companions of a payload are missing or misshapen."""
        return list(find_fourbit(stored, records, self.kind, self.double))

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        return None

    def target(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """Weights of linear layers; not those that GPT-2 kin hold as [in, out], whose transpose
        bitsandbytes would quantize."""
        if not is_single_module(fqn, info):
            return None
        encoding = self.encoding(info)
        return None if isinstance(encoding, Refusal) else encoding

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        encoding = FourBit(self.kind, nested=Nested() if self.double else None)
        parts = encoding.parts(info)
        return parts if isinstance(parts, Refusal) else encoding

    def takes(self, fqn: str) -> bool:
        """No embedding, no expert, none held in fp32, and no `Conv1D`: transformers would look for
        its transpose."""
        segments = fqn.lower().split(".")
        if is_expert(fqn) or is_wide(fqn) or any("embed" in segment for segment in segments):
            return False
        return not CONV1D.intersection(segments[-2:-1])

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """The same blocks, where bitsandbytes has them; `exact`: single quantized."""
        block = grid.block[0] * 2
        if grid.name != self.kind or block not in BLOCKS:
            return None
        encoding = FourBit(self.kind, block, Nested() if self.double and not exact else None)
        return None if encoding.recoder(info, grid, "cpu") is None else encoding

    def exactly(self, encoding: Encoding, info: TensorInfo) -> Encoding:
        assert isinstance(encoding, FourBit), f"{encoding} is no encoding of {self.name}"
        return replace(encoding, nested=None)

    def quantization_config(
        self, encoded: Mapping[str, TensorInfo], dense: Collection[str]
    ) -> dict[str, object]:
        """As transformers writes it; the block size is in each tensor's own JSON."""
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
