"""HQQ's weights, as `HQQLinear.state_dict` stores them in safetensors. They are read only.

    fc.weight [out, in] T  ->  fc.W_q    words of codes, see `stripes`
                               fc.scale  T [1, n] (axis 0) or [n, 1] (axis 1)    n groups
                               fc.zero   as fc.scale
                               fc.shape, fc.nbits, fc.axis, fc.compute_dtype, ...    see `hqq_metadata`

    axis 0: group j is w.reshape(group_size, n)[:, j]       axis 1: group i is w.reshape(n, group_size)[i]
    w' = (T(code) - zero) * scale                           each step rounded to T

Source: `Quantizer.dequantize` (hqq 0.2.8, core/quantize.py). Codes of 5 and 6 bits lie in bytes, those of 1.58
bits in two bits. The words may be stored as floats of the same bytes (`view_as_float`). Scales that are
quantized themselves, which older releases pickled, are left to `unsupported_schemes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Groups
from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.protocols.encodings import Records
from ckptmap.protocols.file_systems import ReadsFiles
from ckptmap.quantization.blockwise.group_checks import group_by_names
from ckptmap.quantization.read_only import ReadOnlyScheme
from ckptmap.quantization.striped.hqq_metadata import CODES, HqqMetadata, metadata_of
from ckptmap.quantization.striped.striped_encoding import CodeRows, StripedEncoding
from ckptmap.quantization.striped.stripes import Stripes
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.tensors import ITEMSIZE, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

PACKINGS: Mapping[str, Stripes] = {
    "8bit_u8": Stripes(8, 1, first_is_high=True),
    "4bit_u8": Stripes(4, 2, first_is_high=True),
    "3bit_32": Stripes(3, 10, first_is_high=True),
    "2bit_u8": Stripes(2, 4, first_is_high=True),
    "1bit_u8": Stripes(1, 8, first_is_high=True),
}


@dataclass(frozen=True)
class Hqq(StripedEncoding):
    """HQQ's weights.

    packing  hqq's name of how codes lie in words
    group    elements of a group
    axis     0: a group is a column of the codes, 1: it is a row
    stored   the dtype that the words are stored as
    """

    name: ClassVar[str] = "hqq"
    codes_part: ClassVar[str] = CODES
    scale_part: ClassVar[str] = "scale"
    shift_part: ClassVar[str] = "zero"

    packing: str = "4bit_u8"
    group: int = 64
    axis: int = 1
    stored: str = "uint8"

    def part_key(self, key: str, part: str) -> str:
        """Return the name in the module: `fc.W_q` of `fc.weight`."""
        return f"{key.removesuffix('weight')}{part}"

    @property
    def stripes(self) -> Stripes:
        return PACKINGS[self.packing]

    def layout(self, info: TensorInfo) -> CodeRows | Refusal:
        groups, rest = divmod(info.numel, self.group)
        if rest:
            return Refusal(f"groups of {self.group} do not divide shape {list(info.shape)}")
        if self.axis:
            return CodeRows(groups, self.group)
        return CodeRows(self.group, groups, across=True)

    def packed_parts(self, info: TensorInfo, layout: CodeRows) -> Mapping[str, TensorInfo]:
        itemsize = 4 if self.packing == "3bit_32" else 1
        width = layout.width * itemsize // ITEMSIZE[self.stored]
        scales = TensorInfo((1, layout.width) if layout.across else (layout.rows, 1), info.dtype)
        return {
            CODES: TensorInfo((self.stripes.step(layout.rows), width), self.stored),
            self.scale_part: scales,
            self.shift_part: scales,
        }

    def words(self, stored: torch.Tensor) -> torch.Tensor:
        import torch

        kind = torch.int32 if self.packing == "3bit_32" else torch.uint8
        return stored if stored.dtype == kind else stored.contiguous().view(kind)

    def values(self, codes: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return codes.to(scale.dtype).sub_(shift).mul_(scale)

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        """Return None: its metadata is stored as tensors, which are parts."""
        return None


class HqqScheme(ReadsFiles, ReadOnlyScheme):
    """Recognizes HQQ's weights by the tensors of their metadata."""

    name = "hqq"
    live = "striped"
    unmade = "it is read only: hqq optimizes what it writes; choose -nf4, -bnb-nf4, -int8"

    def example(self, info: TensorInfo) -> Encoding:
        """Return an encoding of this form: see `planning.encoding_forms`."""
        return Hqq()

    def group(self, stored: Mapping[str, StoredTensor], records: Records) -> Groups:
        """Return the groups. Raises SourceError CKM115 where metadata and parts do not fit."""
        ending = StoredParts.of(stored).ending(CODES)
        stems = [key.removesuffix(CODES) for key in ending if _is_codes(key)]
        if not stems:
            return Groups([], [])
        read = metadata_of(stems, stored, self.mounts)
        facts = {f"{stem}weight": metadata for stem, metadata in read.items()}
        return WeightForms(stored).groups(
            facts, lambda fqn, near: _made(fqn, facts[fqn], near), facts.values()
        )


def _is_codes(key: str) -> bool:
    return key.endswith(f".{CODES}") or key == CODES


def _made(
    fqn: str, metadata: HqqMetadata, stored: Mapping[str, StoredTensor]
) -> tuple[Group, Sequence[str]]:
    stem = fqn.removesuffix("weight")
    infos = {name: stored[stem + name].info for name in metadata.names}
    encoding = Hqq(
        tuple((name, info.dtype, info.shape) for name, info in infos.items()),
        metadata.packing, metadata.group, metadata.axis, stored[stem + CODES].info.dtype
        if metadata.is_float else ("int32" if metadata.packing == "3bit_32" else "uint8"),
    )  # fmt: skip
    return group_by_names(fqn, TensorInfo(metadata.shape, metadata.dtype), encoding, stored)
