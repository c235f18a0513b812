"""Weights in blocks of ggml: codes and scales of a block lie together, and blocks run along rows.

    w [.., rows, width] f32  ->  "" u8 [.., rows, width / values of a block * bytes of a block]

Values are fp32, as ggml and `gguf.quants.dequantize` compute them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.formats.gguf.block_types import BY_NAME, BlockType
from ckptmap.protocols import Encoder, Encoding, Refusal
from ckptmap.quantization.dense import Dense
from ckptmap.quantization.gguf import decoders
from ckptmap.quantization.gguf.codes import GRIDS, codes_of, grid_of, scales_of
from ckptmap.quantization.gguf.encoders import ENCODERS, BlockEncoder
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

SCHEME = "gguf"
VALUES = "float32"


@dataclass(frozen=True)
class GgufBlocks:
    """The encoding of one tensor; `kind` is the name of its type: "Q4_K"."""

    kind: str

    takes = VALUES
    """The dtype of the values that it encodes: `TakesDtype`."""
    only_in = "GGUF"
    """See `planning.encoding_choice.OfOneFormat`."""

    @property
    def name(self) -> str:
        return f"gguf-{self.kind.lower()}"

    @property
    def type(self) -> BlockType:
        return BY_NAME[self.kind]

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        if info.dtype != VALUES:
            return Refusal(f"holds {VALUES}, found {info.dtype}")
        if not info.shape or info.shape[-1] % self.type.numel:
            return Refusal(
                f"has blocks of {self.type.numel}, which do not divide rows of shape {list(info.shape)}"
            )
        *rows, width = info.shape
        return {
            "": TensorInfo((*rows, width // self.type.numel * self.type.nbytes), "uint8"),
        }

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        """Return the whole blocks that the box touches."""
        low, high = self._blocks(box)
        *at, _ = box.offsets
        *rows, _ = box.sizes
        nbytes = self.type.nbytes
        return Box((*at, low * nbytes), (*rows, (high - low) * nbytes))

    def _blocks(self, box: Box) -> tuple[int, int]:
        """Return the first block of each row that the box touches, and the one after the last."""
        if not box.numel:
            return 0, 0
        numel, first = self.type.numel, box.offsets[-1]
        return first // numel, -(-(first + box.sizes[-1]) // numel)

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Decode any box; one that begins or ends inside of a block row by row, in whole blocks."""
        import torch

        if not box.numel:
            return
        numel = self.type.numel
        low, high = self._blocks(box)
        blocks = parts[""].reshape(-1, high - low, self.type.nbytes)
        skip, width = box.offsets[-1] - low * numel, box.sizes[-1]
        if width == (high - low) * numel and out.is_contiguous() and out.dtype == torch.float32:
            decoders.decode(self.kind, blocks.flatten(0, 1), out.view(-1, numel))
            return
        rows = out.reshape(-1, width) if out.is_contiguous() else None
        made = torch.empty(len(blocks), width, dtype=out.dtype, device=out.device)
        target = made if rows is None else rows
        step = max(1, decoders.CHUNK_NUMEL // ((high - low) * numel))
        for first in range(0, len(blocks), step):
            some = blocks[first : first + step]
            room = torch.empty(some.shape[0] * (high - low), numel, device=out.device)
            decoders.decode(self.kind, some.flatten(0, 1), room)
            target[first : first + step] = room.view(len(some), -1).narrow(1, skip, width)
        if rows is None:
            out.copy_(made.view(out.shape))

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        return BlockEncoder(self.kind)

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        """Return why values cannot be encoded: only the types of ENCODERS are made here."""
        if self.kind in ENCODERS:
            return None
        return Refusal(
            f"of GGUF's types, {', '.join(ENCODERS)} are made of values, and {self.kind} is not; all weights"
            " can be written in one of these: --to gguf-q8_0 --config-from MODEL.gguf in place of --as"
        )

    def afresh(self) -> Encoding:
        """Return the encoding that changed values are written in: fp32 where none are encoded here."""
        return self if self.kind in ENCODERS else Dense()

    # ------------------------------------------------------------------ codes as they are

    scales_in_boxes = True
    """Scales lie among codes: see `core.quantized_codes.ScalesAmongCodes`."""

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        return grid_of(self.kind, info.shape)

    def scale_parts(self, info: TensorInfo) -> Sequence[str]:
        return ("",)

    def scales(self, info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows = parts[""].shape[:-1]
        return scales_of(self.kind, parts[""].reshape(-1, self.type.nbytes)).view(*rows, -1)

    def code_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        packed = GRIDS[self.kind].packed
        *at, first = box.offsets
        *rows, count = box.sizes
        return self.part_box(info, part, Box((*at, first * packed), (*rows, count * packed)))

    def codes(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        if not box.numel:
            return
        skip = box.offsets[-1] % (self.type.numel // GRIDS[self.kind].packed)
        codes = codes_of(self.kind, parts[""].reshape(-1, self.type.nbytes))
        out.copy_(codes.reshape(*box.sizes[:-1], -1).narrow(-1, skip, box.sizes[-1]))

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        return record(self.kind, info.shape)


def record(kind: str, shape: tuple[int, ...]) -> dict[str, object]:
    """Return the record of a tensor of a type, by which its bytes are read again."""
    return {"scheme": SCHEME, "version": 1, "type": kind, "shape": list(shape), "dtype": VALUES}
