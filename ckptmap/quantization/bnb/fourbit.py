"""bitsandbytes NF4 and FP4: how one tensor is stored, decoded, and written from codes that are kept.

    w [...] T, n elements, of FQN P  ->
        P                               codes, two a byte: [ceil(n/2) / itemsize, 1] u8, or the same
                                        bytes in a 16- or 32-bit float dtype
        P.absmax                        f32 [ceil(n/block)]; u8 if double quantized
        P.quant_map                     f32 [16], for information: readers use their own table
        P.nested_absmax                 f32 [ceil(n/block/256)]       double quantized only
        P.nested_quant_map              f32 [256]                     double quantized only
        P.quant_state.bitsandbytes__nf4 u8, JSON: quant_type, blocksize, dtype, shape, and
                                        nested_blocksize, nested_dtype, nested_offset

    w'[i] = table[code[i]] * absmax[i // block]       float32 products, rounded once to T

Source: `QuantState.as_dict` in functional.py of bitsandbytes 0.50. Codes in a float dtype are never read
as floats: many of their bit patterns are NaNs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptmap.core.json_text import parse_json
from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.protocols import Encoder, Refusal
from ckptmap.quantization.blockwise import fourbit
from ckptmap.quantization.bnb import double_quant
from ckptmap.quantization.bnb.across_encoder import AcrossEncoder, MayLieAcross
from ckptmap.quantization.bnb.fourbit_encoder import FourBitEncoder, FourBitRecoder
from ckptmap.tensors import ITEMSIZE, Box, TensorInfo

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32")
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
ABSMAX, MAP, NESTED_ABSMAX, NESTED_MAP = (
    "absmax", "quant_map", "nested_absmax", "nested_quant_map",
)  # fmt: skip
STATE = "quant_state.bitsandbytes__"
VALUES = "float32 products, rounded once"
OFFSET_NBYTES = 32
"""Bytes reserved for the nested offset in the JSON: it is known only after the last element."""


@dataclass(frozen=True)
class Nested:
    """How the absmax is quantized itself; the offset is `nested_offset` in the JSON."""

    block: int = double_quant.BLOCK
    dtype: str = "float32"


@dataclass(frozen=True)
class FourBit(MayLieAcross):
    """The encoding of one tensor: `block` elements share an absmax.

    kind        "nf4" or "fp4"
    nested      how the absmax is double quantized, None where it is not
    storage     dtype that holds the codes
    written     size of the stored JSON in bytes, None for the size written here
    transposed  the codes are those of the transpose: a `Conv1D` of GPT-2, whose logical weight is [in, out]
    turned      the absmax is bf16 [in/block, out], as bitsandbytes 0.50 leaves it after a forward on a CPU
                with AVX512-BF16
    """

    kind: str
    block: int = 64
    nested: Nested | None = None
    storage: str = "uint8"
    written: int | None = None
    transposed: bool = False
    turned: bool = False

    @property
    def name(self) -> str:
        return f"bnb-{self.kind}-dq" if self.nested is not None else f"bnb-{self.kind}"

    @property
    def state(self) -> str:
        """The name of the part that holds the JSON."""
        return STATE + self.kind

    @property
    def host_parts(self) -> Collection[str]:
        return (self.state,)

    def blocks(self, info: TensorInfo) -> int:
        """Return the number of blocks; the last one may be short."""
        return -(-info.numel // self.block)

    # ------------------------------------------------------------------ parts

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        refusal = self._refusal(info)
        if refusal is not None:
            return refusal
        payload = -(-info.numel // 2) // ITEMSIZE[self.storage]
        blocks = self.blocks(info)
        absmax = TensorInfo((blocks,), "uint8" if self.nested else "float32")
        if self.turned:
            rows, columns = self.stored(info).shape
            absmax = TensorInfo((columns // self.block, rows), "bfloat16")
        parts = {"": TensorInfo((payload, 1), self.storage), ABSMAX: absmax}
        parts[MAP] = TensorInfo((16,), "float32")
        if self.nested is not None:
            parts[NESTED_ABSMAX] = TensorInfo((-(-blocks // self.nested.block),), "float32")
            parts[NESTED_MAP] = TensorInfo((256,), "float32")
        nbytes = len(self.blob(info)) if self.written is None else self.written
        parts[self.state] = TensorInfo((nbytes,), "uint8")
        return parts

    def _refusal(self, info: TensorInfo) -> Refusal | None:
        if info.dtype not in DTYPES:
            return Refusal(f"bitsandbytes holds {', '.join(DTYPES)}, found {info.dtype}")
        if self.block not in BLOCKS:
            return Refusal(f"block size {self.block} is not one that bitsandbytes has: {BLOCKS}")
        if info.numel == 0:
            return Refusal("it has no elements")
        if -(-info.numel // 2) % ITEMSIZE[self.storage]:
            return Refusal(f"{info.numel} codes do not fill elements of {self.storage}")
        if self.turned and (
            len(info.shape) != 2 or self.stored(info).shape[1] % self.block or self.nested
        ):
            return Refusal("its 2-D absmax does not fit its shape")
        return None

    def afresh(self) -> FourBit:
        """Return the encoding for new values: nothing of how the old ones were found is kept."""
        return replace(self, written=None, turned=False)

    def blob(self, info: TensorInfo, offset: float = 0.0) -> bytes:
        """Return the JSON part, padded with spaces to a size that does not depend on the offset's digits."""
        state: dict[str, object] = {
            "quant_type": self.kind,
            "blocksize": self.block,
            "dtype": info.dtype,
            "shape": list(self.stored(info).shape),
        }
        if self.nested is None:
            return json.dumps(state).encode()
        state |= {"nested_blocksize": self.nested.block, "nested_dtype": self.nested.dtype}
        room = len(json.dumps(state | {"nested_offset": 0})) + OFFSET_NBYTES
        return json.dumps(state | {"nested_offset": offset}).ljust(room).encode()

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        """Return a record for a transposed tensor, which only config.json would reveal, else None."""
        if not self.transposed:
            return None
        return {"scheme": self.name, "native": "bitsandbytes", "transposed": True}

    # ------------------------------------------------------------------ boxes

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        """Return the least range of whole blocks that covers the box's flat span."""
        stored = self.stored(info)
        first, last = fourbit.blocks_of(stored, self.turned_box(box), self.block)
        if part == "":
            return self._payload(info, first * self.block // 2, last * self.block // 2)
        if part == ABSMAX and self.turned:
            a_row = stored.shape[1] // self.block
            row, stop = first // a_row, -(-last // a_row)
            return Box((0, row), (a_row, stop - row))
        if part == ABSMAX:
            return Box((first,), (last - first,))
        if part == NESTED_ABSMAX and self.nested is not None:
            low = first // self.nested.block
            return Box((low,), (-(-last // self.nested.block) - low,))
        return Box((0,), (self._shared(info, part),))

    def _shared(self, info: TensorInfo, part: str) -> int:
        """Return how many elements of a shared part every box needs: none without nesting."""
        if self.nested is None or part == MAP:
            return 0
        if part == NESTED_MAP:
            return 256
        return len(self.blob(info)) if self.written is None else self.written

    def _payload(self, info: TensorInfo, start: int, stop: int) -> Box:
        """Return the box of stored elements that hold these bytes of codes."""
        itemsize = ITEMSIZE[self.storage]
        low, high = start // itemsize, -(-min(stop, -(-info.numel // 2)) // itemsize)
        return Box((low, 0), (max(0, high - low), 1))

    # ------------------------------------------------------------------ decoding

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Decode any box, bit-equal to the generic `dequantize_4bit` of bitsandbytes."""
        import torch

        if box.numel == 0:
            return
        if self.transposed:
            turned = self.turned_box(box)
            values = torch.empty(turned.sizes, dtype=out.dtype, device=out.device)
            self._decode(self.stored(info), parts, turned, values)
            out.copy_(values.T)
        else:
            self._decode(info, parts, box, out)

    def _decode(
        self, stored: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        import torch

        block = self.block
        first, last = fourbit.blocks_of(stored, box, block)
        packed = parts[""].view(-1).view(torch.uint8)
        absmax = self._absmax(stored, parts, first, last)
        slabs = list(fourbit.slabs(stored, box, out))
        widest = max(stop - start for start, stop, _, _ in slabs) + 2 * block
        numel = min(widest, (last - first) * block)
        run = fourbit.FourBitDequantizer(numel, self.kind, out.device).run
        for start, stop, part, strides in slabs:
            low, high = start // block - first, -(-stop // block) - first
            codes = packed[low * block // 2 : high * block // 2]
            values = run(codes, absmax[low:high], block)
            part.copy_(values.as_strided(part.shape, strides, start - (first + low) * block))

    def _absmax(
        self, stored: TensorInfo, parts: Mapping[str, torch.Tensor], first: int, last: int
    ) -> torch.Tensor:
        """Return the absmax of blocks `first` to `last` - 1 in fp32."""
        import torch

        absmax = parts[ABSMAX]
        if self.turned:
            a_row = stored.shape[1] // self.block
            flat = absmax.T.reshape(-1).float()
            return flat.narrow(0, first - first // a_row * a_row, last - first)
        if self.nested is None:
            return absmax
        block = self.nested.block
        offset = nested_offset(parts[self.state])
        return double_quant.dequantize(
            absmax, parts[NESTED_ABSMAX], parts[NESTED_MAP], offset, block, first % block,
            getattr(torch, self.nested.dtype),
        )  # fmt: skip

    # ------------------------------------------------------------------ codes

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        """Return the grid of the codes, None for a transposed tensor, whose codes are in another order."""
        if self.transposed:
            return None
        codes = TensorInfo((-(-info.numel // 2),), "uint8")
        return CodeGrid(self.kind, codes, (self.block // 2,), VALUES)

    def scale_parts(self, info: TensorInfo) -> Sequence[str]:
        if self.nested is None:
            return (ABSMAX,)
        return (ABSMAX, NESTED_ABSMAX, NESTED_MAP, self.state)

    def scales(self, info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._absmax(self.stored(info), parts, 0, self.blocks(info))

    def code_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        if part != "":
            return None
        return self._payload(info, box.offsets[0], box.offsets[0] + box.sizes[0])

    def codes(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        import torch

        skip = box.offsets[0] % ITEMSIZE[self.storage]
        out.copy_(parts[""].view(-1).view(torch.uint8)[skip : skip + box.sizes[0]])

    # ------------------------------------------------------------------ writing

    def cannot_encode(self, info: TensorInfo) -> Refusal | None:
        """Return why values are not encoded so: double quantization of others."""
        if self.nested not in (None, Nested()):
            return Refusal(
                f"its double quantization is {self.nested}, and bitsandbytes makes {Nested()}"
            )
        return None

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        made = FourBitEncoder(self, info, device)
        return AcrossEncoder(made, info, device) if self.transposed else made

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        mine = self.grid(info)
        if isinstance(self.parts(info), Refusal) or mine is None or self.storage != "uint8":
            return None
        if (grid.name, grid.codes, grid.block) != (mine.name, mine.codes, mine.block):
            return None
        same = grid.values == mine.values and self.nested is None
        return FourBitRecoder(self, info, "exact" if same else "codes")

    # ------------------------------------------------------------------ repair

    def repaired(self) -> FourBit | None:
        """Return the well-formed encoding to write instead, None where this one is well-formed."""
        return replace(self, turned=False, written=None) if self.turned else None

    @property
    def remark(self) -> str:
        """The remark for a tensor that was stored in an unusual way, else ""."""
        if self.turned:
            return (
                "absmax was bf16 and transposed, as bitsandbytes writes it after a forward on a CPU"
                " with AVX512-BF16; it is put right, and exact where the weights were bf16"
            )
        if self.nested is not None and self.nested.dtype != "float32":
            return f"nested absmax was rounded to {self.nested.dtype} by bitsandbytes before it was saved"
        return ""


def nested_offset(state: torch.Tensor) -> float:
    """Return what is added to all scales of a double quantized tensor, from the JSON of its state."""
    offset: float = parse_json(bytes(state.tolist()), allow_nan=True)["nested_offset"]
    return offset
