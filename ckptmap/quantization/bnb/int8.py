"""bitsandbytes' LLM.int8: int8 codes with one absmax per row.

    fc.weight [out, in] T  ->  fc.weight        i8 [out, in]
                               fc.SCB           f32 [out], the absmax of each row
                               fc.weight_format u8 [], 0 for rows

    w'[i, j] = code[i, j] * SCB[i] * (1 / 127)        two products in fp32, rounded once to T

As `Linear8bitLt` saves it (bitsandbytes 0.50, nn/modules.py). Files from before 0.38 have no
`weight_format`; those of 0.38 to 0.44 may hold tiles for the kernels of a GPU, which are refused. The file
does not record the dtype of the weights: it is that of the dense tensors. GPT-2 keeps the transpose of its
`Conv1D` weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ckptmap.core.encoding_records import records_of
from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.errors import SourceError
from ckptmap.protocols import Encoder, Encoding, Group, Refusal
from ckptmap.protocols.encodings import Record, Records
from ckptmap.protocols.file_systems import Mounts, ReadsFiles
from ckptmap.quantization.blockwise import block_geometry
from ckptmap.quantization.blockwise.exact_division import divide
from ckptmap.quantization.blockwise.group_checks import (
    contradiction,
    group_by_names,
    refuse_kept_modules,
    refuse_unstated,
)
from ckptmap.quantization.blockwise.model_dtype import model_dtype
from ckptmap.quantization.blockwise.read_config import quantization_config, read_each_small
from ckptmap.quantization.blockwise.rounding_rules import BitsandbytesInt8, RoundingRule
from ckptmap.quantization.blockwise.scaled_encoder import Constants
from ckptmap.quantization.blockwise.scaled_encoding import ScaledEncoding
from ckptmap.quantization.blockwise.scaled_record import read_record
from ckptmap.quantization.bnb.across_encoder import AcrossEncoder, MayLieAcross
from ckptmap.quantization.bnb.config_agreement import kept_modules, require_bits
from ckptmap.quantization.bnb.fourbit_reader import Conv1DModels
from ckptmap.quantization.extra_parts import Extra
from ckptmap.quantization.linear_weights import (
    LinearLayerScheme,
    is_conv1d_weight,
    is_expert,
    is_wide,
)
from ckptmap.quantization.weight_forms import WeightForms, one_of_each_form
from ckptmap.storage.files import Files
from ckptmap.tensors import Box, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

SCB, FORMAT = "SCB", "weight_format"
_TILES = {1: "col32", 2: "col_turing", 3: "col_ampere"}
_FORMAT_PART: Extra = ((FORMAT, "uint8", ()),)


@dataclass(frozen=True)
class BnbInt8(MayLieAcross, ScaledEncoding):
    """LLM.int8, always one scale a row.

    extra       the part `weight_format` where there is one
    transposed  the codes are those of the transpose of the weight, as in GPT-2
    """

    name: ClassVar[str] = "bnb-int8"
    scheme: ClassVar[str] = "bnb-int8"
    codes_part: ClassVar[str] = ""
    scale_part: ClassVar[str] = SCB
    factor: ClassVar[float] = 7.874015718698502e-3
    values_name: ClassVar[str] = "(code * absmax) / 127 in fp32"

    transposed: bool = False

    def part_key(self, key: str, part: str) -> str:
        stem, dot, _ = key.rpartition(".")
        return f"{stem}{dot}{part}" if part else key

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return info.shape[:1]

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        return super().parts(self.stored(info))

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return super().part_box(self.stored(info), part, self.turned_box(box))

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Decode any box; a transposed weight takes a second buffer of its size."""
        turned = self.turned_box(box)
        values = out.new_empty(turned.sizes) if self.transposed else out
        super().decode(self.stored(info), parts, turned, values)
        if self.transposed:
            out.copy_(values.transpose(0, 1))

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        """Return the grid of the codes; None where they lie across: a grid's are those of the weight as it is."""
        return None if self.transposed else super().grid(info)

    def refusal(self, info: TensorInfo) -> Refusal | None:
        if len(info.shape) != 2:
            return Refusal(f"bitsandbytes' int8 holds matrices, found shape {list(info.shape)}")
        return super().refusal(info)

    def rule(self, info: TensorInfo) -> RoundingRule:
        return BitsandbytesInt8()

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        return super().cannot_encode(self.stored(info))

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        made = super().encoder(self.stored(info), device)
        return AcrossEncoder(made, info, device) if self.transposed else made

    def constants(self, info: TensorInfo) -> Constants:
        return {name: (dtype, (0,)) for name, dtype, _ in self.extra}

    def more_record(self, info: TensorInfo) -> Mapping[str, object]:
        return {
            "native": "bitsandbytes",
            "format": bool(self.extra),
            "transposed": self.transposed,
        }

    def scales(self, info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return divide(super().scales(info, parts), 127.0)

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        """Return the recoder, which is never exact: SCB / 127 * 127 is rounded twice in fp32, and is not
        SCB in one of 200 rows."""
        recoder = super().recoder(info, grid, device)
        if recoder is not None:
            recoder.fidelity = "codes"
        return recoder

    def unscaled(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the absmax of each row; infinity, which is refused, where code * absmax would overflow."""
        import torch

        stored = scales * 127.0
        return stored.masked_fill((stored * 128.0).isinf(), torch.inf)


class BnbInt8Scheme(ReadsFiles, LinearLayerScheme):
    """Recognizes LLM.int8 by its key `SCB`, and quantizes the weights of linear layers to it.

    `Conv1D` weights of GPT-2 are held as [in, out], and bitsandbytes quantizes their transpose.
    """

    name = "bnb-int8"
    suffix = "bnb-int8"
    live = "int8"

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups. Raises SourceError CKM115 where parts do not fit, CKM316 for a GPU's tiles."""
        mine = records_of(records, (self.name,))
        groups = WeightForms(stored).recorded(mine, _recorded)
        groups += _found(stored, mine, records, self.mounts)
        if groups:
            config = quantization_config(groups[0][0].parts[""], self.mounts)
            refuse_kept_modules(groups, "", kept_modules(config), config)
            for group in one_of_each_form(groups):
                require_bits(group.fqn, 8, config, group.parts[""])
        return groups

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        encoding = BnbInt8(extra=_FORMAT_PART)
        return encoding.refusal(info) or encoding

    def across(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """Return the encoding for a `Conv1D`: see `planning.weight_encodings.TakesConv1D`."""
        encoding = BnbInt8(extra=_FORMAT_PART, transposed=True)
        return encoding if is_conv1d_weight(fqn, info) else None

    def takes(self, fqn: str) -> bool:
        """Return whether transformers can load the tensor in int8: see `is_expert` and `is_wide`."""
        return not is_expert(fqn) and not is_wide(fqn)

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        return BnbInt8(extra=_FORMAT_PART).keeping(info, grid)

    def quantization_config(
        self, encoded: Mapping[str, TensorInfo], dense: Collection[str]
    ) -> Mapping[str, object]:
        """Return the config as `BitsAndBytesConfig(load_in_8bit=True)` of transformers writes it."""
        return {
            "quant_method": "bitsandbytes",
            "_load_in_4bit": False,
            "_load_in_8bit": True,
            "load_in_4bit": False,
            "load_in_8bit": True,
            "llm_int8_threshold": 6.0,
            "llm_int8_skip_modules": sorted(dense),
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "bnb_4bit_quant_type": "fp4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": "float32",
            "bnb_4bit_quant_storage": "uint8",
        }


def _recorded(
    fqn: str, record: Record, stored: Mapping[str, StoredTensor]
) -> tuple[Group, Sequence[str]]:
    read = read_record(fqn, record, "bnb-int8")
    extra = _FORMAT_PART if record.get("format") else ()
    encoding = BnbInt8(extra=extra, transposed=record.get("transposed") is True)
    group, keys = group_by_names(fqn, read.info, encoding, stored)
    stated = read.scale_dtype, block_geometry.clamped(read.block, read.info.shape)
    if stated != ("float32", encoding.block_of(read.info)):
        raise contradiction(
            fqn, f"its encoding record states {stated[0]} scales of blocks {list(stated[1])}",
            f"SCB {group.parts[SCB].info} has one a row", group.parts[SCB],
        )  # fmt: skip
    unstated = {} if extra else {FORMAT: encoding.part_key(fqn, FORMAT)}
    refuse_unstated(fqn, "its encoding record", unstated, stored)
    return group, keys


def _found(
    stored: Mapping[str, StoredTensor],
    known: Collection[str],
    records: Records,
    mounts: Mounts,
) -> Groups:
    """Return the groups of other writers, recognized by `SCB` beside int8 codes.

    `weight_format` is a number, or in torch files of bitsandbytes before 0.43 a name.
    """
    parts = StoredParts.of(stored)
    scales = [key for key in parts.ending(SCB) if key[:-3][-1:] in ("", ".")]
    dtype = model_dtype(parts, parts.table.numbers_of(scales), "float16") if scales else ""
    codes = {fqn: stored[fqn] for key in scales if (fqn := f"{key[:-3]}weight") in stored}
    codes = {fqn: c for fqn, c in codes.items() if fqn not in known and c.info.dtype == "int8"}
    numbers = {fqn: key for fqn in codes if (key := f"{fqn[:-6]}{FORMAT}") in stored}
    models, files = Conv1DModels(mounts), Files(mounts=mounts)
    try:
        values = read_each_small(parts, parts.table.numbers_of(numbers.values()), files)
    finally:
        files.close()
    rows = dict(zip(numbers, values, strict=True))
    for fqn in codes:
        said = f"{fqn[:-6]}{FORMAT}"
        if fqn in rows:
            _check_rows(fqn, rows[fqn])
        elif said in records:
            _check_name(fqn, str(records[said].get("value")))
    across = {fqn: models.is_conv1d(fqn, stored) for fqn in codes}
    return WeightForms(stored).groups(
        codes,
        lambda fqn, near: _made(fqn, dtype, across[fqn], fqn in rows, near),
        [(across[fqn], fqn in rows) for fqn in codes],
    )


def _made(
    fqn: str, dtype: str, across: bool, numbered: bool, stored: Mapping[str, StoredTensor]
) -> Found:
    info = TensorInfo(stored[fqn].info.shape[:: -1 if across else 1], dtype)
    encoding = BnbInt8(extra=_FORMAT_PART if numbered else (), transposed=across)
    return group_by_names(fqn, info, encoding, stored)


def _check_rows(fqn: str, number: bytes) -> None:
    if any(number):
        _check_name(fqn, _TILES.get(number[0], f"number {number[0]}"))


def _check_name(fqn: str, name: str) -> None:
    if name == "row":
        return
    raise SourceError(
        "CKM316",
        f"{fqn}: stored as the tiles of a GPU kernel, expected rows, found {name}",
        "load it with bitsandbytes 0.38 to 0.44 on such a GPU and save it before the first forward:"
        " then it saves rows",
    )
