"""gpt-oss' MXFP4: the stacked experts of a layer, stored transposed, in blocks of 32.

    experts.gate_up_proj [e, in, out] T  ->  experts.gate_up_proj_blocks u8 [e, out, in / 32, 16]
                                             experts.gate_up_proj_scales u8 [e, out, in / 32]

    w'[e, i, o] = T(code[e, o, i] * 2 ** (scale[e, o, i // 32] - 127))

The names, the layout and the values are those of transformers 5 (integrations/mxfp4.py,
`convert_moe_packed_tensors`), which transposes after decoding. What is encoded has the codes of
triton_kernels' `downcast_to_mxfp_torch` (numerics_details/mxfp.py), which transformers calls. The file does
not record the dtype of the weights: it is that of the dense tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ckptmap.core.encoding_records import records_of
from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.protocols import Encoding, Refusal
from ckptmap.protocols.encodings import Records
from ckptmap.quantization.blockwise.group_checks import (
    CONTRADICTORY,
    file_of,
    group_by_names,
    malformed,
)
from ckptmap.quantization.blockwise.model_dtype import model_dtype
from ckptmap.quantization.blockwise.scaled_record import read_record
from ckptmap.quantization.linear_weights import LinearLayerScheme
from ckptmap.quantization.microscaling.packed_fp4 import PackedFp4
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.tensors import StoredTensor, TensorInfo

_ENDINGS = {"packed": "_blocks", "scale": "_scales"}
STACKED = ("gate_up_proj", "down_proj")
KEPT = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
"""The modules that gpt-oss' own config.json names as not quantized."""


@dataclass(frozen=True)
class GptOssFp4(PackedFp4):
    """The encoding of one stack of experts, or of one matrix that is stored like one of them."""

    name: ClassVar[str] = "mxfp4"
    scheme: ClassVar[str] = "mxfp4"
    native: ClassVar[str] = "transformers"
    transposed: ClassVar[bool] = True
    blocked: ClassVar[bool] = True

    def part_key(self, key: str, part: str) -> str:
        return f"{key}{_ENDINGS[part]}"


class GptOssMxfp4(LinearLayerScheme):
    """Recognizes gpt-oss' experts, and quantizes stacked experts to them."""

    name = "mxfp4"
    suffix = "mxfp4"
    live = "microscaled"
    model_types = ("gpt_oss",)

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups of blocks and scales. Raises SourceError CKM115 where they do not fit."""
        mine = records_of(records, (self.name,))
        found = [fqn for fqn in _stacks(stored) if fqn not in mine]
        if not mine and not found:
            return Groups([], [])
        forms = WeightForms(stored)
        groups = forms.recorded(
            mine,
            lambda fqn, record, near: group_by_names(
                fqn, read_record(fqn, record, self.name).info, GptOssFp4(), near
            ),
        )
        dtype = model_dtype(StoredParts.of(stored), ()) if found else ""
        return groups + forms.groups(found, lambda fqn, near: _found(fqn, dtype, near))

    def takes_layer(self, fqn: str, info: TensorInfo) -> bool:
        """Return whether the tensor is a stack of experts, as gpt-oss names them."""
        path = fqn.split(".")
        return len(info.shape) == 3 and path[-2:-1] == ["experts"] and path[-1] in STACKED

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        encoding = GptOssFp4()
        return encoding.refusal(info) or encoding

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """Return the encoding if the codes are in blocks of 32 along its rows, else None."""
        return GptOssFp4().keeping(info, grid)

    def quantization_config(
        self, encoded: Mapping[str, TensorInfo], dense: Collection[str]
    ) -> Mapping[str, object]:
        """Return the config as gpt-oss' own: patterns of the modules that are never quantized."""
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(KEPT)}


def _stacks(stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield the FQNs of blocks of bytes that have scales beside them."""
    parts = StoredParts.of(stored)
    for key in parts.ending("_blocks", dtypes=("uint8",)):
        fqn = key.removesuffix("_blocks")
        scales = parts.info(f"{fqn}_scales")
        if fqn and scales is not None and scales.dtype == "uint8":
            yield fqn


def _found(fqn: str, dtype: str, stored: Mapping[str, StoredTensor]) -> Found:
    blocks = stored[f"{fqn}_blocks"]
    shape = blocks.info.shape
    half = GptOssFp4.block // 2
    if len(shape) < 3 or shape[-1] != half or 0 in shape:
        raise malformed(
            fqn,
            f"{fqn}_blocks {blocks.info}, expected [experts, rows, blocks, {half}]:"
            f" {file_of(blocks)}",
            CONTRADICTORY,
        )
    *lead, rows, count, _ = shape
    return group_by_names(
        fqn, TensorInfo((*lead, count * GptOssFp4.block, rows), dtype), GptOssFp4(), stored
    )
