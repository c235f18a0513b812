"""torchao's NF4: how one tensor is stored in 4 bits, and the encoder that writes it.

    w [...] T, n elements  ->  quantized_data       u8 [n/2], two codes a byte
                               quantized_scalers    i8 [n/block]
                               quantization_factor  T [n/block/scaler_block]
                               scaler_mean          T []
                               nf4                  T [16], the table of values

    w'[i] = nf4[code[i]] * (quantized_scalers[b] / quantization_factor[b // scaler_block] + scaler_mean)

The names are attributes of torchao's NF4Tensor (torchao 0.18); `kernels` holds the arithmetic. T is the
logical dtype and part of the format: the same values in another dtype have other codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.core.formatting import counted
from ckptmap.core.quantized_codes import CodeGrid, Recoder
from ckptmap.errors import RunError
from ckptmap.protocols import Encoder, Refusal, Write
from ckptmap.quantization.blockwise import fourbit
from ckptmap.quantization.nf4 import kernels as nf4_codes
from ckptmap.quantization.nf4.parts import DATA, FACTOR, MEAN, PARTS, SCALERS, TABLE
from ckptmap.quantization.nf4.scales import ExactEncoder, NF4Recoder
from ckptmap.storage.process_guards import one_torch_thread
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch

__all__ = ["DATA", "DTYPES", "FACTOR", "MEAN", "NF4", "PARTS", "SCALERS", "TABLE", "VERSION",
           "NF4Encoder", "default_encoding"]  # fmt: skip

VERSION = 1
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class NF4:
    """The NF4 encoding: `block_size` elements share a scale, `scaler_block_size` scales share a factor.

    `exact` holds any float32 scale without loss: the scaler block is 1, every part but the codes is
    float32, the table is that of bitsandbytes, and decoded values are rounded to T.
    """

    name = "nf4"
    block_size: int = 64
    scaler_block_size: int = 256
    exact: bool = False

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        refusal = self._refusal(info)
        if refusal is not None:
            return refusal
        blocks = info.numel // self.block_size
        dtype = "float32" if self.exact else info.dtype
        return {
            DATA: TensorInfo((info.numel // 2,), "uint8"),
            SCALERS: TensorInfo((blocks,), "int8"),
            FACTOR: TensorInfo((blocks // self.scaler_block_size,), dtype),
            MEAN: TensorInfo((), dtype),
            TABLE: TensorInfo((16,), dtype),
        }

    def _refusal(self, info: TensorInfo) -> Refusal | None:
        if info.dtype not in DTYPES:
            return Refusal(f"NF4 holds {', '.join(DTYPES)}, found {info.dtype}")
        if not 1 <= len(info.shape) <= 2:
            return Refusal(
                f"NF4 holds 1 or 2 dims, as torchao does, found shape {list(info.shape)}"
            )
        if self.block_size < 2 or self.block_size % 2 or self.scaler_block_size < 1:
            return Refusal(
                f"block size {self.block_size} must be even and positive, scaler block size "
                f"{self.scaler_block_size} positive"
            )
        if self.exact and self.scaler_block_size != 1:
            return Refusal(f"exact scales need scaler blocks of 1, not {self.scaler_block_size}")
        blocks, rest = divmod(info.numel, self.block_size)
        if rest or blocks == 0:
            return Refusal(
                f"{info.numel} elements are not a multiple of the block {self.block_size}"
            )
        if blocks % self.scaler_block_size:
            return Refusal(
                f"{blocks} blocks are no multiple of the scaler block {self.scaler_block_size}"
            )
        return None

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        """Return the least range of whole blocks that covers the box's flat span.

        The span runs from the box's first element to its last; factors are those of the blocks in it. The
        range is exact where the box is whole rows (or contiguous) and ends at blocks. A box of columns
        spans nearly all of the tensor.
        """
        if part == MEAN:
            return Box((), ())
        if part == TABLE:
            return Box((0,), (16,))
        first, last = fourbit.blocks_of(info, box, self.block_size)
        if part == FACTOR:
            unit = self.scaler_block_size
            low = first // unit
            return Box((low,), (-(-last // unit) - low,))
        per_block = self.block_size // 2 if part == DATA else 1
        return Box((first * per_block,), ((last - first) * per_block,))

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Decode any box, bit-equal to torchao's `get_original_weight()`.

        Besides the parts it holds one chunk of values, or one row of the box where that is wider.
        """
        if box.numel == 0:
            return
        block, table = self.block_size, parts[TABLE]
        first, last = fourbit.blocks_of(info, box, self.block_size)
        unit = self.scaler_block_size
        scales = nf4_codes.scales(parts[SCALERS], parts[FACTOR], parts[MEAN], unit, first % unit)
        slabs = list(fourbit.slabs(info, box, out))
        widest = max(stop - start for start, stop, _, _ in slabs) + 2 * block
        run = nf4_codes.NF4Dequantizer(min(widest, (last - first) * block), table).run
        for start, stop, part, strides in slabs:
            low, high = start // block - first, -(-stop // block) - first
            scale = scales.narrow(0, low, high - low)
            packed = parts[DATA].narrow(0, low * block // 2, (high - low) * block // 2)
            if start % block == stop % block == 0 and strides == (1,) and _takes(part, table):
                run(packed, scale, part)
            else:
                values = run(packed, scale)
                part.copy_(values.as_strided(part.shape, strides, start - (first + low) * block))

    # ------------------------------------------------------------------ codes

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        codes = TensorInfo((info.numel // 2,), "uint8")
        values = "float32 products, rounded once" if self.exact else f"torchao's, {info.dtype}"
        return CodeGrid("nf4", codes, (self.block_size // 2,), values)

    def scale_parts(self, info: TensorInfo) -> Sequence[str]:
        return (SCALERS, FACTOR, MEAN)

    def scales(self, info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        import torch

        unit, scalers = self.scaler_block_size, parts[SCALERS]
        scales = torch.empty(scalers.shape, dtype=torch.float32)
        for start in range(0, scalers.numel(), nf4_codes.CHUNK_NUMEL):
            some = scalers[start : start + nf4_codes.CHUNK_NUMEL]
            factor = parts[FACTOR][start // unit :]
            part = nf4_codes.scales(some, factor, parts[MEAN], unit, start % unit)
            scales[start : start + some.numel()] = part
        return scales

    def code_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return box if part == DATA else None

    def codes(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        out.copy_(parts[DATA])

    def recoder(self, info: TensorInfo, grid: CodeGrid, device: str) -> Recoder | None:
        mine = self.grid(info)
        if isinstance(self.parts(info), Refusal) or mine is None:
            return None
        if (grid.name, grid.codes, grid.block) != (mine.name, mine.codes, mine.block):
            return None
        fidelity = "exact" if self.exact and grid.values == mine.values else "codes"
        return NF4Recoder(self.block_size, self.scaler_block_size, info.dtype, self.exact, fidelity)

    # ------------------------------------------------------------------ writing

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        if self.exact:
            return ExactEncoder(self.block_size, info, device)
        return NF4Encoder(self, info, device)

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        return {
            "scheme": "nf4",
            "version": VERSION,
            "block_size": self.block_size,
            "scaler_block_size": self.scaler_block_size,
            "shape": list(info.shape),
            "dtype": info.dtype,
            **({"exact": True} if self.exact else {}),
        }


def _takes(out: torch.Tensor, table: torch.Tensor) -> bool:
    """Return whether pairs of values can be written there directly."""
    return out.is_contiguous() and out.dtype == table.dtype and out.storage_offset() % 2 == 0


class NF4Encoder:
    """Writes codes at once and scales at the end, because their mean is over the whole tensor.

    It keeps the absmax of every block, [n/block] T. The statistics are computed on the CPU by one thread,
    so the bytes depend on neither device nor thread count. After `finish`, `sign_flips` counts the blocks
    whose 8-bit scale decodes to zero or less, because an outlier in their scaler block made the step too
    coarse.
    """

    splittable = False

    def __init__(self, encoding: NF4, info: TensorInfo, device: str) -> None:
        import torch

        refusal = encoding.parts(info)
        if isinstance(refusal, Refusal):
            raise ValueError(refusal.reason)
        self._encoding, self._info = encoding, info
        self.step = encoding.block_size
        self.sign_flips = 0
        dtype: torch.dtype = getattr(torch, info.dtype)
        self._quantizer = nf4_codes.NF4Quantizer(info.numel, self.step, dtype, device)
        self._absmax = torch.empty(info.numel // self.step, dtype=dtype, device=device)
        self._missing = info.numel
        absmax_nbytes = self._absmax.numel() * self._absmax.element_size()
        self.state_nbytes = absmax_nbytes + self._quantizer.nbytes

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        """Encode values [m] T, m and `offset` multiples of the block -> codes u8 [m/2]."""
        import torch

        numel = values.numel()
        assert values.dtype == self._absmax.dtype and offset % self.step == numel % self.step == 0
        packed = torch.empty(numel // 2, dtype=torch.uint8, device=values.device)
        absmax = self._absmax.narrow(0, offset // self.step, numel // self.step)
        self._quantizer.run(values, absmax, packed)
        self._missing -= numel
        return (Write(DATA, Box((offset // 2,), (numel // 2,)), packed),)

    def finish(self) -> Iterable[Write]:
        """Yield scalers, factors, mean and table, on the CPU.

        Raises RunError CKM309 where an input was not finite or the scales are too large for T.
        """
        assert self._missing == 0, f"{self._missing} elements of {self._info} were not fed"
        absmax = self._absmax.cpu()
        fourbit.check_finite(absmax, self.step)
        return self._scales(absmax)

    def _scales(self, absmax: torch.Tensor) -> Iterator[Write]:
        unit = self._encoding.scaler_block_size
        with one_torch_thread(True):
            mean = absmax.mean()
        step = max(nf4_codes.CHUNK_NUMEL // unit, 1) * unit
        for start in range(0, absmax.numel(), step):
            part = absmax[start : start + step]
            scalers, factor = nf4_codes.quantize_scalers(part, mean, unit)
            self._check_scales(part, nf4_codes.scales(scalers, factor, mean, unit, 0))
            yield Write(SCALERS, Box((start,), (scalers.numel(),)), scalers)
            yield Write(FACTOR, Box((start // unit,), (factor.numel(),)), factor)
        yield Write(MEAN, Box((0,), (1,)), mean.view(1))
        yield Write(TABLE, Box((0,), (16,)), nf4_codes.value_table(mean.dtype))

    def _check_scales(self, absmax: torch.Tensor, decoded: torch.Tensor) -> None:
        """Raise RunError CKM309 where 2 * max|absmax - mean| exceeds T: factors become 0, scales NaN."""
        if nf4_codes.is_positive(decoded):
            return  # the usual case
        bad = int(decoded.isfinite().logical_not_().sum())
        if bad:
            raise RunError(
                "CKM309",
                f"{counted(bad, 'block scale', 'overflows', 'overflow')} {self._info.dtype}, the largest absolute value is "
                f"{float(absmax.amax()):.6g}",
                "convert to a wider dtype first (--to hf-fp32), or leave it as it is with --no-encode",
            )
        self.sign_flips += int(((decoded <= 0) & (absmax > 0)).sum())


def default_encoding(info: TensorInfo, block: int = 64) -> NF4:
    """Return NF4 with such blocks and the largest scaler block up to 256 that divides their number.

    It follows from the shape alone, so a file does not depend on the world size.
    """
    return NF4(block, math.gcd(256, info.numel // block) or 1)
