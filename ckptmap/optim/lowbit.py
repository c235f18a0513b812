"""Encodings of optimizer moments in 8 or 4 bits: codes, one scale a block, a table of values.

    exp_avg [shape] -> codes, scale f32 [n/block], qmap f32 [256]      value = qmap[code] * scale

Blocks run along the flat, row-major tensor. An optimizer quantizes what its own rank holds, so that
a shard which starts inside a block has blocks of its own, and one that is too small is not
quantized at all. Such a tensor is a list of `cells`, boxes that tile it, one after the other in
every part; without cells it is one run of blocks, whatever the world size was. Where ranks have agreed on the
scales of blocks that their boxes cut (`rounding.shared_scales`), a cell has its own codes, and the scales of
all blocks from its first element to its last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptmap.core.strided_dims import flat_span
from ckptmap.errors import PlanError, SourceError
from ckptmap.optim import lowbit_codes
from ckptmap.optim.block_segments import block_range, segments_of
from ckptmap.protocols import Encoder, Group, Refusal
from ckptmap.protocols.encodings import Record, Records
from ckptmap.quantization.blockwise.dequantize import window
from ckptmap.quantization.read_only import ReadOnlyScheme
from ckptmap.tensors import Box, StoredTensor, TensorInfo, contiguous_strides

if TYPE_CHECKING:
    import torch

VERSION, OF_CUT_BLOCKS = 1, 2
"""Of a record; the second where cells cut the blocks of the whole tensor."""
CODES, SCALE, QMAP, PLAIN = "codes", "scale", "qmap", "plain"
LOGICAL = "float32"
"""The dtype that codes decode to, exactly: every optimizer here computes in it."""


@dataclass(frozen=True)
class LowBitKind:
    """One scheme: dtype of the stored codes, how many codes make one byte, values in the table."""

    codes: str
    packed: int
    table: int


KINDS: Mapping[str, LowBitKind] = {
    "adam8bit": LowBitKind("uint8", 1, 256),  # torchao OptimState8bit
    "adam4bit": LowBitKind("uint8", 2, 16),  # torchao OptimState4bit, first in the high nibble
    "adamfp8": LowBitKind("float8_e4m3fn", 1, 0),  # torchao OptimStateFp8
    "bnb8bit": LowBitKind("uint8", 1, 256),  # bitsandbytes blockwise
}


@dataclass(frozen=True)
class LowBitCell:
    """The box of a moment that one rank held, quantized or plain."""

    box: Box
    quantized: bool


class _CellStart(NamedTuple):
    """Where a cell begins in the parts: its first code, first block and first plain element."""

    code: int
    block: int
    plain: int


@dataclass(frozen=True)
class LowBit:
    """How one moment is stored.

    plain  the dtype of cells that are not quantized
    whole  the tensor's shape, where cells cut the blocks of the whole tensor; (): each cell has its own blocks
    """

    name: str
    block_size: int
    signed: bool
    cells: tuple[LowBitCell, ...] = ()
    plain: str = LOGICAL
    whole: tuple[int, ...] = ()

    @property
    def kind(self) -> LowBitKind:
        return KINDS[self.name]

    # ------------------------------------------------------------------ what is stored

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        if info.dtype != LOGICAL:
            return Refusal(f"{self.name} decodes to {LOGICAL}, found {info.dtype}")
        cells = self._cells(info)
        coded = sum(map(self._codes, cells))
        blocks = sum(self._blocks(cell) for cell in cells)
        parts = {
            CODES: TensorInfo((coded // self.kind.packed,), self.kind.codes),
            SCALE: TensorInfo((blocks,), "float32"),
        }
        if self.kind.table:
            parts[QMAP] = TensorInfo((self.kind.table,), "float32")
        plain = sum(cell.box.numel for cell in cells if not cell.quantized)
        if plain:
            parts[PLAIN] = TensorInfo((plain,), self.plain)
        return parts

    def _cells(self, info: TensorInfo) -> tuple[LowBitCell, ...]:
        return self.cells or (LowBitCell(Box.whole(info.shape), True),)

    def _codes(self, cell: LowBitCell) -> int:
        """Return the codes of a cell, with those that fill its last byte."""
        packed = self.kind.packed
        return -(-cell.box.numel // packed) * packed if cell.quantized else 0

    def _blocks(self, cell: LowBitCell) -> int:
        if self.whole and cell.quantized:
            first, last = block_range(self.whole, cell.box, self.block_size)
            return last - first
        return -(-cell.box.numel // self.block_size) if cell.quantized else 0

    @cached_property
    def _starts(self) -> list[_CellStart]:
        """The start of each cell, and the end of the last one."""
        coded = [self._codes(c) for c in self.cells]
        plain = [0 if c.quantized else c.box.numel for c in self.cells]
        blocks = [self._blocks(c) for c in self.cells]
        runs = (accumulate(counts, initial=0) for counts in (coded, blocks, plain))
        return [_CellStart(*start) for start in zip(*runs, strict=True)]

    def place(self, number: int) -> Mapping[str, Box]:
        """Return the box of a cell in each part."""
        start, end = self._starts[number], self._starts[number + 1]
        packed = self.kind.packed
        spans = {
            CODES: (start.code // packed, end.code // packed),
            SCALE: (start.block, end.block),
            PLAIN: (start.plain, end.plain),
        }
        return {part: Box((a,), (b - a,)) for part, (a, b) in spans.items() if b > a}

    def run(self, start: int, stop: int) -> Mapping[str, Box]:
        """Return the boxes of the codes and scales of whole blocks, from one flat position to another."""
        packed, block = self.kind.packed, self.block_size
        first, last = start // block, -(-stop // block)
        return {
            CODES: Box((start // packed,), ((stop - start) // packed,)),
            SCALE: Box((first,), (last - first,)),
        }

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        """Return the box of a part that covers the flat span of `box` in whole blocks; with cells, all
        cells that it touches."""
        if part == QMAP:
            return Box((0,), (self.kind.table,))
        if self.cells:
            first, last = self._touched(box)
            field = {CODES: 0, SCALE: 1, PLAIN: 2}[part]
            low, high = self._starts[first][field], self._starts[last][field]
            unit = self.kind.packed if part == CODES else 1
            return Box((low // unit,), ((high - low) // unit,))
        start, stop = flat_span(info.shape, box)
        low_block, high_block = start // self.block_size, -(-stop // self.block_size)
        if part == SCALE:
            return Box((low_block,), (high_block - low_block,))
        begin, end = low_block * self.block_size, min(info.numel, high_block * self.block_size)
        packed = self.kind.packed
        return Box((begin // packed,), ((end - begin) // packed,))

    def _touched(self, box: Box) -> tuple[int, int]:
        """Return the numbers of the first cell that shares elements with the box, and past the last."""
        touched = [i for i, cell in enumerate(self.cells) if cell.box.intersect(box)]
        return (touched[0], touched[-1] + 1) if touched else (0, 0)

    # ------------------------------------------------------------------ values

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Fill `out`, bit-equal to `dequantize()` of torchao and of bitsandbytes' blockwise table."""
        if box.numel == 0:
            return
        if self.cells:
            self._decode_cells(parts, box, out)
            return
        start, _ = flat_span(info.shape, box)
        values = self.values(parts)
        first = start // self.block_size * self.block_size
        strides = contiguous_strides(info.shape, 1)
        out.copy_(values.as_strided(box.sizes, strides, start - first))

    def _decode_cells(self, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor) -> None:
        first, last = self._touched(box)
        base = {part: cut.offsets[0] for part, cut in self._bases(first).items()}
        for number in range(first, last):
            cell = self.cells[number]
            common = cell.box.intersect(box)
            if common is None:
                continue
            cell_parts = {
                part: parts[part].narrow(0, cut.offsets[0] - base[part], cut.sizes[0])
                for part, cut in self.place(number).items()
            }
            if QMAP in parts:
                cell_parts[QMAP] = parts[QMAP]
            values = self._cell_values(cell, cell_parts).view(cell.box.sizes)
            inside = common.relative_to(cell.box.offsets)
            view = window(values, inside)
            window(out, common.relative_to(box.offsets)).copy_(view)

    def _cell_values(self, cell: LowBitCell, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if not cell.quantized:
            return parts[PLAIN]
        if not self.whole:
            return self.values(parts)
        codes = parts[CODES]
        segments = segments_of(self.whole, cell.box, self.block_size).on(codes.device)
        return lowbit_codes.decode_each(codes, parts.get(QMAP), segments.of_each(parts[SCALE]))

    def _bases(self, number: int) -> Mapping[str, Box]:
        start = self._starts[number]
        at = {CODES: start.code // self.kind.packed, SCALE: start.block, PLAIN: start.plain}
        return {part: Box((offset,), (0,)) for part, offset in at.items()}

    def values(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return codes of whole blocks as flat float32; only the last block may be short."""
        return lowbit_codes.decode(parts[CODES], self.block_size, parts.get(QMAP), parts[SCALE])

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        """Raise PlanError CKM203: the optimizer's own library encodes moments, in a live run."""
        raise PlanError(
            "CKM203",
            f"{self.name} can be written by a live optimizer only, not into a file",
            "load the checkpoint into that optimizer: ckptmap.load(path, model, optimizer)",
        )

    def record(self, info: TensorInfo) -> Mapping[str, object]:
        record: dict[str, object] = {
            "scheme": self.name,
            "version": OF_CUT_BLOCKS if self.whole else VERSION,
            "block_size": self.block_size,
            "signed": self.signed,
            "shape": list(info.shape),
            "dtype": info.dtype,
        }
        if self.cells:
            record["plain"] = self.plain
            record["cells"] = [
                [list(c.box.offsets), list(c.box.sizes), c.quantized] for c in self.cells
            ]
        return record


def join_cells(
    cells: Sequence[LowBitCell], shape: Sequence[int], block: int
) -> tuple[LowBitCell, ...]:
    """Return the cells in row-major order; none where they are one run of whole blocks. Those that cut blocks of
    the whole tensor, 0 for `block`, stay."""
    ordered = tuple(sorted(cells, key=lambda cell: cell.box.offsets))
    if not block:
        return ordered
    at = 0
    for cell in ordered:
        start, stop = flat_span(shape, cell.box)
        run = stop - start == cell.box.numel and start == at and start % block == 0
        if not (run and cell.quantized):
            return ordered
        at = stop
    return ()


# ------------------------------------------------------------------------------- as read


class LowBitScheme(ReadOnlyScheme):
    """Recognises moments of one kind by their record, or by the class that its library pickles."""

    name = ""

    def group(
        self, stored: Mapping[str, StoredTensor], records: Records
    ) -> list[tuple[Group, Sequence[str]]]:
        """Return the moments that have a record.

        Raises SourceError CKM115 where a record's parts are missing or misshapen.
        """
        return [
            self._from_record(fqn, record, stored)
            for fqn, record in records.items()
            if record.get("scheme") == self.name
        ]

    def _from_record(
        self, fqn: str, record: Record, stored: Mapping[str, StoredTensor]
    ) -> tuple[Group, Sequence[str]]:
        encoding, info = read_record(fqn, record)
        expected_parts = encoding.parts(info)
        if isinstance(expected_parts, Refusal):
            raise malformed(fqn, expected_parts.reason)
        keys = {part: f"{fqn}.{part}" for part in expected_parts}
        for part, expected_info in expected_parts.items():
            tensor = stored.get(keys[part])
            if tensor is None or tensor.info != expected_info:
                text = "nothing" if tensor is None else str(tensor.info)
                raise malformed(
                    fqn, f"{self.name} part {part!r}, expected {expected_info}, found {text}"
                )
        parts = {part: stored[key] for part, key in keys.items()}
        return Group(fqn, info, encoding, parts), tuple(keys.values())

    def encoding(self, info: TensorInfo) -> Refusal:
        return Refusal(f"{self.name} is for the moments of a live optimizer")


def read_record(fqn: str, record: Mapping[str, Any]) -> tuple[LowBit, TensorInfo]:
    """Return the encoding and the moment's info that a record describes.

    Raises SourceError CKM115 where the record is of another version or contradicts itself.
    """
    version = record.get("version")
    if version not in (VERSION, OF_CUT_BLOCKS):
        raise malformed(
            fqn, f"record of version {version!r}, expected {VERSION} or {OF_CUT_BLOCKS}"
        )
    shape, block, signed = (record.get(name) for name in ("shape", "block_size", "signed"))
    sizes_given = list(shape) if isinstance(shape, list | tuple) else [None]
    sizes = [n for n in sizes_given if type(n) is int and n >= 0]
    plain = record.get("plain", LOGICAL)
    fits = len(sizes) == len(sizes_given) and type(block) is int and block > 0
    if not fits or type(signed) is not bool or plain not in ("float32", "bfloat16", "float16"):
        raise malformed(fqn, f"malformed record, found {dict(record)}")
    info = TensorInfo(tuple(sizes), LOGICAL)
    assert isinstance(block, int)
    cells = tuple(_cell(fqn, cell, info) for cell in record.get("cells", ()))
    whole = info.shape if version == OF_CUT_BLOCKS else ()
    return LowBit(str(record["scheme"]), block, signed, cells, plain, whole), info


def _cell(fqn: str, cell: Any, info: TensorInfo) -> LowBitCell:
    try:
        offsets, sizes, quantized = cell
        box = Box(tuple(map(int, offsets)), tuple(map(int, sizes)))
        whole = Box.whole(info.shape)
        if len(box.sizes) != len(info.shape) or whole.intersect(box) != box:
            raise ValueError("leaves the tensor")
    except (TypeError, ValueError) as error:
        raise malformed(fqn, f"malformed cell {cell!r} of {list(info.shape)}") from error
    return LowBitCell(box, bool(quantized))


def malformed(fqn: str, message: str) -> SourceError:
    return SourceError(
        "CKM115", f"{fqn}: {message}", "the checkpoint is damaged: copy it again, or save it again"
    )
